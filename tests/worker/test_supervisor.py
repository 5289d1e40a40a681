"""One engine after the other: when it is replaced, when it is given up, what attempts hear."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import fronts
import psutil
import pytest
from eventually import eventually

from effuse.kvtransfer.messages import AttemptId
from effuse.protos.errors import Unavailable
from effuse.worker.attempts import Attempts
from effuse.worker.backoff import Backoff
from effuse.worker.config import WorkerConfig
from effuse.worker.messages import Abort
from effuse.worker.supervisor import GaveUp, Supervisor


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


def test_an_engine_that_was_ready_is_replaced_as_often_as_it_takes() -> None:
    async def go() -> None:
        changes: list[bool] = []
        one = supervisor("fake", changes)
        task = asyncio.ensure_future(one.run())
        seen: set[str] = set()
        for turn in range(4):  # more often than an engine may fail to start
            await eventually(lambda: one.life is not None and one.life.incarnation not in seen)
            assert one.life is not None
            seen.add(one.life.incarnation)
            if turn < 3:
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
        assert caught.value.labels == {"incarnation": incarnation}
        assert attempt.engine_gone
        assert not psutil.pid_exists(pid)
        # What is said to a dead life never reaches the next one.
        one.send(Abort(attempt=attempt.id, reason="late"), incarnation)
        task.cancel()
        await asyncio.wait({task}, timeout=20)

    asyncio.run(go())
