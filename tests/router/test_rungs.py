"""Workers that die, refuse or lie: the next rung, and the client's error."""

from __future__ import annotations

import asyncio

import grpc.aio
import msgspec
import pytest
from router.fake_model import BLOCK_SIZE, byte_tokenizer, ids_of
from router.fake_workers import FakeDecode, Point, holds, once, raises
from router.fakes import FakeFleet, run

from effuse.protos import errors
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import worker_pb2

TEXT = "the answer is three"


def decode(ids: list[int]) -> str:
    return str(byte_tokenizer().decode(ids))


async def ask(fleet: FakeFleet, **fields: object) -> pb.GenerateResponse:
    request = pb.GenerateRequest(prompt="how many?", **fields)  # type: ignore[arg-type]
    return await fleet.generation.Generate(request, timeout=30)


async def failure(fleet: FakeFleet, **fields: object) -> errors.EffuseError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(fleet, **fields)
    return errors.from_rpc_error(caught.value, "router")


async def stream(fleet: FakeFleet, **fields: object) -> list[pb.GenerateStreamResponse]:
    request = pb.GenerateRequest(prompt="how many?", **fields)  # type: ignore[arg-type]
    asked = pb.GenerateStreamRequest(request=request)
    return [event async for event in fleet.generation.GenerateStream(asked, timeout=30)]


def text_of(events: list[pb.GenerateStreamResponse]) -> str:
    return "".join(event.commit.text for event in events)


def finds_no_pages(decode: FakeDecode, attempts: int) -> Point:
    """A point that the first attempts never pass. Were a reservation written just as prefill's call
    ends, grpcio might lose how that ended, and the router would try once more."""

    async def wait() -> None:
        if decode.requests[-1].attempt.attempt <= attempts:
            await asyncio.Event().wait()

    return wait


# The fault, and the next rung.


def test_another_prefill_worker_takes_over() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.prefill[0].at["start"] = raises(errors.Overloaded("the queue is full"))
        fleet.prefill[1].at["start"] = fleet.prefill[0].at["start"]
        fleet.decode[0].at["start"] = finds_no_pages(fleet.decode[0], attempts=2)
        answer = await ask(fleet)
        assert answer.text == TEXT
        assert answer.stats.prefill_worker == ""  # both refused: decode did it itself
        # An attempt that failed soon may never have reached the decode worker.
        attempts = {r.attempt.attempt: r.WhichOneof("prefill") for r in fleet.decode[0].requests}
        assert attempts.pop(3) == "local"
        assert set(attempts.values()) <= {"remote"}
        transfers = {r.attempt.transfer_id for r in fleet.decode[0].requests}
        assert len(transfers) == len(fleet.decode[0].requests)

    run(body, num_prefill=2)


@pytest.mark.parametrize("point", ["start", "computed", "reservation"])
def test_a_prefill_worker_that_dies_is_replaced(point: str) -> None:
    async def body(fleet: FakeFleet) -> None:
        victim = fleet.prefill[0]
        victim.at[point] = victim.crash
        if point != "reservation":
            fleet.decode[0].at["start"] = finds_no_pages(fleet.decode[0], attempts=1)
        answer = await ask(fleet)
        assert (answer.text, answer.stats.prefill_worker) == (TEXT, "p1")
        await fleet.decode[0].idle.wait()
        await fleet.decode[0].abort_came.wait()
        # The first attempt may never have reached decode; it is ended there nevertheless.
        last = fleet.decode[0].requests[-1].attempt
        assert last.attempt == 2
        assert len(fleet.decode[0].aborted) == 1
        assert last.transfer_id not in fleet.decode[0].aborted

    run(body, num_prefill=2)


def test_without_another_prefill_worker_and_local_forbidden_it_is_tried_again() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.prefill[0].at["computed"] = once(raises(errors.TransferFailed("no route")))
        fleet.decode[0].at["start"] = finds_no_pages(fleet.decode[0], attempts=1)
        answer = await ask(fleet)
        assert (answer.text, answer.stats.prefill_worker) == (TEXT, "p0")
        assert len(fleet.prefill[0].served) == 2

    run(body, prefill="remote")


def test_a_prefill_worker_that_dies_after_its_push_is_not_missed() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.prefill[0].at["pushed"] = raises(errors.Unavailable("shutting down"))
        reached, go = asyncio.Event(), asyncio.Event()
        fleet.decode[0].at["commit 0"] = holds(go, reached)
        asking = asyncio.create_task(ask(fleet))
        await reached.wait()
        await fleet.prefill[0].idle.wait()
        go.set()
        assert (await asking).text == TEXT
        assert len(fleet.decode[0].requests) == 1

    run(body)


