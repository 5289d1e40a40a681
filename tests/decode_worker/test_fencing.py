"""Fencing of writers, over an engine without a model: waits, reports and refusals."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import fake_engine
import pytest
from eventually import eventually
from fronts import (
    NOBODY,
    attempt,
    decode_request,
    event_of,
    events_of,
    failure_of,
    prefill_peer,
    running,
)
from msgspec.structs import astuple

from effuse.decode_worker.server import make_role
from effuse.protos.errors import TransferFailed, Unavailable
from effuse.v1 import worker_pb2 as pb
from effuse.worker import attempts
from effuse.worker.config import WorkerConfig
from effuse.worker.engine_process import listen_while_alive

CONFIG = WorkerConfig(hang_timeout_s=20.0, log_level="error")
ONE_SIDED = dataclasses.replace(CONFIG, connector="nixl")  # writers write into pages themselves


def remote_request(
    name: str, incarnation: str, address: str, engine_port: int = NOBODY
) -> pb.DecodeRequest:
    request = decode_request(name, incarnation)
    request.remote.CopyFrom(
        pb.WorkerRef(
            worker_id="p0", incarnation="prefill-life", address=address, engine_port=engine_port
        )
    )
    return request


@asynccontextmanager
async def alive() -> AsyncIterator[int]:
    """The port of a prefill engine that lives as long as the context."""
    with listen_while_alive("127.0.0.1") as sign_of_life:
        yield sign_of_life.getsockname()[1]


def test_pages_are_free_only_once_the_writer_has_let_go(tmp_path: Path) -> None:
    async def go() -> None:
        async with (
            running(make_role(), ONE_SIDED, tmp_path) as one,
            prefill_peer() as (peer, address),
            alive() as engine_port,
        ):
            request = remote_request("a", one.incarnation, address, engine_port)
            call = one.decode.Decode(request, timeout=20)
            assert (await event_of(call)).HasField("reservation")
            call.cancel()
            await eventually(lambda: peer.asked == ["a-1"])
            load = await one.load()
            assert (load.quarantined_pages, load.free_pages) == (1, fake_engine.PAGES - 1)
            # Operators see the writer for which pages wait, in log, metric and list.
            ((writer, pages, age_s),) = map(astuple, one.front.shell.quarantines.listed())
            assert (writer, pages) == (address, 2)
            assert age_s > 0
            metric, by = one.front.shell.metrics.value, {"writer": address}
            assert metric("effuse_kv_quarantine_pages", by) == 2
            assert (metric("effuse_kv_quarantine_age_seconds", by) or 0) > 0
            record = one.front.shell.record()
            assert record is not None
            assert [held.writer for held in record.quarantines] == [address]
            # A client that cancelled may meanwhile send the same id again.
            anew = decode_request("a", one.incarnation)
            anew.attempt.transfer_id = "anew"
            assert len(await events_of(one.decode.Decode(anew, timeout=20))) == 6
            peer.may_answer.set()
            await one.until_free()
            assert not one.front.shell.quarantines.listed()

    asyncio.run(go())


def test_over_zmq_no_writer_keeps_pages_from_others(tmp_path: Path) -> None:
    """Bytes from an abandoned writer are not placed, so there is no need to wait for it."""

    async def go() -> None:
        async with (
            running(make_role(), CONFIG, tmp_path) as one,
            prefill_peer() as (peer, address),
            alive() as engine_port,
        ):
            for name in ("a", "b"):
                request = remote_request(name, one.incarnation, address, engine_port)
                call = one.decode.Decode(request, timeout=20)
                assert (await event_of(call)).HasField("reservation")
                call.cancel()
            await one.until_free()
            await eventually(lambda: len(one.front.shell.attempts) == 0)
            assert peer.asked == []

    asyncio.run(go())


def test_a_writer_that_does_not_let_go_gets_no_more_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "SILENT_S", 0.0)

    async def go() -> None:
        async with (
            running(make_role(), ONE_SIDED, tmp_path) as one,
            prefill_peer() as (peer, address),
            alive() as engine_port,
        ):
            request = remote_request("a", one.incarnation, address, engine_port)
            call = one.decode.Decode(request, timeout=20)
            assert (await event_of(call)).HasField("reservation")
            call.cancel()
            await eventually(lambda: peer.asked == ["a-1"])
            again = remote_request("b", one.incarnation, address, engine_port)
            error = await failure_of(one.decode.Decode(again, timeout=20))
            assert isinstance(error, TransferFailed)
            assert address in error.message and "has not released pages" in error.message
            again.remote.incarnation, again.remote.engine_port = "next-life", NOBODY
            other = one.decode.Decode(again, timeout=20)
            assert (await event_of(other)).HasField("reservation")
            other.cancel()
            peer.may_answer.set()
            await one.until_free()

    asyncio.run(go())


def test_a_writer_that_is_dead_is_not_waited_for(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), ONE_SIDED, tmp_path) as one:
            async with prefill_peer() as (_, address):
                pass  # its port is closed now
            call = one.decode.Decode(remote_request("a", one.incarnation, address), timeout=20)
            assert (await event_of(call)).HasField("reservation")
            call.cancel()
            await one.until_free()

    asyncio.run(go())


def test_a_lost_engine_asks_no_writer(tmp_path: Path) -> None:
    async def go() -> None:
        async with (
            running(make_role(), ONE_SIDED, tmp_path) as one,
            prefill_peer() as (peer, address),
        ):
            old = one.incarnation
            call = one.decode.Decode(remote_request("a", old, address), timeout=20)
            assert (await event_of(call)).HasField("reservation")
            crash = decode_request("crash", old, fake_engine.CRASH)
            await failure_of(one.decode.Decode(crash, timeout=20))
            assert isinstance(await failure_of(call), Unavailable)
            await one.until_new_life(old)
            assert peer.asked == []
            await one.until_free()
            # Nor is this worker waited for by others: it has seen the end of that engine.
            for life, is_over in ((old, True), (one.incarnation, False), ("unheard-of", False)):
                asked = pb.AbortRequest(attempt=attempt("never"), incarnation=life)
                answer = await one.worker.Abort(asked, timeout=20)
                assert answer.life_is_over is is_over

    asyncio.run(go())
