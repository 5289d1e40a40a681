"""Units that workers share through a pool, under random operations and faults."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from kvtransfer.fake_pool import FakePool, SharedUnits
from kvtransfer.test_tiered_cache import storm
from kvtransfer.tier_scene import PAGE_BYTES, TEXTS, Scene

from effuse.kvtransfer import tiered_cache
from effuse.kvtransfer.store_tier import AGAIN_S, FIND_S, READ_S, WRITE_S
from effuse.kvtransfer.stores import UnitFacts
from effuse.kvtransfer.tiers import Tiers
from kvtransfer import fake_pool


def worker(shared: SharedUnits, seed: int = 1, **changes: Any) -> Scene:
    return Scene(random.Random(seed), shared=shared, **changes)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
def test_a_worker_finds_what_another_one_computed(is_causal: bool) -> None:
    shared = SharedUnits()
    assert worker(shared, is_causal=is_causal).run(TEXTS[0]) == [0]
    other = worker(shared, is_causal=is_causal)
    assert other.run(TEXTS[0]) == [24]
    assert other.counts.read == other.tiers.counts.loaded == 12 * PAGE_BYTES
    assert other.counts.kept == 0


def test_a_longer_text_begins_with_what_the_pool_has() -> None:
    shared = SharedUnits()
    worker(shared).run(TEXTS[0][:12])
    other = worker(shared)
    assert other.run([*TEXTS[0][:12], *TEXTS[1][:12]], TEXTS[0], TEXTS[2]) == [12, 12, 0]


def test_tenants_share_nothing() -> None:
    shared = SharedUnits()
    worker(shared).run(TEXTS[0])
    other = worker(shared)
    other.start(TEXTS[0], salt="tenant")
    for _ in range(3):
        other.admit()
        other.poll()
    assert other.running[0].units.num_found == 0


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
def test_every_known_page_has_the_bytes_of_its_text(is_causal: bool, tmp_path: Any) -> None:
    """Of two workers, one of them with files too, while the pool fails, forgets and spoils."""
    read = corrupt = failures = 0
    for seed in range(4):
        shared, draw = SharedUnits(), random.Random(seed)
        scenes = [
            worker(shared, seed, is_causal=is_causal, directory=tmp_path / str(seed)),
            worker(shared, seed + 100, is_causal=is_causal),
        ]
        for _ in range(30):
            shared.fault = draw.choice(("", "", "", "dead", "stuck", "full"))
            for scene in scenes:
                storm(scene, 15)
                assert scene.shared is not None
                for future in scene.shared.stuck:
                    future.set_exception(ConnectionError("no answer"))
                scene.shared.stuck.clear()
                scene.poll()
                if draw.random() < 0.5:
                    scene.time += AGAIN_S
            for key in [key for key in shared.units if draw.random() < 0.1]:
                del shared.units[key]
            for data in shared.units.values():
                if draw.random() < 0.1:
                    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        read += sum(scene.tiers.stores[-1].counts.read for scene in scenes)
        corrupt += sum(scene.tiers.figures()["corrupt"] for scene in scenes)
        failures += sum(scene.tiers.figures()["pool_failures"] for scene in scenes)
    assert min(read, corrupt, failures) > 0


@pytest.mark.parametrize("bug", ["keys ignore the text", "no digest", "a wrong unit stays"])
def test_planted_bugs_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, bug: str) -> None:
    if bug == "keys ignore the text":
        original = FakePool.load

        def load(pool: FakePool, key: bytes, views: Any) -> Any:
            units = pool._shared.units
            first = next(iter(units))
            units[key] = units[first]
            return original(pool, key, views)

        monkeypatch.setattr(fake_pool, "unpack", lambda raw, *_: UnitFacts(raw[24:40]))
        monkeypatch.setattr(FakePool, "load", load)
    elif bug == "no digest":
        monkeypatch.setattr(tiered_cache, "pages_digest", lambda _: b"")
    else:
        monkeypatch.setattr(Tiers, "forget", lambda tiers, key: None)
    with pytest.raises(AssertionError):
        if bug == "a wrong unit stays":
            test_a_wrong_unit_leaves_the_pool()
        else:
            test_every_known_page_has_the_bytes_of_its_text(True, tmp_path)


def test_a_wrong_unit_leaves_the_pool() -> None:
    """With those that were computed from it."""
    shared = SharedUnits()
    scene = worker(shared)
    scene.run(TEXTS[0])
    assert len(shared.units) == 6
    one = scene.start(TEXTS[0][:4])
    scene.admit()
    scene.end(one, is_sound=False)
    assert not shared.units


def waiting(scene: Scene, text: list[int]) -> Any:
    """A request that waits for the pool."""
    one = scene.start(text)
    for _ in range(3):
        scene.poll()
        scene.admit()
    return one


@pytest.mark.parametrize("fault", ["dead", "stuck"])
def test_a_pool_that_fails_costs_one_request_a_second_and_one_line(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    shared = SharedUnits()
    worker(shared).run(TEXTS[0])
    scene = worker(shared, num_slots=40)
    shared.fault = fault
    with caplog.at_level(logging.WARNING):
        one = waiting(scene, TEXTS[0])
        assert (one in scene.waiting) == (fault == "stuck")
        scene.time += READ_S + 0.1
        scene.poll()
        scene.admit()
        assert one in scene.running and one.units.num_found == 0
        assert scene.shared is not None
        scene.shared.stuck.clear()
        before = list(shared.calls)
        assert scene.run(TEXTS[1], TEXTS[1], TEXTS[2]) == [0, 24, 0]
        assert shared.calls == before  # nobody asks it
    reason = "it is dead" if fault == "dead" else "a search did not end within 0.5 s"
    (record,) = caplog.records
    assert record.getMessage() == f"KV in the shared pool is not used for 30 s: {reason}"
    assert scene.counts.failures == 1
    shared.fault = ""
    scene.time += AGAIN_S
    scene.poll()
    scene.settle()
    assert set(scene.tiers.kept) <= set(shared.units)  # what came meanwhile is there now
    other = worker(shared)
    assert other.run(TEXTS[1], TEXTS[2]) == [24, 24]


def test_a_pool_that_comes_late_is_used_once_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedUnits(fault="dead")
    scene = worker(shared, num_slots=24)
    assert scene.run(TEXTS[0], TEXTS[1]) == [0, 0]
    assert len(caplog.records) == scene.counts.failures == 1
    shared.fault = ""
    scene.time += AGAIN_S
    scene.settle()
    assert len(shared.units) == 12


def go_on(scene: Scene) -> None:
    for _ in range(6):
        scene.poll()
        scene.admit()


def test_a_search_that_waits_for_others_has_longer(caplog: pytest.LogCaptureFixture) -> None:
    """Of many requests at once none computes because it has waited for the others' searches."""
    shared = SharedUnits()
    worker(shared).run(TEXTS[0], TEXTS[1])
    scene = worker(shared)
    scene.poll()
    shared.fault = "stuck"
    early, late = scene.start(TEXTS[0]), scene.start(TEXTS[1])
    scene.admit()
    assert scene.shared is not None
    scene.time += FIND_S - 0.1
    scene.shared.stuck.pop(0).set_result(6)
    shared.fault = ""
    go_on(scene)
    scene.time += FIND_S - 0.1
    go_on(scene)
    assert early in scene.running and late in scene.waiting
    scene.shared.stuck.pop(0).set_result(6)
    go_on(scene)
    assert late in scene.running and late.units.num_found == 6
    assert scene.counts.failures == 0 and not caplog.records


