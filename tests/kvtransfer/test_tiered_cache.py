"""Units that leave the pool for host memory and files, and come back, under random operations."""

from __future__ import annotations

import contextlib
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from kvtransfer.tier_scene import PAGE_BYTES, TEXTS, Scene, open_on_full_disk

from effuse.kvtransfer import tiered_cache, unit_files
from effuse.kvtransfer.store_tier import AGAIN_S, READ_S, WRITE_S
from effuse.kvtransfer.tiered_cache import TieredCache
from effuse.kvtransfer.tiers import Tiers
from effuse.kvtransfer.units import Rate


def storm(scene: Scene, steps: int) -> None:
    draw = scene.draw
    for _ in range(steps):
        kind = draw.random()
        if kind < 0.3:
            ids = draw.choice(TEXTS)[: 4 * draw.randint(1, 6)]
            scene.start(ids, draw.choice(("", "salt")))
        elif kind < 0.5 and scene.running:
            scene.end(draw.choice(scene.running), is_sound=draw.random() > 0.1)
        elif kind < 0.55:
            scene.empty_pool()
        elif kind < 0.6:
            scene.time += draw.choice((0.1, READ_S, AGAIN_S))
        elif kind < 0.7 and scene.running:
            one = draw.choice(scene.running)
            scene.end(one)
            scene.cache.swap_out(one.units, lambda _: 0.0)
        scene.admit()
        for one in scene.running:
            scene.store(one)
        scene.poll()
    for one in list(scene.running):
        scene.end(one)
    scene.waiting.clear()
    scene.settle()
    assert scene.pool.num_free == scene.pool.num_pages


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("has_files", [False, True], ids=["host", "files"])
def test_every_known_page_has_the_bytes_of_its_text(
    tmp_path: Path, is_causal: bool, has_files: bool
) -> None:
    totals = [0] * 4
    for seed in range(6):
        directory = tmp_path / str(seed) if has_files else None
        scene = Scene(random.Random(seed), is_causal=is_causal, directory=directory)
        storm(scene, 250)
        scene.time += AGAIN_S
        scene.empty_pool()
        for key in list(scene.tiers.kept) if has_files else ():
            scene.tiers._leave_host(key)
        scene.run(*(text[: 4 * count] for text in TEXTS for count in range(1, 7)))
        copied, moved = scene.tiers.counts, scene.counts
        found = copied.saved, copied.loaded, moved.kept, moved.read
        totals = [sum(pair) for pair in zip(totals, found, strict=True)]
        assert scene.tiers.counts.corrupt == 0
    assert min(totals[:2]) > 0 and (min(totals[2:]) > 0) == has_files


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
def test_wrong_bytes_in_any_tier_are_never_found(tmp_path: Path, is_causal: bool) -> None:
    corrupt = 0
    for seed in range(4):
        draw = random.Random(seed)
        scene = Scene(draw, is_causal=is_causal, directory=tmp_path / str(seed))
        for _ in range(30):
            storm(scene, 15)
            scene.host.slots[draw.randrange(20), draw.randrange(PAGE_BYTES)] ^= 1
            for path in (tmp_path / str(seed)).iterdir():
                if draw.random() < 0.2 and path.suffix != ".partial":
                    with contextlib.suppress(FileNotFoundError):  # a thread removes it
                        data = bytearray(path.read_bytes())
                        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                        path.write_bytes(data)
        corrupt += scene.tiers.figures()["corrupt"]
    assert corrupt > 0


