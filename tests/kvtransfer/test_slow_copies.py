"""Slow disks and late ends of copies: what is expected of the next ones, and what is a failure."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from kvtransfer.tier_scene import PAGE_BYTES, TEXTS, Scene

from effuse.kvtransfer.store_tier import READ_S


def test_copies_to_the_host_that_are_seen_late_keep_nothing_from_coming_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine sees the end of a small copy only after its step."""

    def after_step() -> None:
        scene.time += 0.1
        poll()

    scene = Scene(random.Random(1), most_polls=1)
    poll = scene.poll
    monkeypatch.setattr(scene, "poll", after_step)
    scene.compute_s = lambda tokens: tokens * 0.01
    scene.run(*(TEXTS[0][: 4 * count] for count in range(1, 7)))
    scene.empty_pool()
    assert scene.run(TEXTS[0]) == [24]


def only_in_files(scene: Scene) -> list[int]:
    """A text of six units that are in no other tier."""
    scene.run(TEXTS[0])
    for key in scene.cache.begin("", TEXTS[0], 24).keys:
        if key in scene.tiers.kept:
            scene.tiers._write(key)
            scene.writing[-1].result.exception(10)
            scene.poll()
            scene.tiers._leave_host(key)
    scene.empty_pool()
    return TEXTS[0]


def test_many_units_of_a_slow_disk_are_no_failure_of_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(random.Random(1), directory=tmp_path, most_polls=0)
    text, files = only_in_files(scene), scene.files
    assert files is not None
    begin, turns = files.load, iter((True, True))
    monkeypatch.setattr(
        files, "load", lambda *one: begin(*one) if next(turns, False) else files._hold()
    )
    one = scene.start(text)
    scene.admit()
    scene.time += READ_S - 0.1
    scene.await_reads()
    scene.poll()
    scene.time += 0.2
    scene.poll()
    scene.admit()
    assert one in scene.waiting  # the time of the others began with the last one that ended
    assert scene.counts.failures == 0 and not caplog.records


def test_reads_that_wait_for_others_seem_no_slower(tmp_path: Path) -> None:
    scene = Scene(random.Random(1), directory=tmp_path)
    keys = scene.cache.begin("", only_in_files(scene), 24).keys
    reads = [read for key in keys if (read := scene.tiers.begin_read(key, 2))]
    assert len(reads) == 6
    for read in reads:
        read.result.exception(10)
        scene.time += 0.5
        assert scene.tiers.end_read(read)
    assert scene.tiers.stores[0].reading.seconds(12 * PAGE_BYTES) == pytest.approx(3.0)
