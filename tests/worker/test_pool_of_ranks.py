"""Engines of one, two and four ranks share the units of one pool, which is in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import Architecture, write_tiny_checkpoint
from kvtransfer.fake_pool import FakePool, SharedUnits
from kvtransfer.groups import layouts_of

import effuse
from effuse.config.pool_address import PoolAddress
from effuse.decode_worker.build import build
from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.room import Room
from effuse.kvtransfer.layout import KVLayout
from effuse.kvtransfer.tiered_cache import TieredCache
from effuse.offline import llm
from effuse.worker import assembly
from effuse.worker.config import DecodeConfig
from effuse.worker.engine_process import Engine

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "num_pages": 64,
    "max_model_len": 64,
    "page_size": 8,
}
ASKED = effuse.Params(max_tokens=8, ignore_eos=True)
UNITS = 4  # of each prompt of a block-causal model


def prompt(seed: int) -> list[int]:
    return [20 + seed, *range(30, 61)]


class Pools:
    """Pools by the name of their content."""

    def __init__(self) -> None:
        self.found: dict[str, SharedUnits] = {}

    def __call__(self, _: PoolAddress, content: str) -> FakePool:
        return FakePool(self.found.setdefault(content, SharedUnits()))

    @property
    def only(self) -> SharedUnits:
        (shared,) = self.found.values()
        return shared


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    """Computing is never known to be faster than reading."""

    def build_with_pool(config: DecodeConfig, *given: Any, **more: Any) -> Engine:
        url = "lmcache://127.0.0.1:1/tests" if config.kv_offloading_size else None
        return build(replace(config, kv_pool=url), *given, **more)

    monkeypatch.setattr(Room, "prompt_s", lambda *_: 0.0)
    monkeypatch.setattr(llm, "build", build_with_pool)
    made = Pools()
    monkeypatch.setattr(assembly, "LMCachePool", made)
    return made


class Worker:
    """An engine of so many ranks, and what it has computed and read."""

    def __init__(self, made: effuse.LLM) -> None:
        self.llm = made
        core = made._core
        assert isinstance(core, DecodeEngine) and isinstance(core._cache, TieredCache)
        self.core, self.cache = core, core._cache

    def ask(self, seeds: Sequence[int]) -> list[tuple[int, ...]]:
        found = [self.llm.generate(prompt(seed), ASKED)[0].token_ids for seed in seeds]
        pool = self.cache.tiers.pool
        while self.cache.is_copying or self.cache._due or (pool and pool.is_usable and pool.due):
            self.core.step()
        return found

    @property
    def computed(self) -> int:
        return self.core.counters.prompt_tokens

    def figure(self, name: str) -> int:
        return self.cache.tiers.figures()[name]


def with_worker(path: Path, degree: int, use: Callable[[Worker], None], **options: Any) -> None:
    options = OPTIONS | {"kv_offloading_size": 0.001} | options
    with effuse.LLM(path, tensor_parallel_size=degree, **options) as made:
        use(Worker(made))


@pytest.mark.parametrize(("family", "degrees"), [("sdar", (4, 2, 1)), ("dream", (1, 2))])
def test_engines_of_any_degree_read_what_others_wrote(
    tmp_path: Path, pools: Pools, family: Architecture, degrees: Sequence[int]
) -> None:
    """Two KV heads, so of four ranks each two have the same one, which is written once."""
    path = write_tiny_checkpoint(tmp_path, family, seed=2, block_size=4)
    with effuse.LLM(path, enable_prefix_caching=False, **OPTIONS) as alone:
        expected = [alone.generate(prompt(seed), ASKED)[0].token_ids for seed in range(3)]

    def turn(number: int, worker: Worker) -> None:
        known, page_bytes = range(number), worker.cache.tiers.host.page_bytes
        assert worker.ask(known) == expected[:number]
        assert worker.computed == 0
        assert worker.figure("pool_read") == number * UNITS * page_bytes
        assert worker.ask([number]) == [expected[number]]
        assert worker.computed == 32
        assert worker.figure("corrupt") == worker.figure("pool_failures") == 0

    for number, degree in enumerate(degrees):
        with_worker(path, degree, partial(turn, number))
    assert len(set(map(len, pools.only.units.values()))) == 1, "a unit is one object of a prompt"


def test_a_unit_that_is_lost_or_wrong_in_a_ranks_part_is_computed_again(
    tmp_path: Path, pools: Pools
) -> None:
    """Nothing of it is used, and it is whole in the pool afterwards. Then the pool dies."""
    path = write_tiny_checkpoint(tmp_path, "sdar", seed=2, block_size=4)
    expected: list[tuple[int, ...]] = []
    with_worker(path, 1, lambda worker: expected.extend(worker.ask([0, 1, 2, 3, 4])))
    units = pools.only.units

    def use(worker: Worker) -> None:
        keys = [worker.cache.begin("", prompt(seed), 32).keys for seed in range(4)]
        units[keys[0][0]][-worker.cache.tiers.host.page_bytes] ^= 1  # the first rank's
        units[keys[1][1]][-1] ^= 1  # the last one's
        del units[keys[2][2]]
        units[keys[3][3]] = units[keys[3][3]][:-256]
        assert worker.ask([0, 1, 2, 3]) == expected[:4]
        assert worker.figure("corrupt") == 3
        assert worker.computed == 32 + 24 + 16 + 8
        pools.only.fault = "dead"
        assert worker.ask([4]) == expected[4:]
        assert worker.figure("pool_failures") == 1

    def read(worker: Worker) -> None:
        assert worker.ask([0, 1, 2, 3]) == expected[:4]
        assert worker.computed == worker.figure("corrupt") == 0

    with_worker(path, 2, use)
    pools.only.fault = ""
    with_worker(path, 1, read)


def test_without_a_store_each_rank_keeps_its_heads_in_host_memory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Room, "prompt_s", lambda *_: 0.0)
    path = write_tiny_checkpoint(tmp_path / "model", "sdar", seed=2, block_size=4)
    seeds = range(4)

    def use(worker: Worker) -> None:
        expected = [worker.ask([seed]) for seed in seeds]
        computed = worker.computed
        assert [worker.ask([seed]) for seed in seeds] == expected
        assert worker.computed == computed
        assert worker.figure("loaded") > 0 and worker.figure("corrupt") == 0

    with_worker(path, 2, use, num_pages=8)  # fewer than the four prompts fill


def test_files_of_a_group_serve_a_worker_of_another_degree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Room, "prompt_s", lambda *_: 0.0)
    path = write_tiny_checkpoint(tmp_path / "model", "sdar", seed=2, block_size=4)
    files: dict[str, Any] = {
        "kv_offloading_dir": tmp_path / "files",
        "kv_offloading_size": 3072 * 6 / (1 << 30),  # so few pages that units leave it
    }
    expected: list[tuple[int, ...]] = []
    with_worker(path, 2, lambda worker: expected.extend(worker.ask([0, 1, 2, 3])), **files)
    assert len(list((tmp_path / "files").glob("*/*"))) > UNITS

    def use(worker: Worker) -> None:
        assert worker.ask([0]) == expected[:1]
        assert worker.figure("file_read") > 0 and worker.figure("corrupt") == 0

    with_worker(path, 1, use, **files)


def test_engines_that_promise_equal_bits_share_only_with_their_own_degree() -> None:
    """Sums over ranks round differently, and no answer may depend on which worker was first."""

    def content(degree: int, **changes: Any) -> str:
        layout = layouts_of(KVLayout("unified", 4, 4, 16, 8, "float32"), degree)[0]
        model = SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(block_size=4))
        part: Any = SimpleNamespace(memory=SimpleNamespace(layout=layout), model=model)
        config = DecodeConfig(tensor_parallel_size=degree, **changes)
        return assembly._content_of(config, part, ())

    assert content(1) == content(2) == content(4)
    exact = [content(degree, batch_invariant=True) for degree in (1, 2, 4)]
    exact.append(content(2, batch_invariant=True, expert_parallel=True))
    assert len({content(1), *exact}) == 5
