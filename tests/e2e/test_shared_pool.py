"""Prompts that survive their workers in a real Mooncake Store, through real processes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import Architecture
from e2e.client import all_at_once, wait_until
from e2e.processes import kill, restart
from e2e.test_metrics import scrape
from e2e.tiny import TINY, tiny_fleet
from kvtransfer.lmcache_server import LMCacheServer
from kvtransfer.mooncake_master import Mooncake

import effuse
from effuse.cli.fleet import Fleet
from effuse.client.answer import Answer

pytestmark = pytest.mark.mooncake

COUNT, LENGTH = 20, 128
ASKED = effuse.Params(max_tokens=8, ignore_eos=True)


@pytest.fixture
def mooncake(tmp_path: Path) -> Iterator[Mooncake]:
    running = Mooncake(tmp_path)
    yield running
    running.close()


def prompts(seed: int, count: int = COUNT) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(TINY.plain_ids, k=LENGTH) for _ in range(count)]


def flags(pool: Mooncake | LMCacheServer) -> tuple[str, ...]:
    return "--kv-offloading-size", "0.02", "--kv-pool", pool.url


def ask(fleet: Fleet, asked: list[list[int]], params: effuse.Params = ASKED) -> list[Answer]:
    with effuse.Client(fleet.address, timeout_s=120) as client:
        return all_at_once(lambda prompt: client.generate(prompt, params), asked)


def counted(fleet: Fleet, name: str, worker: str) -> float:
    samples = scrape(fleet).items()
    return sum(n for key, n in samples if key[:2] == (f"effuse_{name}_total", worker))


def await_kept(fleet: Fleet, worker: str, num_tokens: int) -> None:
    """Until the pool has the KV of so many tokens from a worker."""
    least = num_tokens * TINY.page_bytes // TINY.page_size
    wait_until(
        lambda: counted(fleet, "kv_pool_kept_bytes", worker) >= least, "the pool has not all KV"
    )


def test_a_prompt_survives_both_of_its_workers(mooncake: Mooncake) -> None:
    """The prefill worker hands over what the pool has."""
    asked = prompts(1)
    with tiny_fleet("sdar", connector="zmq", worker_flags=flags(mooncake)) as fleet:
        before = ask(fleet, asked)
        assert counted(fleet, "engine_step_tokens", "prefill-0") == COUNT * LENGTH
        await_kept(fleet, "prefill-0", COUNT * LENGTH)
        for worker in ("prefill-0", "decode-0"):
            kill(fleet, worker)
        for worker in ("prefill-0", "decode-0"):
            restart(fleet, worker)
        again = ask(fleet, asked)
        assert [one.token_ids for one in again] == [one.token_ids for one in before]
        assert {one.stats.prefill_worker for one in again} == {"prefill-0"}
        # Of so small a model, computing a few may be faster.
        assert counted(fleet, "engine_step_tokens", "prefill-0") <= COUNT * LENGTH / 4
        assert counted(fleet, "own_prompt_tokens", "decode-0") == 0


@pytest.mark.parametrize("architecture", ["sdar", "dream"])
def test_a_killed_worker_without_prefill_workers_computes_no_prompt_again(
    mooncake: Mooncake, architecture: Architecture
) -> None:
    asked = prompts(2)
    worker_flags = flags(mooncake)
    with tiny_fleet(architecture, connector="zmq", prefill=0, worker_flags=worker_flags) as fleet:
        before = ask(fleet, asked)
        assert counted(fleet, "own_prompt_tokens", "decode-0") == COUNT * LENGTH
        await_kept(fleet, "decode-0", COUNT * LENGTH)
        kill(fleet, "decode-0")
        restart(fleet, "decode-0")
        again = ask(fleet, asked)
        assert [one.token_ids for one in again] == [one.token_ids for one in before]
        assert counted(fleet, "own_prompt_tokens", "decode-0") == 0


@pytest.mark.parametrize("fault", ["killed", "paused"])
def test_a_master_that_fails_costs_no_answer(mooncake: Mooncake, fault: str) -> None:
    asked, others = prompts(3), prompts(4)
    with tiny_fleet("sdar", connector="zmq", prefill=0, worker_flags=flags(mooncake)) as fleet:
        expected = ask(fleet, asked)
        await_kept(fleet, "decode-0", COUNT * LENGTH)
        if fault == "killed":
            mooncake.master.kill()
        with mooncake.paused() if fault == "paused" else mooncake.idle():
            began_s = time.monotonic()
            found = ask(fleet, others)
            taken_s = time.monotonic() - began_s
            again = ask(fleet, asked)
        print(f"{fault}: {COUNT} answers in {taken_s:.2f} s")
        assert all(len(one.token_ids) == ASKED.max_tokens for one in found)
        assert [one.token_ids for one in again] == [one.token_ids for one in expected]
        assert counted(fleet, "kv_pool_failures", "decode-0") > 0
        log = (fleet.log_dir / "decode-0.log").read_text()
        assert log.count("KV in the shared pool is not used for 30 s") == 1
