"""Prompts that go from prefill to decode workers through a real Mooncake Store."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Architecture
from e2e.client import wait_until
from e2e.processes import kill, restart
from e2e.test_shared_pool import COUNT, LENGTH, ask, counted, flags, prompts
from e2e.tiny import TINY, tiny_fleet
from kvtransfer.lmcache_server import LMCacheServer
from kvtransfer.mooncake_master import Mooncake

import effuse
from effuse.cli.fleet import Fleet
from effuse.client.answer import Answer

pytestmark = pytest.mark.mooncake


@pytest.fixture
def mooncake(tmp_path: Path) -> Iterator[Mooncake]:
    running = Mooncake(tmp_path)
    yield running
    running.close()


def by_pool_fleet(
    architecture: Architecture, pool: Mooncake | LMCacheServer, **more: Any
) -> contextlib.AbstractContextManager[Fleet]:
    return tiny_fleet(
        architecture,
        connector="zmq",
        worker_flags=flags(pool),
        router_flags=("--kv-mode", "pool"),
        **more,
    )


def await_pool(fleet: Fleet) -> None:
    """Until the router knows that the workers share the pool."""
    draw = random.Random(99)

    def goes_by_pool() -> bool:
        (found,) = ask(fleet, [draw.choices(TINY.plain_ids, k=TINY.page_size)])
        return found.stats.connector == "pool"

    wait_until(goes_by_pool, "no prompt goes through the pool")


def computed(fleet: Fleet, *workers: str) -> float:
    """Tokens of prompts that these workers have computed."""
    of_prefill = sum(counted(fleet, "engine_step_tokens", one) for one in workers if "p" in one)
    return of_prefill + sum(counted(fleet, "own_prompt_tokens", one) for one in workers)


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        (Mooncake, "sdar"),
        (Mooncake, "fast_dllm_v2"),
        (Mooncake, "dream"),
        (LMCacheServer, "sdar"),
    ],
)
def test_a_prompt_reaches_its_decode_worker_through_the_pool(
    tmp_path: Path, kind: type[Mooncake | LMCacheServer], architecture: Architecture
) -> None:
    """And outlives both workers: nobody computes it a second time, but for the last unit if the
    model needs the row of its last token. On busy cores the pool may be late for a few."""
    asked = prompts(1)
    with tiny_fleet(architecture, connector="zmq") as fleet:
        expected = [one.token_ids for one in ask(fleet, asked)]
    few = COUNT * LENGTH / 4
    rest = COUNT * TINY.page_size if architecture == "fast_dllm_v2" else 0
    with (
        contextlib.closing(kind(tmp_path)) as pool,
        by_pool_fleet(architecture, pool) as fleet,
    ):
        await_pool(fleet)
        before = computed(fleet, "prefill-0"), computed(fleet, "decode-0")
        found = ask(fleet, asked)
        assert [one.token_ids for one in found] == expected
        assert sum(one.stats.connector == "pool" for one in found) >= COUNT * 3 / 4
        assert computed(fleet, "prefill-0") - before[0] == COUNT * LENGTH
        assert rest <= computed(fleet, "decode-0") - before[1] <= rest + few
        for worker in ("prefill-0", "decode-0"):
            kill(fleet, worker)
        for worker in ("prefill-0", "decode-0"):
            restart(fleet, worker)
        await_pool(fleet)
        before = computed(fleet, "prefill-0"), computed(fleet, "decode-0")
        again = ask(fleet, asked)
        assert [one.token_ids for one in again] == expected
        assert computed(fleet, "prefill-0") - before[0] <= few
        assert computed(fleet, "decode-0") - before[1] <= rest + few


def test_an_answer_goes_on_elsewhere_without_a_second_prefill(mooncake: Mooncake) -> None:
    """Its decode worker is killed in the middle. The prefill worker computes nothing, and the other
    decode worker less than two units of each text: what was not in the pool yet."""
    asked, long = prompts(5), effuse.Params(max_tokens=128, ignore_eos=True)
    with tiny_fleet("sdar", connector="zmq") as fleet:
        expected = [one.token_ids for one in ask(fleet, asked, long)]
    with by_pool_fleet("sdar", mooncake, decode=2, num_pages=1024) as fleet:
        await_pool(fleet)
        before = computed(fleet, "prefill-0"), computed(fleet, "decode-1")
        found: list[Answer] = []
        asking = threading.Thread(target=lambda: found.extend(ask(fleet, asked, long)))
        asking.start()
        wait_until(
            lambda: counted(fleet, "generation_tokens", "decode-0") > COUNT * 4,
            "the answers do not begin",
        )
        kill(fleet, "decode-0")
        asking.join()
        restart(fleet, "decode-0")
        assert [one.token_ids for one in found] == expected
        log = (fleet.log_dir / "router.log").read_text()
        moved = log.count("attempt 1 on decode-0")
        own = computed(fleet, "decode-1") - before[1]
        print(f"{moved} of {COUNT} moved, with {own:g} tokens computed again")
        assert moved >= COUNT / 4
        assert computed(fleet, "prefill-0") - before[0] == COUNT * LENGTH
        assert own <= moved * 2 * TINY.page_size


@pytest.mark.parametrize("fault", ["killed", "paused", "full"])
def test_a_pool_that_fails_leaves_prompts_to_handoffs(mooncake: Mooncake, fault: str) -> None:
    """Within a second, with a metric and one line of the log."""
    asked = prompts(6)
    with tiny_fleet("sdar", connector="zmq") as fleet:
        expected = [one.token_ids for one in ask(fleet, asked)]
    with by_pool_fleet("sdar", mooncake) as fleet:
        await_pool(fleet)
        if fault == "killed":
            mooncake.master.kill()
        elif fault == "full":
            mooncake.fill()
        with mooncake.paused() if fault == "paused" else mooncake.idle():
            began_s = time.monotonic()
            found = ask(fleet, asked)
            taken_s = time.monotonic() - began_s
            began_s = time.monotonic()
            again = ask(fleet, prompts(7))
        print(
            f"{fault}: {COUNT} answers in {taken_s:.2f} s, later {time.monotonic() - began_s:.2f}"
        )
        assert [one.token_ids for one in found] == expected
        assert {one.stats.connector for one in found} <= {"zmq", "pool"}
        assert {one.stats.connector for one in again} == {"zmq"}
        assert counted(fleet, "kv_pool_failures", "prefill-0") > 0
        log = (fleet.log_dir / "prefill-0.log").read_text()
        line = "no KV is written to" if fault == "full" else "KV in"
        assert log.count(f"{line} the shared pool") == 1
