"""One engine after another: when it is replaced, when it is given up, and the errors of
attempts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import fake_engine
import fronts
import msgspec
import psutil
import pytest
import zmq
from eventually import eventually, is_readable

from effuse.kvtransfer.messages import AttemptId
from effuse.placement.records import Load
from effuse.protos.errors import Unavailable
from effuse.worker import supervisor as supervising
from effuse.worker.attempts import Attempts
from effuse.worker.config import WorkerConfig
from effuse.worker.messages import (
    Abort,
    AbortDone,
    Heartbeat,
    Phase,
    Ready,
    StartupFailed,
    ToFront,
)
from effuse.worker.supervisor import EngineClient, EngineSocket, Supervisor, new_incarnation
from effuse.worker.watchdog import Backoff, EngineEnded, GaveUp

ABORT = Abort(attempt=AttemptId("r", 1, "t1"))


@pytest.fixture(autouse=True)
def _engines_can_be_started() -> Iterator[None]:
    with fronts.importable():
        yield


QUICK = Backoff(first_s=0.001, most_s=0.002, most_failures=3)


def supervisor(model: str, changes: list[bool] | None = None) -> Supervisor:
    config = WorkerConfig(served_model_name=model, log_level="error")
    made: list[Supervisor] = []

    def note() -> None:
        if changes is not None:
            changes.append(made[0].life is not None)

    made.append(Supervisor(fronts.FAKE_ENGINE, config, Attempts(), on_change=note, backoff=QUICK))
    return made[0]


@pytest.mark.parametrize(
    ("model", "told", "restarts"),
    [("missing", "no such checkpoint", 0), ("crashes", "exited with status 9", 2)],
)
def test_an_engine_that_never_starts_is_given_up(model: str, told: str, restarts: int) -> None:
    one = supervisor(model)
    with pytest.raises(GaveUp, match=told):
        asyncio.run(one.run())
    assert one.restarts == restarts


def test_an_engine_that_was_ready_is_replaced_as_often_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def go() -> None:
        changes: list[bool] = []
        one = supervisor("fake", changes)
        task = asyncio.ensure_future(one.run())
        seen: set[str] = set()
        for turn in range(4):  # more often than an engine may fail to start
            await eventually(lambda: one.life is not None and one.life.incarnation not in seen)
            assert one.life is not None
            seen.add(one.life.incarnation)
            assert os.listdir(tmp_path) == [one.life.client.home.name]  # noqa: PTH208
            if turn < 3:
                (tmp_path / f"effuse-engine-{one.life.client.pid}-ranks").mkdir()  # a leader's own
                os.kill(one.life.client.pid, signal.SIGKILL)
        assert changes == [True, False, True, False, True, False, True]
        assert one.backoff.early_ends == 3
        assert one.backoff.failures == 0
        task.cancel()
        await asyncio.wait({task}, timeout=20)
        assert task.cancelled()
        assert one.life is None

    asyncio.run(go())


def test_attempts_hear_of_a_lost_engine_once_its_memory_is_gone() -> None:
    async def go() -> None:
        attempts = Attempts()
        one = Supervisor(
            fronts.FAKE_ENGINE,
            WorkerConfig(log_level="error"),
            attempts,
            on_change=lambda: None,
            backoff=QUICK,
        )
        task = asyncio.ensure_future(one.run())
        await eventually(lambda: one.life is not None)
        assert one.life is not None
        pid, incarnation = one.life.client.pid, one.life.incarnation
        attempt = attempts.open(AttemptId("r", 1, "t"), incarnation)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable) as caught:
            async with asyncio.timeout(20):
                await attempt.next_event()
        assert caught.value.labels == {"incarnation": incarnation, "ending": "killed"}
        assert attempt.engine_ended
        assert not psutil.pid_exists(pid)
        # Messages for a dead life never reach the next one.
        one.send(Abort(attempt=attempt.id), incarnation)
        task.cancel()
        await asyncio.wait({task}, timeout=20)

    asyncio.run(go())


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_somebody_ends_again_and_again_is_back_at_once(signal_number: int) -> None:
    async def go() -> None:
        one = Supervisor(
            fronts.FAKE_ENGINE,
            WorkerConfig(log_level="error"),
            Attempts(),
            on_change=lambda: None,
            backoff=Backoff(first_s=3600.0, most_s=3600.0, healthy_s=0.0),
        )
        task = asyncio.ensure_future(one.run())
        for restarts in range(3):
            await eventually(lambda n=restarts: one.life is not None and one.restarts == n)  # type: ignore[misc]
            assert one.life is not None
            os.kill(one.life.client.pid, signal_number)
        await eventually(lambda: one.life is not None and one.restarts == 3)
        task.cancel()
        await asyncio.wait({task}, timeout=20)

    asyncio.run(go())


@asynccontextmanager
async def spawned(model: str = "fake") -> AsyncIterator[EngineClient]:
    config = WorkerConfig(served_model_name=model, log_level="error")
    with fronts.importable():
        client = await EngineClient.spawn(fronts.FAKE_ENGINE, config)
    try:
        yield client
    finally:
        await client.kill()


async def ready(client: EngineClient) -> Ready:
    """The engine's first message, except heartbeats: that it is ready."""
    (message,) = await events(client)
    assert isinstance(message, Ready)
    return message


