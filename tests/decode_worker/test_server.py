"""DecodeService over an engine without a model: forms, ends of a stream, and fencing of writers."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import fake_engine
import fronts
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
from effuse.protos.errors import (
    AlreadyRunning,
    Bug,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Refused,
    TransferFailed,
    Unavailable,
)
from effuse.v1 import worker_pb2 as pb
from effuse.worker import quarantines
from effuse.worker.config import WorkerConfig
from effuse.worker.engine_process import listen_while_alive

CONFIG = WorkerConfig(hang_timeout_s=20.0, log_level="error")
ONE_SIDED = dataclasses.replace(CONFIG, connector="nixl")  # writers write into pages themselves
NAN = float("nan")


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
    """The port of a prefill engine that lives for as long as the context."""
    with listen_while_alive("127.0.0.1") as sign_of_life:
        yield sign_of_life.getsockname()[1]


def test_all_of_an_answer_arrives_in_order(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            request = decode_request("a", one.incarnation)
            request.drafts = True
            events = await events_of(one.decode.Decode(request, timeout=20))
            held = events[0].reservation
            assert (held.attempt, held.incarnation) == (attempt("a"), one.incarnation)
            assert [(p.page_id, p.generation) for p in held.pages] == [(3, 1), (4, 9)]
            commits = [event.commit for event in events if event.HasField("commit")]
            assert [(c.token_offset, list(c.token_ids)) for c in commits] == [
                (0, [7]),
                (1, [7]),
                (2, [7]),
            ]
            assert commits[0].frontier[0] == pb.BlockState(
                token_ids=[7, 99], masks=b"\x02", full=True, denoise_count=0
            )
            drafts = [event.draft for event in events if event.HasField("draft")]
            assert [draft.token_offset for draft in drafts] == [0, 1, 2]
            assert events[-1].finished == pb.DecodeFinished(num_tokens=3, forward_passes=3)

    asyncio.run(go())


Change = Callable[[pb.DecodeRequest], object]
WRONG: list[tuple[str, Change]] = [
    ("attempt.request_id", lambda r: r.attempt.ClearField("request_id")),
    ("attempt.transfer_id", lambda r: setattr(r.attempt, "transfer_id", "t" * 129)),
    ("attempt.attempt", lambda r: setattr(r.attempt, "attempt", 0)),
    ("prompt_token_ids", lambda r: r.ClearField("prompt_token_ids")),
    ("max_tokens", lambda r: setattr(r, "max_tokens", 0)),
    ("max_tokens", lambda r: setattr(r, "max_tokens", 1 << 31)),
    ("sampling.temperature", lambda r: setattr(r.sampling, "temperature", NAN)),
    ("sampling.temperature", lambda r: setattr(r.sampling, "temperature", -1.0)),
    ("sampling.temperature", lambda r: setattr(r.sampling, "temperature", float("inf"))),
    ("sampling.top_p", lambda r: setattr(r.sampling, "top_p", 0.0)),
    ("sampling.top_p", lambda r: setattr(r.sampling, "top_p", NAN)),
    ("settings.window", lambda r: setattr(r.settings, "window", 0)),
    ("settings.denoising_steps", lambda r: setattr(r.settings, "denoising_steps", 0)),
    ("settings.confidence_threshold", lambda r: setattr(r.settings, "confidence_threshold", NAN)),
    ("settings.block_add_threshold", lambda r: setattr(r.settings, "block_add_threshold", 1.1)),
    ("settings.algorithm", lambda r: setattr(r.settings, "algorithm", "magic")),
    ("settings.score", lambda r: r.settings.ClearField("score")),
    ("settings.remasking", lambda r: setattr(r.settings, "remasking", "all")),
    ("prefill", lambda r: r.ClearField("local")),
    ("remote.address", lambda r: r.remote.CopyFrom(pb.WorkerRef(address="nowhere"))),
    ("remote.address", lambda r: r.remote.CopyFrom(pb.WorkerRef(address="host:99999"))),
    ("remote.incarnation", lambda r: r.remote.CopyFrom(pb.WorkerRef(address="host:1"))),
    (
        "remote.engine_port",
        lambda r: r.remote.CopyFrom(pb.WorkerRef(address="host:1", incarnation="i")),
    ),
    (
        "resume.frontier[0].token_ids",
        lambda r: r.resume.frontier.add(token_ids=[1], masks=b"\0"),
    ),
    (
        "resume.frontier[0].masks",
        lambda r: r.resume.frontier.add(token_ids=[1, 2], masks=b"\0\0"),
    ),
]


def test_every_wrong_field_is_named_and_nothing_is_held(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            for field, change in WRONG:
                request = decode_request("wrong", one.incarnation)
                change(request)
                error = await failure_of(one.decode.Decode(request, timeout=20))
                assert isinstance(error, InvalidRequest), (field, error)
                assert [v.field for v in error.violations] == [field]
                assert "expected" in error.message
            assert len(one.front.shell.attempts) == 0
            # The same transfer id is still good: it was never admitted.
            good = one.decode.Decode(decode_request("wrong", one.incarnation), timeout=20)
            assert len(await events_of(good)) == 6

    asyncio.run(go())


def test_what_the_engine_refuses_reaches_the_caller(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            full = decode_request("full", one.incarnation, fake_engine.NO_ROOM)
            error = await failure_of(one.decode.Decode(full, timeout=20))
            assert isinstance(error, Overloaded)
            assert error.message == "no 3 pages are free of 8"
            assert error.retry_after_s is not None
            broken = decode_request("broken", one.incarnation, fake_engine.BROKEN)
            error = await failure_of(one.decode.Decode(broken, timeout=20))
            assert isinstance(error, Bug)
            assert "secret" not in error.message
            await one.until_free()

    asyncio.run(go())


@pytest.mark.parametrize("incarnation", ["", "another-life"])
def test_a_request_for_another_life_is_refused(tmp_path: Path, incarnation: str) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            call = one.decode.Decode(decode_request("a", incarnation), timeout=20)
            error = await failure_of(call)
            assert isinstance(error, Refused)
            assert one.incarnation in error.message

    asyncio.run(go())


def test_an_attempt_that_runs_or_has_ended_is_not_taken_again(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            endless = decode_request("a", one.incarnation, fake_engine.ENDLESS)
            first = one.decode.Decode(endless, timeout=20)
            await first.read()
            same_transfer, same_try = (
                decode_request("b", one.incarnation),
                decode_request("a", one.incarnation),
            )
            same_transfer.attempt.transfer_id = endless.attempt.transfer_id
            same_try.attempt.transfer_id = "other"
            for request in (endless, same_transfer, same_try):
                error = await failure_of(one.decode.Decode(request, timeout=20))
                assert isinstance(error, AlreadyRunning)
            # The next attempt at the same request may run beside the one that is ending.
            second = decode_request("a", one.incarnation)
            second.attempt.CopyFrom(attempt("a", 2))
            assert len(await events_of(one.decode.Decode(second, timeout=20))) == 6
            first.cancel()
            await one.until_free()
            error = await failure_of(one.decode.Decode(endless, timeout=20))
            assert isinstance(error, Refused)

    asyncio.run(go())


def test_a_cancelled_stream_frees_everything(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            for reads in range(4):
                request = decode_request(f"c{reads}", one.incarnation, fake_engine.ENDLESS)
                call = one.decode.Decode(request, timeout=20)
                for _ in range(reads):
                    await call.read()
                call.cancel()
            await one.until_free()

    asyncio.run(go())


def test_a_deadline_ends_an_attempt(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            request = decode_request("late", one.incarnation, fake_engine.ENDLESS)
            error = await failure_of(one.decode.Decode(request, timeout=0.2))
            assert isinstance(error, DeadlineExceeded)
            await one.until_free()

    asyncio.run(go())


def test_without_a_deadline_the_worker_sets_one(tmp_path: Path) -> None:
    async def go() -> None:
        config = WorkerConfig(max_request_s=0.2, log_level="error")
        async with running(make_role(), config, tmp_path) as one:
            request = decode_request("late", one.incarnation, fake_engine.ENDLESS)
            error = await failure_of(one.decode.Decode(request))
            assert isinstance(error, DeadlineExceeded)
            await one.until_free()

    asyncio.run(go())


def test_an_abort_ends_a_running_attempt_and_refuses_a_late_one(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            request = decode_request("a", one.incarnation, fake_engine.ENDLESS)
            call = one.decode.Decode(request, timeout=20)
            await call.read()
            asked = pb.AbortRequest(attempt=request.attempt, reason="test")
            answer = await one.worker.Abort(asked, timeout=30)
            assert (answer.incarnation, answer.was_running) == (one.incarnation, True)
            assert (await one.load()).free_pages == fake_engine.PAGES
            assert isinstance(await failure_of(call), Refused)
            assert not (await one.worker.Abort(asked, timeout=30)).was_running

            early = decode_request("early", one.incarnation)
            asked = pb.AbortRequest(attempt=early.attempt, reason="before it came")
            assert not (await one.worker.Abort(asked, timeout=30)).was_running
            assert isinstance(await failure_of(one.decode.Decode(early, timeout=20)), Refused)

    asyncio.run(go())


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
            # Operators are told whom the pages wait for, wherever they look.
            ((writer, pages, age_s),) = map(astuple, one.front.shell.quarantines.listed())
            assert (writer, pages) == (address, 2)
            assert age_s > 0
            text = one.front.shell.metrics_text()
            assert f'effuse_kv_quarantine_pages{{writer="{address}"}} 2\n' in text
            assert f'effuse_kv_quarantine_age_seconds{{writer="{address}"}}' in text
            record = one.front.shell.record()
            assert record is not None
            assert [held.writer for held in record.quarantines] == [address]
            # Whoever cancelled may ask again under the same id meanwhile.
            anew = decode_request("a", one.incarnation)
            anew.attempt.transfer_id = "anew"
            assert len(await events_of(one.decode.Decode(anew, timeout=20))) == 6
            peer.may_answer.set()
            await one.until_free()
            assert not one.front.shell.quarantines.listed()

    asyncio.run(go())


def test_over_zmq_no_writer_keeps_pages_from_others(tmp_path: Path) -> None:
    """What comes from a writer that was given up is not placed, so nobody waits for it."""

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
    monkeypatch.setattr(quarantines, "SILENT_S", 0.0)

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
            assert address in error.message and "has not let go of pages" in error.message
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


def test_no_task_is_left_by_a_storm_of_cancels(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            await fronts_answer(one, "warm")
            before = (await one.load()).tasks
            for number in range(60):
                first = fake_engine.ENDLESS if number % 2 else 5
                request = decode_request(f"s{number}", one.incarnation, first)
                call = one.decode.Decode(request, timeout=20)
                if number % 3:
                    await call.read()
                call.cancel()
            await one.until_free()
            gc.collect()

            async def is_back() -> bool:
                return (await one.load()).tasks <= before

            await eventually(is_back)

    async def fronts_answer(one: fronts.Running, name: str) -> None:
        async for _ in one.decode.Decode(decode_request(name, one.incarnation), timeout=20):
            pass

    asyncio.run(go())
