"""Engines that share a real Mooncake Store: the same tokens, and no prompt is computed twice."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from decoding.chats import Models, told
from decoding.engines import Rig, make_request
from kvtransfer.mooncake_master import Mooncake

from effuse.kvtransfer.host_pages import HostPages
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.mooncake_pool import MooncakePool
from effuse.kvtransfer.tiered_cache import TieredCache
from effuse.kvtransfer.tiers import Tiers

pytestmark = pytest.mark.mooncake

SMALL: dict[str, Any] = {"num_pages": 56, "page_size": 4, "max_num_seqs": 8, "budget": 256}
PROMPT = range(20, 52)
Made = Callable[[PageMemory, Callable[[], float]], Tiers]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    running = Mooncake(tmp_path_factory.mktemp("mooncake"))
    yield running
    running.close()


class Workers:
    """Makes tiers of workers that share units of one name in the pool."""

    def __init__(self, mooncake: Mooncake, name: str) -> None:
        self.mooncake, self.name = mooncake, name
        self.pools: list[MooncakePool] = []

    def __call__(self, memory: PageMemory, now: Callable[[], float]) -> Tiers:
        host = HostPages(memory, 100, is_shared=True)
        self.pools.append(MooncakePool(self.mooncake.address, self.name, host))
        tiers = Tiers(host, self.pools[-1:], now=time.monotonic)
        tiers.stores[0].opening.result(30)  # type: ignore[union-attr]
        return tiers

    def close(self) -> None:
        for pool in self.pools:
            pool.close()

    def spoil(self, keys: list[bytes]) -> None:
        """Flips a bit of each of these units in the pool."""
        names = [f"effuse/tests/{self.name}/{key.hex()}" for key in keys]
        self.mooncake.run(
            f"for name in {names}:\n"
            "    data = bytearray(store.get(name))\n"
            "    data[-1] ^= 1\n"
            "    assert not store.remove(name, True) and not store.put(name, bytes(data))\n"
        )


NAMES = map(str, count())


@pytest.fixture
def workers(mooncake: Mooncake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """With time for a slow machine."""
    for name in ("FIND_S", "READ_S"):
        monkeypatch.setattr(f"effuse.kvtransfer.store_tier.{name}", 60.0)
    made = Workers(mooncake, next(NAMES))
    yield made
    made.close()


@pytest.fixture
def own_workers(tmp_path: Path) -> Iterator[Workers]:
    """With a pool of their own, to which anything may be done."""
    mooncake = Mooncake(tmp_path, megabytes=16)
    made = Workers(mooncake, "own")
    yield made
    made.close()
    mooncake.close()


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("sdar", "block_diffusion"),
        ("llada2_moe", "block_diffusion"),
        ("fast_dllm_v2", "fast_dllm_v2"),
        ("dream", "d2f"),
        ("llada", "block_diffusion"),
    ],
)
def test_shared_kv_changes_no_token(
    models: Models, workers: Workers, family: str, way: str
) -> None:
    """Chats on one worker, then once more on another one that only has the pool."""
    asked: dict[str, Any] = {"seed": 1, "most": 40, "turns": 3}
    expected, alone = told(models(family), way, caches=False, **asked)
    computed = []
    for _ in range(2):
        found, rig = told(models(family), way, caches=True, tiers=workers, **asked, **SMALL)
        assert found == expected
        rig.settle()
        computed.append(rig.engine.counters.prompt_tokens)
        load = rig.engine.load()
        assert load.offload_corrupt == load.offload_pool_failures == 0
    assert load.offload_pool_read > 0
    assert computed[1] < computed[0] <= alone.engine.counters.prompt_tokens


def answer(rig: Rig, name: str, prompt: Any = PROMPT) -> list[int]:
    one = rig.start(make_request(name, prompt, max_tokens=8))
    rig.run()
    rig.settle()
    return list(one.token_ids)


@pytest.mark.parametrize("family", ["sdar", "dream"])
def test_a_prompt_survives_its_worker(models: Models, workers: Workers, family: str) -> None:
    """Asked for again after the worker has ended, on one that starts anew."""
    first = Rig(models(family), num_pages=64, tiers=workers)
    tokens = answer(first, "a")
    assert first.engine.counters.prompt_tokens > 0
    workers.pools[0].close()
    other = Rig(models(family), num_pages=64, tiers=workers)
    assert answer(other, "b") == tokens
    assert other.engine.counters.prompt_tokens == 0
    assert other.engine.load().prefix_hits == 32


def test_a_chat_goes_on_elsewhere(models: Models, workers: Workers) -> None:
    """The next turn computes only what was never stored: the last block of the answer."""
    first = Rig(models("sdar"), num_pages=64, tiers=workers)
    turn = [*PROMPT, *answer(first, "a"), *range(20, 28)]
    workers.pools[0].close()
    other = Rig(models("sdar"), num_pages=64, tiers=workers)
    answer(other, "b", turn)
    assert other.engine.load().prefix_hits >= 32
    assert other.engine.counters.prompt_tokens <= len(turn) - 32


@pytest.mark.parametrize("fault", ["dead", "paused", "full", "corrupt"])
@pytest.mark.parametrize("family", ["sdar", "dream"])
def test_a_pool_that_fails_costs_a_second_and_no_answer(
    models: Models,
    own_workers: Workers,
    family: str,
    fault: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers, mooncake = own_workers, own_workers.mooncake
    first = Rig(models(family), num_pages=64, tiers=workers)
    tokens = answer(first, "a")
    other = Rig(models(family), num_pages=64, tiers=workers)
    assert isinstance(first.cache, TieredCache) and isinstance(other.cache, TieredCache)
    keys = list(first.cache.tiers.kept)
    assert keys and set(keys) <= set(workers.pools[0]._known)
    if fault == "dead":
        mooncake.master.kill()
        mooncake.master.wait(10)
    elif fault == "full":
        mooncake.fill()
    elif fault == "corrupt":
        workers.spoil(keys)
    prompt = range(30, 62) if fault == "full" else PROMPT
    expected = answer(Rig(models(family), num_pages=64), "c", prompt)
    with (
        caplog.at_level(logging.WARNING),
        mooncake.paused() if fault == "paused" else mooncake.idle(),
    ):
        began_s = time.monotonic()
        assert answer(other, "b", prompt) == expected
        taken_s = time.monotonic() - began_s
        if fault in ("dead", "paused"):
            assert answer(other, "d", prompt) == expected
    assert fault == "full" or expected == tokens
    load = other.engine.load()
    assert load.prefix_hits in (0, 32 * (fault in ("dead", "paused")))
    least, most = {"corrupt": (0, 0), "full": (1, 32)}.get(fault, (1, 1))  # writes in flight
    assert least <= load.offload_pool_failures <= most
    assert (load.offload_corrupt > 0) == (fault == "corrupt")
    lines = {record.getMessage() for record in caplog.records}
    assert len(lines) == 1, lines
    if fault != "corrupt":
        assert len(caplog.records) == 1
    print(f"{family}, {fault}: {taken_s:.2f} s")