@pytest.mark.parametrize(
    "bug", ["a page is reused while it is saved", "no digest", "a dropped unit stays in files"]
)
def test_planted_bugs_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    if bug.startswith("a page"):

        def use(cache: Any, one: Any, key: Any, unit: Any) -> None:
            if one is not cache._pins:
                original(cache, one, key, unit)
            else:
                one.held[key], unit.num_users = unit, unit.num_users + 1

        original = TieredCache._use
        monkeypatch.setattr(TieredCache, "_use", use)
    elif bug == "no digest":
        monkeypatch.setattr(tiered_cache, "pages_digest", lambda _: b"")
    else:
        monkeypatch.setattr(Tiers, "forget", lambda tiers, key: None)
    test = {
        "a page is reused while it is saved": test_every_known_page_has_the_bytes_of_its_text,
        "no digest": lambda path, **_: test_wrong_bytes_in_any_tier_are_never_found(path, True),
        "a dropped unit stays in files": lambda path, **_: test_a_wrong_unit_leaves_every_tier(
            path
        ),
    }[bug]
    with pytest.raises(AssertionError):
        test(tmp_path, is_causal=True, has_files=False)  # type: ignore[operator]


def test_a_wrong_unit_leaves_every_tier(tmp_path: Path) -> None:
    """With those that were computed from it, wherever they are."""
    scene = Scene(random.Random(1), directory=tmp_path, num_slots=4)
    text = TEXTS[0]
    scene.run(text)
    scene.settle()
    assert scene.files is not None and len(scene.files) >= 3
    one = scene.start(text[:4])
    while one not in scene.running:
        scene.poll()
        scene.admit()
    scene.end(one, is_sound=False)
    scene.empty_pool()
    assert scene.run(text) == [0]


def test_a_unit_of_the_pool_is_saved_once_and_comes_back(tmp_path: Path) -> None:
    scene = Scene(random.Random(1), directory=tmp_path)
    assert scene.run(TEXTS[0], TEXTS[0]) == [0, 24]
    assert scene.tiers.counts.saved == 12 * PAGE_BYTES
    scene.empty_pool()
    assert scene.cache.num_cached == 0
    assert scene.run(TEXTS[0][:16], TEXTS[0]) == [16, 24]
    assert scene.tiers.counts.saved == scene.tiers.counts.loaded == 12 * PAGE_BYTES
    assert scene.cache.figures()["offload_pages"] == 12


def test_a_process_finds_the_files_of_an_earlier_one(tmp_path: Path) -> None:
    first = Scene(random.Random(1), directory=tmp_path, num_slots=12)
    first.run(*TEXTS)
    later = Scene(random.Random(2), directory=tmp_path, num_slots=12)
    assert _bytes(later) == _bytes(first) > 0
    assert max(later.run(TEXTS[0])) > 0
    assert later.counts.read > 0


def test_units_come_back_only_if_that_is_faster(tmp_path: Path) -> None:
    scene = Scene(random.Random(1), directory=tmp_path)
    scene.run(TEXTS[0])
    scene.tiers.copying.note(PAGE_BYTES, 1.0, scene.time)
    for compute_s, expected in ((0.4, 0), (0.6, 24), (0.0, 24)):
        scene.empty_pool()
        scene.compute_s = lambda tokens, each=compute_s: tokens * each  # type: ignore[misc]
        scene.tiers.copying = Rate()
        scene.tiers.copying.note(PAGE_BYTES, 1.0, scene.time)
        assert scene.run(TEXTS[0]) == [expected]
    scene.empty_pool()
    scene.compute_s = lambda tokens: tokens * 0.4
    scene.time += AGAIN_S + 1  # and once in a while it is measured again
    assert scene.run(TEXTS[0]) == [24]


def test_those_in_host_memory_come_back_if_files_are_too_slow(tmp_path: Path) -> None:
    scene = Scene(random.Random(1), directory=tmp_path, num_slots=8)
    scene.run(TEXTS[0])
    assert scene.files is not None
    keys = scene.cache.begin("", TEXTS[0], 24).keys
    in_host = [key in scene.tiers.kept for key in keys].index(False)
    assert in_host > 0
    scene.empty_pool()
    scene.compute_s = lambda tokens: tokens * 0.5
    scene.tiers.stores[0].reading.note(PAGE_BYTES, 100.0, scene.time)
    assert scene.run(TEXTS[0]) == [4 * in_host]