def test_a_prefill_worker_that_never_ends_its_call_holds_nobody_up() -> None:
    async def body(fleet: FakeFleet) -> None:
        pushed = asyncio.Event()
        fleet.prefill[0].at["pushed"] = holds(asyncio.Event(), pushed)
        fleet.decode[0].at["commit 0"] = holds(pushed)
        assert (await ask(fleet)).text == TEXT
        await fleet.idle()
        assert not fleet.prefill[0].aborted

    run(body)


def test_a_resumption_that_is_refused_is_not_the_callers_fault() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["commit 2"] = fleet.decode[0].crash
        fleet.decode[1].at["start"] = raises(errors.InvalidRequest.of("resume", "no such frontier"))
        error = await failure(fleet)
        assert type(error) is errors.Unavailable
        assert "could not be resumed" in error.message

    run(body, num_decode=2)


def test_channels_of_workers_that_are_gone_are_closed() -> None:
    async def body(fleet: FakeFleet) -> None:
        await ask(fleet)
        victim = fleet.decode[0].record.address
        peer = fleet.router.fleet.peers.at(victim)
        fleet.decode[0].record = msgspec.structs.replace(fleet.decode[0].record, state="released")
        await fleet.announce()
        await fleet.router.fleet.forget_ended()
        assert fleet.router.fleet.peers.at(victim) is not peer

    run(body)


@pytest.mark.parametrize("commits", [0, 1, 3])
def test_a_decode_worker_that_dies_is_resumed_by_another_exactly(commits: int) -> None:
    async def body(fleet: FakeFleet) -> None:
        first, second = fleet.decode
        first.at[f"commit {commits}"] = first.crash
        events = await stream(fleet, output=pb.OutputOptions(token_ids=True))
        assert text_of(events) == TEXT
        ids = [one for event in events for one in event.commit.token_ids]
        assert ids == ids_of(TEXT)
        (request,) = second.requests
        assert request.attempt.attempt == 2
        done = commits * BLOCK_SIZE
        assert list(request.resume.committed_token_ids) == ids_of(TEXT)[:done]
        assert request.HasField("resume") == (commits > 0)
        if commits:
            assert request.resume.frontier[0].denoise_count == done
        stats = events[-1].finished.stats
        assert (stats.decode_worker, stats.forward_passes) == ("d1", len(ids) + done)

    run(body, num_decode=2)


def test_a_step_that_failed_at_one_decode_worker_is_gone_on_with_at_another() -> None:
    async def body(fleet: FakeFleet) -> None:
        for worker in fleet.decode:
            worker.at["commit 2"] = broken
        assert (await ask(fleet)).text == TEXT
        assert sorted(len(worker.requests) for worker in fleet.decode) == [1, 1]

    broken = once(raises(errors.Bug("the model failed in this step", retryable=True)))
    run(body, num_decode=2)


def test_a_request_that_loses_worker_after_worker_is_taken_for_the_cause() -> None:
    async def body(fleet: FakeFleet) -> None:
        for worker in fleet.decode:
            worker.at["reserved"] = raises(errors.Unavailable("engine restarts"))
        error = await failure(fleet)
        assert type(error) is errors.Unavailable
        assert not error.retryable and error.retry_after_s is None
        assert "the request lost 3 workers in a row; 0 of 245 tokens" in error.message
        assert "3 attempts lost (d0: engine restarts; d1: engine" in error.message
        assert error.labels == {"losses": "3", "refusals": "0", "tokens": "0"}
        assert sum(len(worker.requests) for worker in fleet.decode) == 3

    run(body, num_prefill=0, num_decode=5, max_losses=2)


def test_losses_between_blocks_are_not_counted_together() -> None:
    async def body(fleet: FakeFleet) -> None:
        for at in range(4):
            fails = once(raises(errors.Unavailable("a step failed")))
            for worker in fleet.decode:
                worker.at[f"commit {at}"] = fails
        assert (await ask(fleet)).text == TEXT
        assert sum(len(worker.requests) for worker in fleet.decode) == 5

    run(body, num_prefill=0, num_decode=2, max_losses=1)


@pytest.mark.parametrize(
    "told",
    [
        errors.InvalidRequest.of("stopping.max_tokens", "needs 900 pages, the pool has 256"),
        errors.Overloaded("needs 900 pages, the pool has 256", retryable=False),
        errors.Bug.logged("abc"),
    ],
    ids=["caller", "never fits", "bug"],
)
def test_what_no_worker_can_do_is_told_atonce(told: errors.EffuseError) -> None:
    async def body(fleet: FakeFleet) -> None:
        for worker in fleet.decode:
            worker.at["start"] = raises(told)
        error = await failure(fleet)
        assert type(error) is type(told)
        assert "pages" in error.message or "internal error" in error.message
        assert sum(len(worker.requests) for worker in fleet.decode) == 1

    run(body, num_prefill=0, num_decode=2)