async def events(client: EngineClient) -> Sequence[ToFront]:
    """The next messages that are no heartbeats."""
    async with asyncio.timeout(20):
        while True:
            heard = [m for m in await client.receive(20) if not isinstance(m, Heartbeat)]
            if heard:
                return heard


def test_it_says_that_it_is_ready_and_answers() -> None:
    async def go() -> None:
        async with spawned() as client:
            said = await ready(client)
            assert (said.model.name, said.total_pages) == ("fake", fake_engine.PAGES)
            client.send(ABORT)
            assert await events(client) == [AbortDone(attempt=ABORT.attempt, was_running=False)]

    asyncio.run(go())


def test_a_silent_engine_says_nothing_in_time() -> None:
    async def go() -> None:
        async with spawned() as client:
            assert await client.receive(0) == []
            assert (await ready(client)).model.name == "fake"

    asyncio.run(go())


def test_why_it_could_not_start_is_heard() -> None:
    async def go() -> None:
        async with spawned("missing") as client:
            failed = StartupFailed(message="no such checkpoint", permanent=True)
            assert await events(client) == [failed]

    asyncio.run(go())


def test_a_crash_is_told_with_its_status_after_its_last_words() -> None:
    async def go() -> None:
        async with spawned() as client:
            await ready(client)
            client.send(ABORT)
            await asyncio.sleep(0)
            assert await events(client)
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(EngineEnded, match="killed by signal 9"):
                await events(client)
            client.send(ABORT)  # in vain, and no error

    asyncio.run(go())


class Dead:
    """A process that has ended."""

    pid = 0

    async def wait(self) -> int:
        return -9


@pytest.mark.parametrize("words", [0, 1, 3000])
def test_all_that_it_said_is_heard_and_nothing_is_waited_for_then(
    words: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "_CLOSE_S", 3600.0)
    said = [
        AbortDone(attempt=AttemptId("r", at + 1, "t"), was_running=False) for at in range(words)
    ]

    def speak(endpoint: str) -> None:
        with zmq.Context() as context, context.socket(zmq.PAIR) as engine:
            engine.connect(endpoint)
            engine.send(encode([]))  # waits until it is connected
            time.sleep(0.2)  # its process is known to have ended by now
            for one in said:
                engine.send(encode([one]))
            engine.close(-1)  # once all has left

    async def go() -> None:
        socket = EngineSocket(f"ipc://{tmp_path}/s")
        client = EngineClient("life", cast(asyncio.subprocess.Process, Dead()), tmp_path, socket)
        speaking = asyncio.create_task(asyncio.to_thread(speak, socket.endpoint))
        heard: list[ToFront] = []
        async with asyncio.timeout(60):
            with pytest.raises(EngineEnded, match="killed by signal 9"):
                while True:
                    heard += await client.receive(60)
        await speaking
        await client.kill()
        assert heard == said

    encode = msgspec.msgpack.Encoder().encode
    asyncio.run(go())


