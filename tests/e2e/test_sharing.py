"""Two prefill and two decode workers share the load of 64 concurrent requests."""

from __future__ import annotations

from collections import Counter

from e2e.client import all_at_once, connect
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import draw_jobs

CONCURRENT = 64


def test_each_worker_serves_at_least_a_quarter() -> None:
    jobs = draw_jobs(3, CONCURRENT, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids)
    with (
        tiny_fleet("sdar", connector="zmq", prefill=2, decode=2) as fleet,
        connect(fleet.address) as client,
    ):
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