def test_a_request_that_was_preempted_asks_again() -> None:
    shared = SharedUnits()
    scene = worker(shared)
    one = waiting(scene, TEXTS[0])
    assert one.units.num_found == 0
    scene.end(one)
    scene.empty_pool()
    worker(shared).run(TEXTS[0])
    assert scene.cache.fetch(one.units, 24, 0, lambda _: 0.0)
    scene.poll()
    assert set(one.units.keys) <= set(shared.units) and scene.shared is not None
    assert all(key in scene.shared for key in one.units.keys)


def test_a_unit_that_is_dropped_while_it_is_written_leaves_the_pool() -> None:
    shared = SharedUnits()
    scene = worker(shared, most_polls=0)
    scene.poll()
    one = scene.start(TEXTS[0][:4])
    for _ in range(3):
        scene.admit()
        scene.poll()
    scene.store(one)
    shared.fault = "stuck"
    scene.end(one)
    scene.poll()
    scene.poll()
    assert scene.shared is not None and scene.writing
    other = scene.start(TEXTS[0][:4])
    scene.admit()
    scene.end(other, is_sound=False)
    shared.fault = ""
    for future in scene.shared.stuck:
        future.set_result(100)
    scene.poll()
    assert not scene.writing and shared.calls[-1] == "remove"


