"""DecodeService over an engine without a model: forms, and ends of a stream."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import fake_engine
import fronts
import pytest
from eventually import eventually
from fronts import (
    attempt,
    decode_request,
    events_of,
    failure_of,
    running,
)

from effuse.decode_worker.server import DecodeServicer, _DecodeCall, make_role
from effuse.protos.errors import (
    AlreadyRunning,
    Bug,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Refused,
)
from effuse.v1 import worker_pb2 as pb
from effuse.worker.config import WorkerConfig
from effuse.worker.messages import Committed, Finished

CONFIG = WorkerConfig(hang_timeout_s=20.0, log_level="error")
NAN = float("nan")


def test_all_of_an_answer_arrives_in_order(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            request = decode_request("a", one.incarnation)
            request.drafts = request.progress = True
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
            parts = [event.progress for event in events if event.HasField("progress")]
            assert [part.computed_tokens for part in parts] == [4]
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
            same_transfer = decode_request("b", one.incarnation)
            same_transfer.attempt.transfer_id = endless.attempt.transfer_id
            for request in (endless, same_transfer):
                error = await failure_of(one.decode.Decode(request, timeout=20))
                assert isinstance(error, AlreadyRunning)
            # Others at the same request may run beside it: the next one, and another router's.
            for number, transfer_id in ((2, "a-2"), (1, "other")):
                second = decode_request("a", one.incarnation)
                second.attempt.attempt, second.attempt.transfer_id = number, transfer_id
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
            asked = pb.AbortRequest(attempt=early.attempt, reason="ended before it")
            assert not (await one.worker.Abort(asked, timeout=30)).was_running
            assert isinstance(await failure_of(one.decode.Decode(early, timeout=20)), Refused)

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


def test_tokens_of_a_forward_are_those_of_its_attempt() -> None:
    """An answer that goes on here has tokens of another worker."""
    shell = Mock()
    servicer, call = DecodeServicer(shell), _DecodeCall(Mock(), None, 0.0)
    commit = Mock(spec=Committed, token_ids=(1, 2, 3, 4))
    end = Mock(spec=Finished, stopped=False, num_tokens=64, forward_passes=2)
    for event in (commit, end):
        servicer._note(call, event)
    shell.metrics.tokens_per_forward.observe.assert_called_once_with(2.0)