def test_ends_leave_before_beginnings(tmp_path: Path) -> None:
    scene = Scene(random.Random(1), num_slots=6)
    scene.run(TEXTS[0])
    keys = scene.cache.begin("", TEXTS[0], 24).keys
    assert list(scene.tiers.kept) == [keys[2], keys[1], keys[0]]


def test_files_that_do_not_answer_cost_a_second_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(random.Random(1), directory=tmp_path, num_slots=12, most_polls=0)
    scene.run(*TEXTS)
    files = scene.files
    assert files is not None
    files.is_stuck = True
    scene.empty_pool()
    late = next(text for text in TEXTS if _is_filed_only(scene, text))
    one = scene.start(late)
    for _ in range(5):
        scene.poll()
        scene.admit()
    assert one in scene.waiting
    scene.time += READ_S + 0.1
    with caplog.at_level(logging.WARNING):
        scene.poll()
        scene.admit()
        assert one in scene.running and one.units.num_found == 0
        scene.store(one)
        scene.end(one)
        scene.empty_pool()
        assert scene.run(late, late) != [0, 0]  # of host memory, where it has come meanwhile
    assert [record.getMessage() for record in caplog.records] == [
        "KV in files is not used for 30 s: a read did not end within 1 s"
    ]
    assert scene.counts.failures == 1
    files.is_stuck = False
    for future in files.stuck:
        future.set_exception(OSError("the disk is gone"))
    scene.poll()
    scene.time += AGAIN_S
    scene.empty_pool()
    before = scene.counts.read
    scene.run(*TEXTS)
    assert scene.counts.read > before


def _bytes(scene: Scene) -> int:
    return scene.cache.figures()["offload_file_bytes"]


def _is_filed_only(scene: Scene, text: list[int]) -> bool:
    key = scene.cache.begin("", text, 24).keys[0]
    return key not in scene.tiers.kept and key in (scene.files or ())


def test_writes_that_do_not_answer_stop_no_saving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(random.Random(1), directory=tmp_path, num_slots=12, most_polls=0)
    assert scene.files is not None
    scene.files.is_stuck = True
    scene.run(*TEXTS[:2])
    scene.time += WRITE_S + 1
    saved = scene.tiers.counts.saved
    scene.run(*TEXTS[2:])
    assert scene.tiers.counts.saved > saved
    assert "a write did not end within 10 s" in caplog.text
    for future in scene.files.stuck:
        future.set_result(100)
    scene.poll()


def test_a_full_disk_costs_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_files, "_private", open_on_full_disk)
    scene = Scene(random.Random(1), directory=tmp_path, num_slots=12)
    scene.run(*TEXTS, *TEXTS)
    assert len([one for one in caplog.records if "No space left" in one.getMessage()]) == 1
    assert _bytes(scene) == 0 and not list(tmp_path.iterdir())
    assert scene.tiers.counts.saved > 0


def test_a_full_disk_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(random.Random(1), directory=tmp_path, num_slots=12)
    scene.run(*TEXTS)

    monkeypatch.setattr(unit_files, "_private", open_on_full_disk)
    scene.run([8] * 24)
    assert scene.counts.failures > 0
    late = next(text for text in TEXTS if _is_filed_only(scene, text))
    scene.empty_pool()
    before = scene.counts.read
    assert scene.run(late)[0] > 0 and scene.counts.read > before


def test_a_preempted_request_finds_its_units_again() -> None:
    """Its pages are taken in the same moment."""
    scene = Scene(random.Random(1), most_polls=5)
    one = scene.start(TEXTS[0])
    scene.admit()
    scene.store(one)
    scene.end(one)
    scene.cache.swap_out(one.units, lambda _: 0.0)
    scene.empty_pool()
    assert scene.run(TEXTS[0]) == [24]