def test_a_stuck_read_gives_its_slots_back(caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedUnits()
    worker(shared).run(TEXTS[0])
    scene = worker(shared)
    one = scene.start(TEXTS[0])
    scene.poll()
    scene.admit()  # asks
    scene.poll()
    shared.fault = "stuck"
    scene.admit()
    assert one in scene.waiting and scene.shared is not None and scene.shared.stuck
    scene.time += READ_S + 0.1
    scene.poll()
    scene.admit()
    assert one in scene.running and one.units.num_found == 0
    assert "a read did not end within 1 s" in caplog.text
    assert scene.tiers.figures()["pages"] == 12
    for future in scene.shared.stuck:
        future.set_exception(ConnectionError("no answer"))
    scene.poll()
    assert scene.tiers.figures()["pages"] == 0


def test_writes_that_do_not_answer_stop_no_saving(caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedUnits(fault="")
    scene = worker(shared, num_slots=12, most_polls=0)
    scene.poll()
    shared.fault = "stuck"
    one = waiting(scene, TEXTS[0])
    scene.time += READ_S + 0.1
    scene.poll()
    scene.admit()
    scene.store(one)
    scene.end(one)
    scene.time += AGAIN_S
    for future in scene.shared.stuck if scene.shared else ():
        future.set_result(0)
    saved = scene.tiers.counts.saved
    scene.run(*TEXTS[1:])
    scene.time += WRITE_S + 1
    scene.run(*TEXTS[1:])
    assert scene.tiers.counts.saved > saved


def test_a_unit_that_is_used_again_on_its_way_to_the_pool_is_written_once() -> None:
    shared = SharedUnits()
    scene = worker(shared, num_pages=40, num_slots=60, most_polls=0)
    scene.poll()
    assert scene.shared is not None
    scene.shared.most_writes = 128
    for _ in range(3):
        shared.fault = ""
        one = scene.start(TEXTS[0])
        while one in scene.waiting:
            scene.poll()
            scene.admit()
        shared.fault = "stuck"
        scene.store(one)
        scene.end(one)
        for _ in range(3):
            scene.poll()
    assert shared.calls.count("keep") == len(TEXTS[0]) // 4


def test_a_full_pool_costs_one_line_and_is_still_read(caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedUnits()
    worker(shared).run(TEXTS[0])
    shared.fault = "full"
    scene = worker(shared, num_slots=12)
    assert scene.run(TEXTS[1], TEXTS[2], TEXTS[0]) == [0, 0, 24]
    (record,) = caplog.records
    assert record.getMessage().startswith("no KV is written to the shared pool for 30 s: ")
    assert scene.counts.failures >= 1 and scene.counts.read > 0


def test_a_unit_that_the_pool_has_given_up_is_computed() -> None:
    shared = SharedUnits()
    worker(shared).run(TEXTS[0])
    scene = worker(shared)
    one = scene.start(TEXTS[0])
    scene.poll()
    scene.admit()
    shared.units.pop(one.units.keys[2])
    for _ in range(10):
        scene.poll()
        scene.admit()
    assert one in scene.running and one.units.num_found == 2
    assert scene.tiers.figures()["corrupt"] == scene.counts.failures == 0


def test_the_pool_is_asked_once_for_each_request() -> None:
    shared = SharedUnits()
    scene = worker(shared)
    scene.run(TEXTS[0], TEXTS[0], TEXTS[1])
    assert shared.calls.count("find") == 2


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
def test_a_unit_that_the_pool_has_given_up_is_written_again(is_causal: bool) -> None:
    """By its writer, once it uses the unit again and has not asked for half a minute."""
    shared = SharedUnits()
    scene = worker(shared, is_causal=is_causal)
    scene.run(TEXTS[0])
    written = dict(shared.units)
    gone = list(written)[-1 if is_causal else 0 :]
    for key in gone:
        del shared.units[key]
    scene.time += AGAIN_S + 1
    scene.run(TEXTS[0])
    assert shared.units == written
    asked = shared.calls.count("find")
    scene.run(TEXTS[0], TEXTS[0])
    assert shared.calls.count("find") == asked  # not each time
    assert "remove" not in shared.calls


def test_a_prompt_that_host_memory_cannot_hold_does_not_wait_for_the_pool() -> None:
    """However many others are written meanwhile."""
    scene = worker(SharedUnits(), is_causal=False, num_slots=6)
    for text, is_there in ((TEXTS[0][:12], None), (TEXTS[0], False)):
        one = scene.start(text)
        while one in scene.waiting:
            scene.admit()
            scene.poll()
        scene.cache.add_whole(one.units, one.pages, torch.tensor([0.0]))
        assert scene.cache.pooled(one.units, scene.time) is is_there


def test_a_prompt_for_the_pool_is_not_there_if_the_pool_has_given_it_up() -> None:
    """However late it was written."""
    shared = SharedUnits()
    scene = worker(shared)
    scene.run(TEXTS[0])
    units = scene.cache.begin("", TEXTS[0], 24)

    def is_there() -> bool:
        for _ in range(5):
            if (found := scene.cache.pooled(units)) is not None:
                return found
            scene.poll()
        raise AssertionError("it is asked without end")

    assert is_there()
    units = scene.cache.begin("", TEXTS[0], 24)
    shared.units.pop(units.keys[2])
    assert not is_there()
    for _ in range(10):
        scene.poll()
    assert units.keys[2] in shared.units
