"""What a host logs about a leader that does not answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from worker.test_nodes import config, leader

from effuse.worker.config import DecodeConfig
from effuse.worker.node import NodeAgent, Unanswered


class Clock:
    """Goes on by itself, far faster than the true one."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 2.0
        return self.now


async def told(own: DecodeConfig, caplog: pytest.LogCaptureFixture, limit_s: float = 20.0) -> str:
    """The first warning of a host."""
    stop = asyncio.Event()
    agent = NodeAgent(own, stop, lambda _: None, now=Clock())
    running = asyncio.ensure_future(agent.run())
    async with asyncio.timeout(limit_s):
        while not (found := [one for one in caplog.messages if "has not answered" in one]):
            assert not running.done()
            await asyncio.sleep(0.02)
    stop.set()
    await running
    return found[0]


def test_a_host_tells_that_nothing_listens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = config(tmp_path, node_rank=1)
    found = asyncio.run(told(own, caplog))
    assert found.startswith(f"the leader at 127.0.0.1:{own.master_port} has not answered for 1")
    assert found.endswith("there is no connection to 127.0.0.1")


@pytest.mark.parametrize("has_secret", [True, False])
def test_a_host_tells_of_another_secret(
    has_secret: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = config(tmp_path)
    (tmp_path / "other").write_text("y" * 32)
    secret = tmp_path / "other" if has_secret else None

    async def ask() -> str:
        with leader(own):
            return await told(replace(own, node_rank=1, fleet_secret=secret), caplog)

    assert asyncio.run(ask()).endswith(
        "the connection ends at once; has the leader another --fleet-secret?"
    )


def test_a_host_tells_of_a_leader_that_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = config(tmp_path)

    async def ask() -> str:
        with leader(own):  # whose thread never has a turn
            return await told(replace(own, node_rank=1), caplog)

    assert asyncio.run(ask()).endswith("it is connected, but silent")


def test_warnings_are_rare_and_begin_again_after_an_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    silence, at = Unanswered("here", "why"), list[float]()
    for now in range(300):
        caplog.clear()
        silence.look(float(now))
        at += [float(now)] * len(caplog.messages)
    assert at == [10.0, 70.0, 130.0, 190.0, 250.0]
    silence.end()
    caplog.clear()
    for now in range(300, 310):
        silence.look(float(now))
    assert not caplog.messages
    silence.look(310.0)
    assert caplog.messages == ["the leader at here has not answered for 10 s: why"]
