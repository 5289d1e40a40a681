"""Links that prompts must not take: too slow, or between two connectors."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from prefill_worker.test_rehearsals import Scene, run

from effuse.placement.records import Link
from effuse.prefill_worker.links import AGREEING


def test_a_link_below_the_limit_is_announced_and_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(scene: Scene) -> None:
        for at in (0.0, 100.0, 200.0):
            assert "REFUSED" not in caplog.text
            scene.time = at
            await scene.settle()
        record = scene.one.front.shell.record()
        assert record is not None
        assert record.min_handoff_gbps == 1.0
        assert not record.may_push_to(scene.records[0])
        assert len(scene.peers["d0"].asked) == 2 + AGREEING
        refused = [
            r for r in caplog.records if "REFUSED, because --min-handoff-gbps" in r.getMessage()
        ]
        assert len(refused) == 1, "it is told once"

    run(tmp_path, body, gbps=1.0)


def test_a_link_between_two_connectors_is_announced_as_refused_and_not_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(scene: Scene) -> None:
        scene.records = [msgspec.structs.replace(one, connector="nixl") for one in scene.records]
        for at in (0.0, 100.0):
            scene.time = at
            await scene.settle()
        assert scene.links == (Link("d0", "d0-life", "zmq here, nixl there", 0.0),)
        assert not scene.peers["d0"].asked
        (told,) = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert "REFUSED, because both ends must have the same --connector" in told.getMessage()

    run(tmp_path, body)
