"""Rehearse over an engine without a model: pages are lent, and had back however it ends."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import fake_engine
import grpc.aio
import pytest
from eventually import eventually
from fronts import NOBODY, attempt, prefill_peer, running

from effuse.decode_worker import server
from effuse.decode_worker.server import make_role
from effuse.protos.errors import (
    DeadlineExceeded,
    EffuseError,
    InvalidRequest,
    Overloaded,
    Refused,
    from_rpc_error,
)
from effuse.v1 import worker_pb2 as pb
from effuse.worker.config import WorkerConfig

CONFIG = WorkerConfig(hang_timeout_s=20.0, log_level="error")


def rehearse_request(name: str, incarnation: str, most_pages: int = 1) -> pb.RehearseRequest:
    return pb.RehearseRequest(
        attempt=attempt(name),
        incarnation=incarnation,
        writer=pb.WorkerRef(
            worker_id="p0",
            incarnation="prefill-life",
            address=f"127.0.0.1:{NOBODY}",
            engine_port=NOBODY,
        ),
        most_pages=most_pages,
    )


async def failure_of(
    call: grpc.aio.UnaryStreamCall[pb.RehearseRequest, pb.RehearseResponse],
) -> EffuseError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    return from_rpc_error(caught.value, "the worker")


def test_a_rehearsal_lends_pages_until_they_are_checked(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            call = one.decode.Rehearse(rehearse_request("a", one.incarnation), timeout=20)
            said = [response async for response in call]
            assert [one.WhichOneof("event") for one in said] == ["reservation", "verified"]
            assert said[0].reservation.attempt == attempt("a")
            assert said[1].verified == pb.PrefillVerified(bytes=64, pages=2, handoff_s=0.25)
            count = "effuse_kv_handoff_seconds_count"
            assert one.front.shell.metrics.value(count, {"transport": "fake"}) is None
            await one.until_free()

    asyncio.run(go())


def test_wrong_rehearsals_are_refused_before_anything_is_held(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            life = one.incarnation
            nameless, homeless, portless, lifeless = (
                rehearse_request(name, life) for name in ("n", "h", "p", "l")
            )
            nameless.attempt.transfer_id = ""
            homeless.writer.address = "here"
            portless.writer.engine_port = 0
            lifeless.writer.incarnation = ""
            for request, field in (
                (nameless, "attempt.transfer_id"),
                (homeless, "writer.address"),
                (portless, "writer.engine_port"),
                (lifeless, "writer.incarnation"),
                (rehearse_request("none", life, 0), "most_pages"),
            ):
                error = await failure_of(one.decode.Rehearse(request, timeout=20))
                assert isinstance(error, InvalidRequest), error
                assert [v.field for v in error.violations] == [field]
            other = one.decode.Rehearse(rehearse_request("other", "another-life"), timeout=20)
            assert isinstance(await failure_of(other), Refused)
            busy = rehearse_request("busy", life, fake_engine.NO_ROOM)
            assert isinstance(await failure_of(one.decode.Rehearse(busy, timeout=20)), Overloaded)
            await one.until_free()

    asyncio.run(go())


def test_a_rehearsal_that_breaks_off_holds_its_pages_until_the_writer_has_let_go(
    tmp_path: Path,
) -> None:
    async def go() -> None:
        # Over NIXL writers write into pages themselves.
        config = dataclasses.replace(CONFIG, connector="nixl")
        async with running(make_role(), config, tmp_path) as one, prefill_peer() as (peer, address):
            request = rehearse_request("a", one.incarnation, fake_engine.ENDLESS)
            request.writer.address = address
            request.writer.engine_port = int(address.rpartition(":")[2])  # a process listens there
            call = one.decode.Rehearse(request, timeout=20)
            assert isinstance(await call.read(), pb.RehearseResponse)
            call.cancel()
            await eventually(lambda: peer.asked == ["a-1"])
            load = await one.load()
            assert (load.quarantined_pages, load.free_pages) == (1, fake_engine.PAGES - 1)
            peer.may_answer.set()
            await one.until_free()

    asyncio.run(go())


def test_a_rehearsal_has_a_limit_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_REHEARSAL_S", 0.2)

    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            request = rehearse_request("a", one.incarnation, fake_engine.ENDLESS)
            call = one.decode.Rehearse(request, timeout=20)
            assert isinstance(await failure_of(call), DeadlineExceeded)
            await one.until_free()

    asyncio.run(go())
