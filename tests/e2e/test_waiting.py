"""More requests than a fleet can run: all wait their turn, and all are answered."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
from e2e.client import Client, all_at_once, connect, load_of
from e2e.processes import engine_of
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import draw_jobs

from effuse.v1 import generation_pb2

CONCURRENT = 32
SOON_S = "1"  # how long a computed prompt waits for pages
DEADLINE_S = 60.0


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
    assert all(answer.usage.completion_tokens for answer in answers)
    assert max(answer.stats.queue_s for answer in answers) > 0


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
            until_tried_again(client, names)
        answers = [call.result() for call in calls]
        attempts = [_attempt(client, name) for name in names]
        loads = [load_of(fleet.address_of(name)) for name in ("prefill-0", "decode-0")]
    assert all(answer.stats.prefill_worker == "prefill-0" for answer in answers)
    assert max(attempts) == 2, "a late reservation was late again"
    assert [load.free_pages for load in loads] == [load.total_pages for load in loads]


@contextlib.contextmanager
def standing_still(worker: int) -> Iterator[None]:
    """The worker's engine reserves nothing meanwhile; shorter than it takes to be called hung."""
    engine = engine_of(worker)
    engine.suspend()
    try:
        yield
    finally:
        engine.resume()


def until_tried_again(client: Client, names: Sequence[str]) -> None:
    """Returns when one of the requests is at its second attempt."""
    deadline = time.monotonic() + DEADLINE_S
    while all(_attempt(client, name) < 2 for name in names):
        assert time.monotonic() < deadline, "no reservation was late"
        time.sleep(0.01)


def _attempt(client: Client, name: str) -> int:
    """The request's newest attempt; 0 where the router has not seen it yet."""
    asked = generation_pb2.GetRequestRequest(request_id=name)
    try:
        told: generation_pb2.GetRequestResponse = client.stub.GetRequest(asked, timeout=10)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.NOT_FOUND, error
        return 0
    return told.attempt
