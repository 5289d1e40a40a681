"""PrefillService over an engine without a model: start, reservation, and every way to go wrong."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import fake_engine
import fronts
import grpc.aio
import pytest
from eventually import eventually
from fronts import attempt, prefill_start, reservation, running

from effuse.prefill_worker.server import make_role
from effuse.protos.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    EffuseError,
    InvalidRequest,
    Refused,
    Unavailable,
    Unreserved,
    from_rpc_error,
)
from effuse.v1 import worker_pb2 as pb
from effuse.worker.attempts import OpenAttempt
from effuse.worker.config import PrefillConfig, WorkerConfig

CONFIG = WorkerConfig(hang_timeout_s=20.0, log_level="error")
ROLE = make_role(PrefillConfig())
Call = grpc.aio.StreamStreamCall[pb.PrefillRequest, pb.PrefillResponse]


async def opened(
    one: fronts.Running, messages: Sequence[pb.PrefillRequest], *, close: bool = False
) -> Call:
    call = one.prefill.Prefill(timeout=20)
    for message in messages:
        await call.write(message)
    if close:
        await call.done_writing()
    return call


async def event_of(call: Call) -> pb.PrefillResponse:
    """The next event of a prefill, which must not have ended."""
    event = await call.read()
    assert isinstance(event, pb.PrefillResponse)
    return event


async def failure_of(call: Call) -> EffuseError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    return from_rpc_error(caught.value, "the worker")


def test_computing_begins_before_the_reservation_and_the_push_waits_for_it(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(ROLE, CONFIG, tmp_path) as one:
            call = await opened(one, [prefill_start("a", one.incarnation)])
            computed = await event_of(call)
            assert computed.computed == pb.PrefillComputed(queue_s=0.0, compute_s=0.5)
            await call.write(reservation("a"))
            pushed = await event_of(call)
            assert pushed.pushed == pb.PrefillPushed(pages=2, bytes=64, push_s=0.25)
            assert await call.read() is grpc.aio.EOF
            await one.until_free()

    asyncio.run(go())


def test_parts_of_the_prompt_are_reported_where_asked_for(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(ROLE, CONFIG, tmp_path) as one:
            start = prefill_start("a", one.incarnation)
            start.start.progress = True
            call = await opened(one, [start])
            assert (await event_of(call)).progress.computed_tokens == 4
            assert (await event_of(call)).HasField("computed")
            await call.write(reservation("a"))
            assert (await event_of(call)).HasField("pushed")

    asyncio.run(go())


async def until_forgotten(kept: weakref.ref[OpenAttempt]) -> None:
    """Returns once no request holds it any more."""

    def is_gone() -> bool:
        gc.collect()
        return kept() is None

    await eventually(is_gone)


def test_nothing_is_kept_of_a_prefill_that_has_ended(tmp_path: Path) -> None:
    """Not for as long as its reservation could have come: that may be minutes, and prompts many."""

    async def go() -> None:
        async with running(ROLE, CONFIG, tmp_path) as one:
            for name, messages in (("a", [reservation("a")]), ("b", [prefill_start("b", "")])):
                call = await opened(one, [prefill_start(name, one.incarnation)])
                await event_of(call)
                found = one.front.shell.attempts.running.get(f"{name}-1")
                assert found is not None
                kept = weakref.ref(found)
                del found
                await call.write(messages[0])
                with suppress(grpc.aio.AioRpcError):
                    while await call.read() is not grpc.aio.EOF:
                        pass
                await one.until_free()
                await until_forgotten(kept)

    asyncio.run(go())


def test_wrong_streams_are_refused_by_field(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(ROLE, CONFIG, tmp_path) as one:
            life = one.incarnation
            empty = prefill_start("empty", life)
            empty.start.ClearField("prompt_token_ids")
            salted = prefill_start("salted", life)
            salted.start.cache_salt = "s" * 129
            far = reservation("far")
            far.reservation.pages[0].page_id = 8
            twice = reservation("twice")
            twice.reservation.pages[0].page_id = 4
            wrong: list[tuple[str, list[pb.PrefillRequest]]] = [
                ("start", []),
                ("start", [pb.PrefillRequest()]),
                ("start", [reservation("first")]),
                ("prompt_token_ids", [empty]),
                ("start.cache_salt", [salted]),
                ("reservation", [prefill_start("none", life)]),
                ("reservation", [prefill_start("far", life), far]),
                ("reservation", [prefill_start("twice", life), twice]),
                ("reservation.attempt", [prefill_start("mine", life), reservation("other")]),
                ("reservation", [prefill_start("again", life), prefill_start("again", life)]),
            ]
            for field, messages in wrong:
                error = await failure_of(await opened(one, messages, close=True))
                assert isinstance(error, InvalidRequest), (field, error)
                assert [v.field for v in error.violations] == [field], error
            await one.until_free()

    asyncio.run(go())


def test_another_life_a_duplicate_and_an_ended_attempt_are_refused(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(ROLE, CONFIG, tmp_path) as one:
            error = await failure_of(await opened(one, [prefill_start("a", "other-life")]))
            assert isinstance(error, Refused)
            first = await opened(one, [prefill_start("a", one.incarnation)])
            await first.read()
            error = await failure_of(await opened(one, [prefill_start("a", one.incarnation)]))
            assert isinstance(error, AlreadyRunning)
            first.cancel()
            await one.until_free()
            error = await failure_of(await opened(one, [prefill_start("a", one.incarnation)]))
            assert isinstance(error, Refused)

    asyncio.run(go())


def test_a_reservation_that_never_comes_ends_the_attempt(tmp_path: Path) -> None:
    async def go() -> None:
        role = make_role(PrefillConfig(reservation_s=0.1))
        async with running(role, CONFIG, tmp_path) as one:
            error = await failure_of(await opened(one, [prefill_start("a", one.incarnation)]))
            assert isinstance(error, Unreserved)
            assert error.retryable
            await one.until_free()

    asyncio.run(go())


def test_a_silent_client_is_ended_by_its_deadline(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(ROLE, CONFIG, tmp_path) as one:
            error = await failure_of(one.prefill.Prefill(timeout=0.2))
            assert isinstance(error, DeadlineExceeded)

    asyncio.run(go())


def test_an_abort_ends_a_prefill_before_the_answer(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(ROLE, CONFIG, tmp_path) as one:
            call = await opened(one, [prefill_start("a", one.incarnation)])
            await call.read()
            asked = pb.AbortRequest(attempt=attempt("a"), reason="its decode ended")
            answer = await one.worker.Abort(asked, timeout=30)
            assert (answer.was_running, answer.incarnation) == (True, one.incarnation)
            assert (await one.load()).free_pages == fake_engine.PAGES
            assert isinstance(await failure_of(call), Refused)

            asked = pb.AbortRequest(attempt=attempt("late"), reason="its decode ended")
            assert not (await one.worker.Abort(asked, timeout=30)).was_running
            error = await failure_of(await opened(one, [prefill_start("late", one.incarnation)]))
            assert isinstance(error, Refused)

    asyncio.run(go())


def test_a_crash_fails_a_prefill_and_the_next_one_works(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(ROLE, CONFIG, tmp_path) as one:
            old = one.incarnation
            waiting = await opened(one, [prefill_start("wait", old)])
            await waiting.read()
            crash = await opened(one, [prefill_start("crash", old, fake_engine.CRASH)])
            assert isinstance(await failure_of(crash), Unavailable)
            assert isinstance(await failure_of(waiting), Unavailable)
            await one.until_new_life(old)
            call = await opened(one, [prefill_start("a", one.incarnation), reservation("a")])
            await eventually(lambda: len(one.front.shell.attempts) <= 1)
            names = [(await event_of(call)).WhichOneof("event") for _ in range(2)]
            assert names == ["computed", "pushed"]

    asyncio.run(go())
