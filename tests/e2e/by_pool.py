"""Prompts at once, by handoffs and through a shared pool: seconds of each turn, and the tokens that
are computed again once both workers were killed. Random prompts of a tiny model on CPUs.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.by_pool
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

from e2e.processes import kill, restart, tree
from e2e.test_kv_mode import await_pool, by_pool_fleet, computed
from e2e.test_shared_pool import LENGTH, ask, prompts
from e2e.tiny import tiny_fleet
from kvtransfer.lmcache_server import LMCacheServer
from kvtransfer.mooncake_master import Mooncake

from effuse.cli.fleet import Fleet

WORKERS = ("prefill-0", "decode-0")
Tokens = list[tuple[int, ...]]


def cpu_s(fleet: Fleet, worker: str) -> float:
    """Seconds of a core that a worker's processes have used."""
    times = [one.cpu_times() for one in tree(fleet.processes[worker].pid)]
    return sum(one.user + one.system for one in times)


def turn(fleet: Fleet, name: str, asked: list[list[int]]) -> Tokens:
    """Asks all at once, prints how long that took and which tokens were computed."""
    before = [computed(fleet, worker) for worker in WORKERS]
    used_s = [-cpu_s(fleet, worker) for worker in WORKERS]
    began_s = time.monotonic()
    found = ask(fleet, asked)
    taken_s = time.monotonic() - began_s
    used_s = [cpu_s(fleet, worker) + one for worker, one in zip(WORKERS, used_s, strict=True)]
    of_each = [computed(fleet, worker) - n for worker, n in zip(WORKERS, before, strict=True)]
    by_pool = sum(one.stats.connector == "pool" for one in found)
    print(
        f"{name}: {len(found)} prompts of {LENGTH} tokens in {taken_s:.2f} s, {by_pool} of them "
        f"through the pool; the workers computed {of_each[0]:g} and {of_each[1]:g} tokens, in "
        f"{used_s[0]:.2f} and {used_s[1]:.2f} s of a core",
        flush=True,
    )
    return [tuple(one.token_ids) for one in found]


def main() -> int:
    """Returns 1 if answers differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3, help="each with prompts of its own")
    parser.add_argument("--num-pages", type=int, default=512, help="of each worker")
    parser.add_argument("--family", default="sdar")
    parser.add_argument("--pool", choices=("mooncake", "lmcache"), default="mooncake")
    asked = parser.parse_args()
    turns = [prompts(seed, asked.prompts) for seed in range(asked.turns)]
    with tiny_fleet(asked.family, connector="zmq", num_pages=asked.num_pages) as fleet:
        ask(fleet, prompts(99, 1))
        expected = [turn(fleet, "by handoffs", one) for one in turns]
    kind = Mooncake if asked.pool == "mooncake" else LMCacheServer
    with (
        tempfile.TemporaryDirectory() as home,
        contextlib.closing(kind(Path(home))) as pool,
        by_pool_fleet(asked.family, pool, num_pages=asked.num_pages) as fleet,
    ):
        await_pool(fleet)
        found = [turn(fleet, asked.pool, one) for one in turns]
        for worker in WORKERS:
            kill(fleet, worker)
        for worker in WORKERS:
            restart(fleet, worker)
        await_pool(fleet)
        found += [turn(fleet, "both workers killed", one) for one in turns]
    pairs = zip(chain(*expected, *expected), chain(*found), strict=True)
    equal = sum(one == other for one, other in pairs)
    print(f"{equal} of {2 * asked.turns * asked.prompts} answers are equal")
    return int(found != 2 * expected)


if __name__ == "__main__":
    sys.exit(main())