@pytest.mark.parametrize("is_ready", [True, False])
def test_it_ends_at_any_moment_and_leaves_nothing(is_ready: bool) -> None:
    async def go() -> None:
        async with spawned() as client:
            if is_ready:
                await ready(client)
            process = psutil.Process(client.pid)
            home = client.home
            assert home.is_dir()
            await client.stop(20 if is_ready else 0)
            await eventually(lambda: not process.is_running())
            assert not home.exists()
            await client.kill()  # again, and no error

    asyncio.run(go())


def test_incarnations_differ_and_sort_by_age() -> None:
    ids = [new_incarnation() for _ in range(100)]
    assert len(set(ids)) == 100
    assert ids == sorted(ids)


def _block_until_signalled(descriptor: int) -> None:
    """Keeps the loop from running until something has come; an answer that is quick enough leaves
    no signal, since the send before it has taken notice of it already."""
    is_readable(descriptor, 1)
    time.sleep(0.02)  # a send looks for signals only some milliseconds after the last look


def test_a_send_swallows_no_signal_for_the_receiver() -> None:
    """ZeroMQ signals once that something can be received, and a send takes notice of it too."""

    async def go() -> None:
        async with spawned() as client:
            await ready(client)
            await eventually(lambda: _is_waiting(client))
            client.send(ABORT)
            # The answer arrives while the loop is busy, and then another message.
            _block_until_signalled(client._socket.zmq.FD)
            client.send(ABORT)
            answers = 0
            while answers < 2:
                heard = await client.receive(20)
                assert heard, f"{answers} of 2 answers were heard"
                answers += sum(isinstance(message, AbortDone) for message in heard)

    async def _is_waiting(client: EngineClient) -> bool:
        return not await client.receive(0.01)

    asyncio.run(go())


def test_a_directory_too_deep_for_a_socket_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(OSError, match="TMPDIR: expected a shorter path"):
        asyncio.run(EngineClient.spawn(fronts.FAKE_ENGINE, WorkerConfig()))
    assert list(deep.iterdir()) == []


def test_an_engine_that_ends_while_it_is_killed_is_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio may notice an end before its waiter does."""

    async def go() -> None:
        async with spawned() as client:
            await ready(client)
            pid = client.pid

            def kill() -> None:
                os.kill(pid, signal.SIGKILL)
                raise ProcessLookupError

            monkeypatch.setattr(client._process, "kill", kill)
            await client.kill()
            assert not psutil.pid_exists(pid)
            assert not client.home.exists()

    asyncio.run(go())


@pytest.mark.parametrize("said", [b"", b"\xc1", b"\x91" * 100_000, b"\x91\x81\xa4type\xa2\xc3\x28"])
def test_who_says_what_is_no_message_is_given_up(said: bytes) -> None:
    async def go() -> None:
        async with spawned() as client:
            await ready(client)
            client._socket._receiving = asyncio.get_running_loop().create_future()
            client._socket._receiving.set_result(said)
            with pytest.raises(EngineEnded, match="invalid message"):
                await client.receive(20)

    asyncio.run(go())


def test_a_start_that_compiles_for_long_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Most kernels take a millisecond, and are no news."""
    caplog.set_level("INFO")
    following = supervisor("m")
    client = cast(EngineClient, SimpleNamespace(incarnation="a-b"))

    def beat(phase: Phase, now: float) -> None:
        load = Load(total_pages=1, free_pages=1)
        following._take_beat(client, Heartbeat(loops=1, phase=phase, load=load), now)

    beat("loading", 0.0)
    beat("compiling", 1.0)
    beat("loading", 1.5)
    assert [one.message for one in caplog.records] == ["engine a-b is now loading"]
    for now in (2.0, 2.5, 3.5, 4.0):
        beat("compiling", now)
    assert [one.message for one in caplog.records][1:] == ["engine a-b is now compiling"]
