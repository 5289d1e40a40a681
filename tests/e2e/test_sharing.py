"""Two prefill and two decode workers share the load of 64 concurrent requests, and chats go on
without one of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from e2e.client import all_at_once, connect
from e2e.test_chats import check_tokens, talk
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import draw_jobs

from effuse.cli.fleet import Fleet

CONCURRENT = 64


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with tiny_fleet("sdar", connector="nixl", prefill=2, decode=2) as running:
        yield running


def test_each_worker_serves_at_least_a_quarter(fleet: Fleet) -> None:
    jobs = draw_jobs(3, CONCURRENT, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids)
    with connect(fleet.address) as client:
        answers = all_at_once(lambda job: client.generate(job.message()), jobs)
    decoded = Counter(answer.stats.decode_worker for answer in answers)
    prefilled = Counter(answer.stats.prefill_worker for answer in answers)
    assert set(decoded) == {"decode-0", "decode-1"}
    assert set(prefilled) == {"prefill-0", "prefill-1"}, "a request was prefilled locally"
    assert min(decoded.values()) >= CONCURRENT // 4, decoded
    assert min(prefilled.values()) >= CONCURRENT // 4, prefilled
    assert all(
        answer.stats.kv_bytes == answer.stats.kv_pages * TINY.page_bytes for answer in answers
    )


def test_chats_go_on_without_killed_workers(fleet: Fleet) -> None:
    """Another worker knows nothing of the chats at first."""
    chats = range(4)
    turns, _ = talk(fleet, chats, kills={3: "decode-0", 5: "prefill-1"})
    check_tokens(fleet.config.model, chats, turns)
