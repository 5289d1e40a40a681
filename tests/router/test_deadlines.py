"""Deadlines, the client's and the fleet's: where they end a request, and its records."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from router.asking import ask, failure, request
from router.fake_workers import holds, raises
from router.fakes import FakeFleet, pass_time, run
from slowness import patient

from effuse.protos import errors
from effuse.router.client import why_gone
from effuse.v1 import generation_pb2 as pb

TEXT = "the answer is three"


def test_a_deadline_in_the_queue_and_on_a_worker() -> None:
    async def body(fleet: FakeFleet) -> None:
        reached = asyncio.Event()
        fleet.decode[0].at["commit 1"] = holds(asyncio.Event(), reached)
        call = fleet.generation.Generate(request(request_id="slow"))
        asking = asyncio.create_task(failure(call))
        await reached.wait()
        pass_time(300.0)
        error = await asking
        assert type(error) is errors.DeadlineExceeded
        assert "not answered within 300 s" in error.message
        await fleet.idle()
        await fleet.decode[0].abort_came.wait()
        state = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="slow"))
        assert state.state == pb.REQUEST_STATE_CANCELLED
        assert state.status == "DEADLINE_EXCEEDED"
        fleet.decode[0].at.clear()
        assert (await ask(fleet)).text == TEXT

    run(body, timeout_s=1000.0, max_request_s=300.0)


def test_the_clients_deadline_reaches_the_workers() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["reserved"] = holds(asyncio.Event())
        call = fleet.generation.Generate(request(request_id="slow"), timeout=patient(2.0))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await fleet.idle()
        state = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="slow"))
        assert (state.state, state.status) == (pb.REQUEST_STATE_CANCELLED, "DEADLINE_EXCEEDED")

    run(body)


@pytest.mark.parametrize(
    ("elapsed_s", "limit_s", "kind"),
    [
        (0.295, 0.3, errors.DeadlineExceeded),
        (10.001, 10.097, errors.DeadlineExceeded),  # 10.01 s, as it came out of gRPC's header
        (12.335, 12.396, errors.DeadlineExceeded),
        (0.2, 0.3, errors.Cancelled),
        (9.0, 10.097, errors.Cancelled),
        (60.0, 3600.0, errors.Cancelled),
    ],
)
def test_a_client_that_leaves_at_its_deadline_did_not_cancel(
    elapsed_s: float, limit_s: float, kind: type[errors.EffuseError]
) -> None:
    assert type(why_gone(elapsed_s, limit_s)) is kind


def test_a_deadline_that_a_worker_tells_of_is_no_failure() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["start"] = raises(errors.DeadlineExceeded("too late"))
        await failure(ask(fleet, request_id="late"))
        state = await fleet.generation.GetRequest(pb.GetRequestRequest(request_id="late"))
        assert state.state == pb.REQUEST_STATE_CANCELLED
        await fleet.store.until(lambda held: "late" in held and held["late"].state == "cancelled")

    run(body)
