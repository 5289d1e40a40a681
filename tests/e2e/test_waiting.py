"""More requests than a fleet can run: all wait their turn, and all are answered."""

from __future__ import annotations

from e2e.client import Client, all_at_once, connect, load_of
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import draw_jobs

from effuse.v1 import generation_pb2

CONCURRENT = 32
SOON_S = "0.2"  # less than the answers before a request take


def test_more_requests_than_seats() -> None:
    jobs = draw_jobs(5, CONCURRENT, "d2f", block_size=TINY.block_size, ids=TINY.plain_ids)
    with (
        tiny_fleet(
            "sdar",
            connector="zmq",
            prefill_flags=("--reservation-s", SOON_S),
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
    ):
        answers = all_at_once(
            lambda one: client.generate(one[0].message(one[1])), list(zip(jobs, names, strict=True))
        )
        attempts = [_attempts(client, name) for name in names]
        loads = [load_of(fleet.address_of(name)) for name in ("prefill-0", "decode-0")]
    assert all(answer.stats.prefill_worker == "prefill-0" for answer in answers)
    assert max(attempts) == 2, "no reservation was late, or a late one was late again"
    assert [load.free_pages for load in loads] == [load.total_pages for load in loads]


def _attempts(client: Client, name: str) -> int:
    told: generation_pb2.GetRequestResponse = client.stub.GetRequest(
        generation_pb2.GetRequestRequest(request_id=name), timeout=10
    )
    return told.attempt
