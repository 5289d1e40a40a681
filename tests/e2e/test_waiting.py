"""More requests than a fleet can run: all wait their turn, and all are answered."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import mean

import grpc
import pytest
from e2e.client import Client, all_at_once, connect, load_of, wait_until
from e2e.processes import standing_still
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import draw_jobs

from effuse.cli.fleet import Fleet
from effuse.v1 import generation_pb2

CONCURRENT = 32
SOON_S = "1"  # how long a computed prompt waits for pages


def test_more_requests_than_seats() -> None:
    jobs = draw_jobs(5, CONCURRENT, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids)
    with (
        tiny_fleet(
            "sdar",
            connector="zmq",
            decode_flags=("--max-num-seqs", "2"),
        ) as fleet,
        connect(fleet.address) as client,
    ):
        answers = all_at_once(lambda job: client.generate(job.message()), jobs)
        _ask_for_more_than_seats_can_give(client, answers)
    assert all(answer.usage.completion_tokens for answer in answers)
    assert max(answer.stats.queue_duration.ToMicroseconds() for answer in answers) > 0


def _ask_for_more_than_seats_can_give(
    client: Client, answers: Sequence[generation_pb2.GenerateResponse]
) -> None:
    """No request waits and one answer would be in time, but eight take the two seats four times."""
    held_s = mean(
        (stats.total_duration.ToMicroseconds() - stats.queue_duration.ToMicroseconds()) / 1e6
        for stats in (answer.stats for answer in answers)
    )
    (job,) = draw_jobs(5, 1, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids)
    message = replace(job, max_tokens=200).message()
    message.n = 8
    for _ in range(5):  # a busy machine may take all of that time to answer
        with pytest.raises(grpc.RpcError) as caught:
            client.generate(message, timeout_s=2 * held_s)
        if caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            break
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "it has 8 answers" in str(caught.value.details())


def test_reservations_that_are_late_since_pages_are_short() -> None:
    jobs = draw_jobs(6, CONCURRENT, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids)
    names = [f"waiting-{number}" for number in range(CONCURRENT)]
    with (
        tiny_fleet(
            "sdar",
            connector="zmq",
            prefill_flags=("--reservation-s", SOON_S),
            # Room for one request of any length, and seats for all of them.
            decode_flags=("--num-pages", str(TINY.max_model_len // TINY.page_size)),
        ) as fleet,
        connect(fleet.address) as client,
        ThreadPoolExecutor(CONCURRENT) as threads,
    ):
        with standing_still(fleet.processes["decode-0"].pid):
            calls = [
                threads.submit(client.generate, job.message(name))
                for job, name in zip(jobs, names, strict=True)
            ]
            wait_until(
                lambda: any(client.attempt_of(name) == 2 for name in names),
                "no reservation was late",
            )
        answers = [call.result() for call in calls]
        attempts = [client.attempt_of(name) for name in names]
        # Prefill may learn that its last pages have arrived only after the whole answer.
        wait_until(lambda: _holds_nothing(fleet), "pages are left")
    assert all(answer.stats.prefill_worker == "prefill-0" for answer in answers)
    assert max(attempts) == 2, "a late reservation was late again"


def _holds_nothing(fleet: Fleet) -> bool:
    loads = [load_of(fleet.address_of(name)) for name in ("prefill-0", "decode-0")]
    return all(load.free_pages == load.total_pages for load in loads)
