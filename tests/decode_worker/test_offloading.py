"""KV in host memory and files below an engine that decodes: the same tokens, fewer computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decoding.chats import Models, told
from decoding.device_rig import DeviceRig
from decoding.engines import Rig, make_request

from effuse.kvtransfer.host_pages import HostPages
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.tiered_cache import TieredCache
from effuse.kvtransfer.tiers import Tiers
from effuse.kvtransfer.unit_files import UnitFiles

Outside = Callable[[PageMemory, Callable[[], float]], Tiers]


class Evicted(Rig):
    """A rig whose pool forgets all units after each turn of a chat."""

    def run(self, most_steps: int = 5000) -> None:
        super().run(most_steps)
        self.evict()


class EvictedDevice(Evicted, DeviceRig):
    """The same with steps on a device."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def outside(num_slots: int, directory: Path | None = None) -> Outside:
    """Host memory of so many pages, and files if there is a directory."""

    def make(memory: PageMemory, now: Callable[[], float]) -> Tiers:
        files = [] if directory is None else [UnitFiles(directory, 1 << 30)]
        return Tiers(HostPages(memory, num_slots), files, now=now)

    return make


SMALL: dict[str, Any] = {"num_pages": 56, "page_size": 4, "max_num_seqs": 8, "budget": 256}


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("sdar", "block_diffusion"),
        ("fast_dllm_v2", "fast_dllm_v2"),
        ("dream", "d2f"),
        ("llada", "block_diffusion"),
    ],
)
def test_kept_kv_changes_no_token(models: Models, tmp_path: Path, family: str, way: str) -> None:
    """Each turn of a chat begins with what only host memory and files have."""
    asked: dict[str, Any] = {"seed": 1, "most": 40, "turns": 3}
    expected, _ = told(models(family), way, caches=False, **asked)
    tiers = outside(40, tmp_path)
    found, rig = told(models(family), way, caches=True, kind=Evicted, tiers=tiers, **asked, **SMALL)
    assert found == expected
    load = rig.engine.load()
    assert min(load.offload_loaded, load.offload_file_kept) > 0
    assert load.offload_file_read > 0 or not rig.cache.is_causal
    assert load.offload_corrupt == load.offload_file_failures == 0


@pytest.mark.parametrize("family", ["sdar", "dream"])
def test_nor_does_it_on_a_device(models: Models, tmp_path: Path, family: str) -> None:
    asked: dict[str, Any] = {"seed": 2, "most": 40, "turns": 3}
    expected, _ = told(models(family), "d2f", caches=False, **asked)
    tiers = outside(60, tmp_path)
    found, rig = told(
        models(family), "d2f", caches=True, kind=EvictedDevice, tiers=tiers, **asked, **SMALL
    )
    assert found == expected
    assert rig.engine.load().offload_loaded > 0


@pytest.mark.parametrize("family", ["sdar", "dream", "llada"])
def test_what_has_left_the_pool_is_not_computed_again(
    models: Models, tmp_path: Path, family: str
) -> None:
    """From host memory, then from the files that an earlier process left."""
    prompt = range(20, 52)
    for tiers in (outside(100), outside(8, tmp_path), outside(100, tmp_path)):
        rig = Rig(models(family), num_pages=64, tiers=tiers)
        answers = []
        for name in "ab":
            answers.append(rig.start(make_request(name, prompt, max_tokens=8)))
            rig.run()
            rig.evict()
        assert answers[0].token_ids == answers[1].token_ids
    load = rig.engine.load()
    assert rig.engine.counters.prompt_tokens == 0
    assert load.offload_file_read > 0 and load.prefix_hits == 64


def test_a_preempted_request_goes_on_from_host_memory(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = {}
    for is_swapped in (True, False):
        if not is_swapped:
            monkeypatch.setattr(TieredCache, "swap_out", lambda *_: None)
        rig = Rig(models("sdar"), num_pages=20, budget=64, tiers=outside(100))
        for name, first in (("a", 20), ("b", 50)):
            prompt = range(first, first + 24)
            rig.start(make_request(name, prompt, max_tokens=32, stop_token_ids=()))
        rig.run()
        assert rig.engine.counters.preemptions > 0
        tokens[is_swapped] = rig.engine.counters.prompt_tokens
    assert tokens[True] == 48 < tokens[False]


def test_wrong_bytes_in_host_memory_are_computed_again(models: Models) -> None:
    rig = Rig(models("sdar"), tiers=outside(100))
    answers = []
    for name in "abc":
        answers.append(rig.start(make_request(name, range(20, 52), max_tokens=8)))
        rig.run()
        rig.evict()
        assert isinstance(rig.cache, TieredCache)
        first = next(reversed(rig.cache.tiers.kept.values()))  # the text's beginning
        rig.cache.tiers.host.views(first.slots)[0][7] ^= 1
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    assert rig.engine.load().offload_corrupt == 2


def test_an_engine_whose_units_come_is_not_short_of_pages(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a prompt of the same worker would be failed for them."""
    rig = Rig(models("sdar"), tiers=outside(100))
    rig.start(make_request("a", range(20, 52), max_tokens=8))
    rig.run()
    rig.evict()
    monkeypatch.setattr(HostPages, "load", lambda *_: lambda: None)
    rig.start(make_request("b", range(20, 52), max_tokens=8))
    rig.engine.step()
    assert rig.engine.roster.waiting and not rig.engine.is_short_of_pages
