"""A front whose next engine cannot be started for a while, and a spawn that fails halfway."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fronts
import pytest
from eventually import eventually

from effuse.worker.attempts import Attempts
from effuse.worker.config import WorkerConfig
from effuse.worker.supervisor import EngineClient, Supervisor
from effuse.worker.watchdog import Backoff, GaveUp

CONFIG = WorkerConfig(log_level="error")
PATIENT = Backoff(first_s=0.02, most_s=0.02, most_failures=10_000)
QUICK = Backoff(first_s=0.001, most_s=0.002, most_failures=3)


@pytest.fixture(autouse=True)
def _engines_can_be_started() -> Iterator[None]:
    with fronts.importable():
        yield


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files."""
    made = tmp_path / "tmp"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    return made


def supervisor(backoff: Backoff) -> Supervisor:
    return Supervisor(
        fronts.FAKE_ENGINE, CONFIG, Attempts(), on_change=lambda: None, backoff=backoff
    )


async def lose_engine(one: Supervisor, room: Path) -> None:
    """Ends a ready engine while no other one can be started."""
    await eventually(lambda: one.life is not None)
    assert one.life is not None
    os.rename(room, room.with_name("away"))  # noqa: PTH104
    os.kill(one.life.client.pid, signal.SIGKILL)


def test_an_engine_starts_once_its_directory_is_back(
    room: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        one = supervisor(PATIENT)
        task = asyncio.ensure_future(one.run())
        await lose_engine(one, room)
        await eventually(lambda: caplog.text.count("no engine can be started: ") > 2 or task.done())
        assert not task.done() and one.life is None and one.restarts > 2
        os.rename(room.with_name("away"), room)  # noqa: PTH104
        await eventually(lambda: one.life is not None)
        task.cancel()
        await asyncio.wait({task}, timeout=20)

    asyncio.run(go())


def test_starts_that_fail_again_and_again_are_given_up(room: Path) -> None:
    async def go() -> None:
        one = supervisor(QUICK)
        task = asyncio.ensure_future(one.run())
        await lose_engine(one, room)
        with pytest.raises(GaveUp, match="No such file or directory"):
            async with asyncio.timeout(20):
                await task
        assert one.backoff.failures == QUICK.most_failures

    asyncio.run(go())


def test_a_first_engine_that_cannot_be_started_is_an_error_at_once(room: Path) -> None:
    one = supervisor(PATIENT)
    room.rmdir()
    with pytest.raises(FileNotFoundError):
        asyncio.run(one.run())


@pytest.mark.parametrize("error", [OSError, ValueError, asyncio.CancelledError])
def test_a_spawn_that_fails_leaves_no_directory(
    room: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    async def fail(*_: object) -> object:
        assert os.listdir(room)  # noqa: PTH208
        raise error

    monkeypatch.setattr("effuse.worker.supervisor.start", fail)
    with pytest.raises(error):
        asyncio.run(EngineClient.spawn(fronts.FAKE_ENGINE, CONFIG))
    assert not list(room.iterdir())