@pytest.mark.parametrize("field", ["attempt.attempt", "reservation", "settings.window"])
def test_what_a_worker_does_not_take_of_the_routers_own_is_not_the_callers_fault(
    field: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["start"] = raises(errors.InvalidRequest.of(field, "expected another"))
        error = await failure(fleet)
        assert type(error) is errors.Bug
        assert "internal error" in error.message and field not in error.message
        assert f"d0 refuses the router's message: {field}" in caplog.text

    run(body, num_prefill=0)


def test_a_handoff_that_failed_at_decode_goes_on_with_another_prefill_worker() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.prefill[0].at["reservation"] = holds(asyncio.Event())
        fleet.decode[0].at["reserved"] = once(raises(errors.TransferFailed("digest of page 3")))
        answer = await ask(fleet)
        assert (answer.text, answer.stats.decode_worker) == (TEXT, "d0")
        assert answer.stats.prefill_worker == "p1"

    run(body, num_prefill=2)


def test_a_late_reservation_is_nobodys_fault_and_then_comes_first() -> None:
    async def body(fleet: FakeFleet) -> None:
        (prefill,), (decode,) = fleet.prefill, fleet.decode
        waiting = [asyncio.Event(), asyncio.Event()]
        second_turn = asyncio.Event()

        async def queue() -> None:
            waiting[len(decode.requests) - 1].set()
            await second_turn.wait()

        async def give_up() -> None:
            await waiting[0].wait()
            raise errors.Unreserved("no reservation came")

        decode.at["start"] = queue  # no free page yet
        prefill.at["computed"] = once(give_up)
        asking = asyncio.create_task(ask(fleet))
        await waiting[1].wait()
        assert (len(decode.requests), len(prefill.served)) == (2, 1)
        second_turn.set()
        answer = await asking
        assert (answer.text, answer.stats.prefill_worker) == (TEXT, "p0")
        assert (len(decode.requests), len(prefill.served)) == (2, 2)
        assert fleet.metric("effuse_retries_total") == 0

    run(body, max_losses=0, prefill="remote")


# A worker that breaks the protocol.


def gap(response: worker_pb2.DecodeResponse) -> None:
    response.commit.token_offset += 1


def change(response: worker_pb2.DecodeResponse) -> None:
    response.commit.token_offset = 0


def early_end(response: worker_pb2.DecodeResponse) -> None:
    num_tokens = response.commit.token_offset + 40
    response.finished.CopyFrom(worker_pb2.DecodeFinished(stopped=True, num_tokens=num_tokens))


def foreign(response: worker_pb2.DecodeResponse) -> None:
    response.reservation.incarnation = "another life"


def second_reservation(response: worker_pb2.DecodeResponse) -> None:
    response.reservation.SetInParent()


@pytest.mark.parametrize("breaking", [gap, change, early_end, second_reservation])
def test_commits_that_do_not_continue_end_the_attempt(breaking: object) -> None:
    async def body(fleet: FakeFleet) -> None:
        def twist(response: worker_pb2.DecodeResponse) -> worker_pb2.DecodeResponse:
            if response.commit.token_offset == BLOCK_SIZE:
                breaking(response)  # type: ignore[operator]
            return response

        fleet.decode[0].twist = twist
        events = await stream(fleet)
        assert text_of(events) == TEXT
        assert events[-1].finished.stats.decode_worker == "d1"

    run(body, num_decode=2)


def test_a_reservation_of_another_life_is_refused() -> None:
    async def body(fleet: FakeFleet) -> None:
        def twist(response: worker_pb2.DecodeResponse) -> worker_pb2.DecodeResponse:
            if response.HasField("reservation"):
                foreign(response)
            return response

        fleet.decode[0].twist = twist
        assert (await ask(fleet)).stats.decode_worker == "d1"

    run(body, num_decode=2)


def test_repeated_commits_are_trimmed() -> None:
    async def body(fleet: FakeFleet) -> None:
        def twist(response: worker_pb2.DecodeResponse) -> worker_pb2.DecodeResponse:
            if response.commit.token_offset == 2 * BLOCK_SIZE:
                ids = ids_of(TEXT)[: 3 * BLOCK_SIZE]
                response.commit.token_offset = 0
                response.commit.token_ids[:] = ids
            return response

        fleet.decode[0].twist = twist
        events = await stream(fleet)
        assert text_of(events) == TEXT
        assert len({worker.worker_id for worker in fleet.decode if worker.requests}) == 1

    run(body, num_prefill=0, num_decode=1)
