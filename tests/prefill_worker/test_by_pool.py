"""Prompts for a pool of several workers, without a handoff as long as the pool works."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Architecture, write_tiny_checkpoint
from kvtransfer.fake_pool import FakePool, SharedUnits
from prefill_worker.rig import RESERVATION_S, Rig

from effuse.kvtransfer.store_tier import KEEP_S
from effuse.worker.messages import Failed, PrefillDone, PromptPushed

PROMPT = random.Random(1).choices(range(3, 203), k=40)


@pytest.fixture
def shared() -> SharedUnits:
    return SharedUnits()


class SlowPool(FakePool):
    """Each write ends when a test lets it."""

    def __init__(self, shared: SharedUnits) -> None:
        super().__init__(shared)
        self._begun = deque[tuple[Future[int], Callable[[], Future[int]]]]()

    def keep(self, *args: Any) -> Future[int]:
        future: Future[int] = Future()
        self._begun.append((future, partial(super().keep, *args)))
        return future

    def end(self, is_well: bool) -> None:
        if self._begun:
            future, write = self._begun.popleft()
            if is_well:
                future.set_result(write().result())
            else:
                future.set_exception(ConnectionError("it is gone"))


def rig_of(tmp_path: Path, architecture: Architecture, shared: SharedUnits) -> Rig:
    path = write_tiny_checkpoint(tmp_path, architecture, seed=3, block_size=4)
    rig = Rig(path, num_pages=16, num_slots=40, stores=lambda _: [FakePool(shared)])
    rig.settle()
    return rig


def release_stuck(rig: Rig) -> None:
    for one in rig.engine._cache.tiers.stores:  # type: ignore[attr-defined]
        futures: list[Future[object]] = one.store.stuck
        for future in futures:
            future.set_exception(ConnectionError("no answer"))
        futures.clear()


@pytest.mark.parametrize("architecture", ["sdar", "dream"])
def test_a_prompt_in_the_pool_needs_no_reservation_and_is_computed_once(
    tmp_path: Path, shared: SharedUnits, architecture: Architecture
) -> None:
    rig = rig_of(tmp_path, architecture, shared)
    rig.start("a", PROMPT, to_pool=True)
    rig.settle()
    (done,), (pushed,) = rig.take(PrefillDone), rig.take(PromptPushed)
    assert done.in_pool and not done.cached_tokens
    assert (pushed.transport, pushed.pages, pushed.bytes) == (
        "pool",
        10,
        10 * rig.memory.page_bytes,
    )
    assert len(shared.units) == (10 if architecture == "sdar" else 1)
    assert {len(unit) % 4 for unit in shared.units.values()} == {0}
    rig.check_idle()
    other = rig_of(tmp_path, architecture, shared)
    other.start("b", PROMPT, to_pool=True)
    other.settle()
    (done,), (pushed,) = other.take(PrefillDone), other.take(PromptPushed)
    assert done.in_pool and done.cached_tokens == len(PROMPT) and not pushed.pages
    assert not other.forward.ran
    other.check_idle()


def test_a_unit_is_written_while_its_prompt_is_computed(
    tmp_path: Path, shared: SharedUnits
) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", seed=3, block_size=4)
    rig = Rig(path, budget=8, num_pages=16, num_slots=40, stores=lambda _: [FakePool(shared)])
    rig.settle()
    rig.start("a", PROMPT, to_pool=True)
    while not shared.units:
        rig.step()
    assert len(rig.forward.ran) < 5
    rig.settle()
    assert len(rig.forward.ran) == 5 and len(rig.take(PromptPushed)) == 1


@pytest.mark.parametrize("fault", ["dead", "stuck", "full"])
@pytest.mark.parametrize("architecture", ["sdar", "dream"])
def test_a_prompt_that_the_pool_does_not_get_is_handed_over(
    tmp_path: Path, shared: SharedUnits, architecture: Architecture, fault: str
) -> None:
    rig = rig_of(tmp_path, architecture, shared)
    shared.fault = fault
    attempt = rig.start("a", PROMPT, to_pool=True)
    for _ in range(100):
        rig.time += KEEP_S / 10
        rig.step()
    (done,) = rig.take(PrefillDone)
    assert not done.in_pool and not rig.take(PromptPushed)
    rig.push_to(attempt, 10)
    rig.settle()
    (pushed,) = rig.take(PromptPushed)
    assert pushed.pages == 10 and pushed.transport != "pool"
    assert len(rig.arrived()) == len(rig.forward.ran) == 1
    release_stuck(rig)
    rig.check_idle()


def test_a_reservation_is_due_once_a_prompt_was_reported_not_before(
    tmp_path: Path, shared: SharedUnits
) -> None:
    """A pool may take longer for a long prompt than a reservation may."""
    path = write_tiny_checkpoint(tmp_path, "sdar", seed=3, block_size=4)
    pool = SlowPool(shared)
    rig = Rig(path, budget=200, num_pages=100, num_slots=200, stores=lambda _: [pool])
    rig.settle()
    rig.start("a", random.Random(1).choices(range(3, 203), k=160), to_pool=True)
    began = rig.time
    while not (done := rig.take(PrefillDone)):
        rig.time += KEEP_S / 2
        pool.end(rig.time - began < RESERVATION_S - KEEP_S)
        rig.step()
    assert not done[0].in_pool and len(shared.units) > 20
    rig.time += RESERVATION_S - KEEP_S
    rig.step()
    assert not rig.take(Failed)


def test_a_prompt_that_the_pool_never_takes_is_handed_over_while_others_are_written(
    tmp_path: Path, shared: SharedUnits, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_of(tmp_path, "dream", shared)
    most = 5 * rig.memory.page_bytes
    monkeypatch.setattr(FakePool, "has_room_for", lambda _, num_bytes: num_bytes < most)
    attempt = rig.start("a", PROMPT, to_pool=True)
    for number in range(8):
        rig.start(f"b{number}", PROMPT[number : number + 4], to_pool=True)
        rig.time += KEEP_S / 4
        rig.step()
    (done,) = (one for one in rig.take(PrefillDone) if one.attempt == attempt)
    assert not done.in_pool


@pytest.mark.parametrize(("length", "cached"), [(6, 0), (14, 8)])
def test_tokens_that_no_unit_of_the_pool_has_are_not_cached(
    tmp_path: Path, shared: SharedUnits, length: int, cached: int
) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", seed=3, block_size=4)
    rig = Rig(path, page_size=8, num_pages=16, num_slots=40, stores=lambda _: [FakePool(shared)])
    rig.settle()
    for name in "ab":
        rig.start(name, PROMPT[:length], to_pool=True)
        rig.settle()
    assert [one.cached_tokens for one in rig.take(PrefillDone)] == [0, cached]
    assert [one.pages for one in rig.take(PromptPushed)] == [cached // 8, 0]


def test_a_worker_without_a_pool_hands_prompts_over(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", seed=3, block_size=4)
    rig = Rig(path)
    rig.push_to(rig.start("a", PROMPT, to_pool=True), 10)
    rig.settle()
    (done,), (pushed,) = rig.take(PrefillDone), rig.take(PromptPushed)
    assert not done.in_pool and pushed.pages == 10


def test_a_prompt_can_be_aborted_on_its_way_to_the_pool(
    tmp_path: Path, shared: SharedUnits
) -> None:
    rig = rig_of(tmp_path, "sdar", shared)
    attempt = rig.start("a", PROMPT, to_pool=True)
    while not rig.forward.ran:
        rig.step()
    shared.fault = "stuck"
    rig.settle()
    assert rig.engine.table.pooling
    rig.abort(attempt)
    rig.settle()
    assert not rig.engine.table.pooling and not rig.take(PrefillDone)
    release_stuck(rig)
    rig.said.clear()
    rig.check_idle()