def test_nothing_is_swapped_out_that_is_computed_faster() -> None:
    scene = Scene(random.Random(1), most_polls=5)
    scene.tiers.copying.note(PAGE_BYTES, 1.0, scene.time)
    one = scene.start(TEXTS[0])
    scene.admit()
    scene.store(one)
    scene.end(one)
    scene.cache.swap_out(one.units, lambda tokens: tokens * 0.9)
    scene.empty_pool()
    assert scene.run(TEXTS[0]) == [0]


def held_back(scene: Scene, text: list[int]) -> None:
    """A request computes a text and ends; copies that begin now end only after 50 polls."""
    scene.host.polls = lambda: 50
    one = scene.start(text)
    scene.admit()
    scene.store(one)
    scene.end(one)
    scene.poll()
    assert scene.cache.is_copying


def test_pages_that_are_being_saved_do_not_become_free_with_their_user() -> None:
    """The scheduler of answers hands out what a preempted request is said to free."""
    scene = Scene(random.Random(1), num_pages=64)
    held_back(scene, TEXTS[0])
    one = scene.start(TEXTS[0])
    scene.admit()
    assert one.units.num_found == 6
    expected, before = scene.pool.count_freed([one.pages]), scene.pool.num_free
    scene.end(one)
    assert scene.pool.num_free - before == expected < 12


def test_a_unit_is_dropped_and_computed_again_while_it_is_being_saved() -> None:
    scene = Scene(random.Random(1), num_pages=64)
    held_back(scene, TEXTS[0][:4])
    one = scene.start(TEXTS[0][:4])
    scene.admit()
    scene.end(one, is_sound=False)
    held_back(scene, TEXTS[0][:4])
    assert len(scene.cache._saving) == 2
    scene.settle()
    assert scene.run(TEXTS[0][:4]) == [4]


def test_a_wrong_whole_prompt_leaves_every_tier(tmp_path: Path) -> None:
    """Its user has taken it out of the pool's part."""
    scene = Scene(random.Random(1), is_causal=False, directory=tmp_path)
    scene.run(TEXTS[0])
    one = scene.start(TEXTS[0])
    scene.admit()
    scene.end(one, is_sound=False)
    assert scene.run(TEXTS[0]) == [0]


def test_ends_leave_before_beginnings_that_were_saved_earlier() -> None:
    scene = Scene(random.Random(1))
    scene.run(TEXTS[0][:16], TEXTS[0])
    keys = scene.cache.begin("", TEXTS[0], 24).keys
    assert list(scene.cache._idle) == list(scene.tiers.kept) == keys[::-1]


def test_a_wrong_unit_leaves_with_all_after_it_whichever_tiers_have_them() -> None:
    scene = Scene(random.Random(1))
    scene.run(TEXTS[0][:12])
    keys = scene.cache.begin("", TEXTS[0], 12).keys
    scene.cache._idle.move_to_end(keys[1], last=False)
    pages = scene.pool.allocate_committed(20)
    assert pages is not None and list(scene.cache._units) == [keys[0], keys[2]]
    scene.pool.release(pages)
    one = scene.start(TEXTS[0][:4])
    scene.admit()
    scene.end(one, is_sound=False)
    assert not scene.cache._units and not scene.tiers.kept


def test_a_unit_larger_than_the_host_stops_no_other() -> None:
    scene = Scene(random.Random(1), is_causal=False, num_slots=4)
    scene.run(TEXTS[0], TEXTS[1][:4])
    assert len(scene.tiers.kept) == 1


def test_units_that_no_file_may_hold_leave_the_host(tmp_path: Path) -> None:
    scene = Scene(
        random.Random(1), is_causal=False, directory=tmp_path, num_slots=12, most_file_bytes=300
    )
    scene.run(*TEXTS)
    (key,) = scene.tiers.kept
    assert key == scene.cache.begin("", TEXTS[-1], 24).keys[0]
    assert scene.counts.kept == 0
