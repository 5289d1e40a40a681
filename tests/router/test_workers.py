"""Workers as clients see them, and the effect of their links on requests."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest
from router.asking import ask, failure
from router.fakes import FakeFleet, run

from effuse.placement.records import Link, Load, Quarantine, WorkerRecord
from effuse.protos import errors
from effuse.v1 import model_pb2

TEXT = "the answer is three"


def measured(record: WorkerRecord, gbps: float, least: float) -> WorkerRecord:
    """A prefill worker that has measured d0 and asks for `least` GB/s."""
    link = Link("d0", "1", "cuda_ipc", gbps * 1e9)
    return msgspec.structs.replace(record, links=(link,), min_handoff_gbps=least)


def test_workers_are_listed_with_their_loads_and_links() -> None:
    async def body(fleet: FakeFleet) -> None:
        prefill, decode = fleet.prefill[0], fleet.decode[0]
        prefill.record = measured(prefill.record, 213.4, 300.0)
        decode.record = msgspec.structs.replace(
            decode.record,
            state="draining",
            quarantines=(Quarantine("10.0.0.7:50052", 4, 41.5),),
            load=Load(
                running=3, waiting=2, total_pages=256, free_pages=100, quarantined_pages=4,
                queued_tokens=77, blocks_left=9, steps=12, preemptions=1, kv_bytes=4096,
                reserved_pages=5, receiving_pages=6, step_requests=30, step_tokens=480,
                prefix_units=7, prefix_hits=640, kv_tokens=384, kv_room_empty=128,
            ),
        )  # fmt: skip
        await fleet.announce()
        listed = await fleet.models.ListWorkers(model_pb2.ListWorkersRequest())
        assert [one.worker_id for one in listed.workers] == ["d0", "d1", "p0"]
        assert listed.workers[0] == model_pb2.Worker(
            worker_id="d0", role=model_pb2.WORKER_ROLE_DECODE, model="fake",
            address=decode.record.address, state=model_pb2.WORKER_STATE_DRAINING,
            incarnation="1", page_size=16, total_pages=256, free_pages=100, quarantined_pages=4,
            max_num_seqs=64, running=3, waiting=2, queued_tokens=77, blocks_left=9, steps=12,
            preemptions=1, kv_bytes=4096, max_num_batched_tokens=512, ranks=1, context_ranks=1,
            stages=1, reserved_pages=5, receiving_pages=6, step_requests=30, step_tokens=480,
            prefix_units=7, prefix_hits=640, paged_waste=0.25, contiguous_waste=0.5,
            quarantines=[
                model_pb2.WorkerQuarantine(
                    writer="10.0.0.7:50052", pages=4, age=timedelta(seconds=41.5)
                )
            ],
        )  # fmt: skip
        found = listed.workers[2]
        assert (found.role, found.state) == (
            model_pb2.WORKER_ROLE_PREFILL,
            model_pb2.WORKER_STATE_READY,
        )
        assert found.min_handoff_gbps == 300.0
        assert list(found.links) == [
            model_pb2.WorkerLink(
                peer="d0", peer_incarnation="1", transport="cuda_ipc",
                gigabytes_per_second=213.4, refused=True,
            )
        ]  # fmt: skip
        first = await fleet.models.ListWorkers(model_pb2.ListWorkersRequest(page_size=2))
        rest = await fleet.models.ListWorkers(
            model_pb2.ListWorkersRequest(page_size=2, page_token=first.next_page_token)
        )
        assert [one.worker_id for one in (*first.workers, *rest.workers)] == ["d0", "d1", "p0"]
        assert rest.next_page_token == ""

    run(body, num_decode=2)


@pytest.mark.parametrize(
    ("mode", "gbps", "prefill"), [("auto", 3.0, "p0"), ("auto", 1.5, ""), ("remote", 3.0, "p0")]
)
def test_prompts_take_only_links_that_are_fast_enough(mode: str, gbps: float, prefill: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.prefill[0].record = measured(fleet.prefill[0].record, gbps, 2.0)
        await fleet.announce()
        answer = await ask(fleet)
        assert (answer.text, answer.stats.prefill_worker) == (TEXT, prefill)

    run(body, prefill=mode)


def test_a_link_that_moves_nothing_is_told_as_refused_and_why() -> None:
    async def body(fleet: FakeFleet) -> None:
        prefill, decode = fleet.prefill[0], fleet.decode[0]
        link = Link("d0", "1", "zmq here, nixl there", 0.0)
        prefill.record = msgspec.structs.replace(prefill.record, connector="zmq", links=(link,))
        decode.record = msgspec.structs.replace(decode.record, connector="nixl")
        await fleet.announce()
        listed = await fleet.models.ListWorkers(model_pb2.ListWorkersRequest())
        (found,) = listed.workers[1].links
        assert (found.transport, found.refused) == ("zmq here, nixl there", True)
        error = await failure(ask(fleet))
        assert type(error) is errors.Unavailable
        assert error.message == (
            "p0 moves pages with zmq, but d0 with nixl; both need the same --connector"
        )

    run(body, prefill="remote")


def test_where_prefill_is_remote_a_refused_link_is_named_with_its_rate_and_the_flag() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.prefill[0].record = measured(fleet.prefill[0].record, 1.5, 2.0)
        await fleet.announce()
        error = await failure(ask(fleet))
        assert type(error) is errors.Unavailable
        text = "the link from p0 to d0 (cuda_ipc) moves 1.5 GB/s, but --min-handoff-gbps is 2"
        assert error.message == text
        assert error.retry_after_s is not None
        assert not fleet.prefill[0].served

    run(body, prefill="remote")
