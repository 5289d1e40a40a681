"""Prompts for a pool of several workers, without a handoff as long as the pool works."""

from __future__ import annotations

import random
from concurrent.futures import Future
from pathlib import Path

import pytest
from checkpoints import Architecture, write_tiny_checkpoint
from kvtransfer.fake_pool import FakePool, SharedUnits
from prefill_worker.rig import Rig

from effuse.kvtransfer.store_tier import KEEP_S
from effuse.worker.messages import PrefillDone, PromptPushed

PROMPT = random.Random(1).choices(range(3, 203), k=40)


@pytest.fixture
def shared() -> SharedUnits:
    return SharedUnits()


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
