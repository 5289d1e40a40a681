"""Whether answers depend on what else runs: the bundled model on GPUs, in bf16, in many fleets.

One base run is compared with runs in which one factor changed, and with random combinations. If
`--off` leaves `--batch-invariant` out, some answers change. With `--ranks 2` every fleet is one
worker of two GPUs.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.same_answers --requests 500
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from e2e.test_metrics import scrape
from kvtransfer.lmcache_stand_in import StandIn

import effuse
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.problems.problem import problem
from effuse.worker.gpus import gpus_here

Asked = tuple[str, effuse.Params]
Tokens = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Way:
    """How requests are served."""

    at_once: int = 24
    times: int = 1  # each request is asked
    caches: bool = True
    is_split: bool = True  # into prefill and decode workers
    does_both: bool = False  # two workers that compute prompts for each other
    connector: str = "nixl"
    eager: bool = False
    pages: int = 4096
    ranks: int = 1  # of each worker
    tier: str = ""  # below these pages: "host" memory, or also "files" or a "pool"

    def config(self, device: str, mode: tuple[str, ...], below: str) -> FleetConfig:
        """The fleet's; `below` is a directory for files, or the URL of a pool."""
        count = self.ranks * (1 + self.is_split)
        gpus = tuple(gpus_here())[:count] if device == "cuda" else None
        dtype = "bfloat16" if device == "cuda" else "float32"
        flags = ("--device", device, "--dtype", dtype, "--num-pages", str(self.pages), *mode)
        return FleetConfig(
            prefill=int(self.is_split and not self.does_both),
            decode=int(not self.does_both),
            workers=2 * self.does_both,
            router_flags=("--prefill", "remote") if self.does_both else (),
            connector=self.connector,
            worker_flags=(
                *flags,
                *(("--enforce-eager",) if self.eager else ()),
                *(() if self.caches else (NO_CACHE,)),
                *(("--tensor-parallel-size", str(self.ranks)) if self.ranks > 1 else ()),
                *(("--kv-offloading-size", HOST_GIB[self.tier]) if self.tier else ()),
                *((PLACES[self.tier], below) if self.tier in PLACES else ()),
            ),
            gpus=gpus,
            gpu_sharing=gpus is not None and len(gpus) < count,
            has_secret=False,
        )


SPOIL_S = 3.0
NO_CACHE = "--no-enable-prefix-caching"
HOST_GIB = {"host": "0.5", "files": "0.005", "pool": "0.005"}
PLACES = {"files": "--kv-offloading-dir", "pool": "--kv-pool"}
# Counters of bytes that came back.
LOADED = {
    "host": ("offload_loaded",),
    "files": ("offload_read", "offload_loaded"),
    "pool": ("pool_read", "offload_loaded"),
}
BASE = Way()
WAYS = {
    "alone": replace(BASE, at_once=1),
    "6 at once": replace(BASE, at_once=6),
    "64 at once": replace(BASE, at_once=64),
    "asked twice": replace(BASE, times=2),
    "no prefix cache": replace(BASE, caches=False),
    "one worker": replace(BASE, is_split=False),
    "both roles": replace(BASE, does_both=True),
    "zmq": replace(BASE, connector="zmq"),
    "eager": replace(BASE, eager=True),
    "preempted": replace(BASE, pages=20, at_once=64),
    "host memory": replace(BASE, pages=160, times=2, tier="host"),
    "files": replace(BASE, pages=160, times=2, tier="files"),
    "pool": replace(BASE, pages=160, times=2, tier="pool"),
}


def requests(count: int) -> list[Asked]:
    """Prompts of two problems each: greedy and sampled, one and two answers, with stops or
    without an end."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 1.0, "top_p": 0.9, "seed": 8, "n": 2},
        {"stop": (";",)},
        {"ignore_eos": True},
    )
    return [
        (
            f"{problem(5, number).prompt} {problem(6, number).prompt}",
            effuse.Params(max_tokens=64, **kinds[number % len(kinds)]),
        )
        for number in range(count)
    ]


def answers(
    way: Way, asked: Sequence[Asked], device: str, mode: tuple[str, ...]
) -> tuple[list[Tokens], int, int]:
    """(the token ids of all answers, each time that they were asked; preemptions; KV bytes that
    came from the tier)."""

    def ask(one: Asked) -> tuple[Tokens, int]:
        found = client.generate(*one)
        assert not mode or found.deterministic
        tokens = tuple(tuple(own.token_ids) for own in found.answers)
        return tokens, sum(own.stats.preemptions for own in found.answers)

    with (
        place_of(way.tier) as below,
        Fleet(way.config(device, mode, below)) as fleet,
        effuse.Client(fleet.address, timeout_s=300) as client,
        ThreadPoolExecutor(way.at_once) as pool,
    ):
        found = [one for _ in range(way.times) for one in pool.map(ask, asked)]
        moved = loaded_bytes(fleet, way.tier)
    return [tokens for tokens, _ in found], sum(count for _, count in found), moved


@contextlib.contextmanager
def place_of(tier: str) -> Iterator[str]:
    """A directory for files, or the URL of a pool that loses and spoils units all the time."""
    if tier != "pool":
        with tempfile.TemporaryDirectory(prefix="effuse-same-") as directory:
            yield directory
        return
    with contextlib.closing(StandIn()) as pool, spoiled(pool):
        yield pool.url


@contextlib.contextmanager
def spoiled(pool: StandIn) -> Iterator[None]:
    """Loses and spoils units of the pool every few seconds, until the context ends."""
    is_over = threading.Event()

    def spoil() -> None:
        while not is_over.wait(SPOIL_S):
            pool.spoil()

    spoiling = threading.Thread(target=spoil)
    spoiling.start()
    try:
        yield
    finally:
        is_over.set()
        spoiling.join()


def loaded_bytes(fleet: Fleet, tier: str) -> int:
    """KV bytes that came from a tier; 0 if there is none."""
    samples = scrape(fleet).items()
    counters = [f"effuse_kv_{name}_bytes_total" for name in LOADED.get(tier, ())]
    return int(min((sum(n for key, n in samples if key[0] == c) for c in counters), default=0))


def num_different(found: Sequence[Tokens], expected: Sequence[Tokens]) -> int:
    """Answers of `found`, which repeats them, that are not as expected."""
    return sum(one != expected[i % len(expected)] for i, one in enumerate(found))


def mixed(rng: random.Random) -> Way:
    """A random combination of factors."""
    caches = rng.random() < 0.5
    return Way(
        at_once=rng.choice((1, 6, 24, 64)),
        times=rng.choice((1, 2)),
        caches=caches,
        is_split=(is_split := rng.random() < 0.6),
        does_both=is_split and rng.random() < 0.3,
        connector=rng.choice(("nixl", "zmq")),
        eager=rng.random() < 0.3,
        pages=rng.choice((160, 4096)),
        tier=rng.choice(("", "host", "files")) if caches else "",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all ways for which there is time; 1 if an answer changed, or a way did not do what it is
    named after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--ways", nargs="*", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--mixed", type=int, default=20, help="random combinations")
    parser.add_argument("--skip", type=int, default=0, help="so many of them, for a second call")
    parser.add_argument("--seconds", type=float, default=1e9, help="no way begins after them")
    parser.add_argument("--ranks", type=int, default=1, help="of each worker")
    parser.add_argument("--off", action="store_true", help="without --batch-invariant")
    given = parser.parse_args(argv)
    mode = () if given.off else ("--batch-invariant",)
    began, rng = time.monotonic(), random.Random(39)
    asked = requests(given.requests)
    group = {"ranks": given.ranks, "is_split": False} if given.ranks > 1 else {}
    expected, *_ = answers(replace(BASE, **group), asked, given.device, mode)
    ways = {name: (replace(WAYS[name], **group), asked) for name in given.ways}
    few = asked[: max(1, len(asked) // 5)]
    combinations = [(mixed(rng), few) for _ in range(given.mixed)]
    ways |= {
        f"mixed {number}": way for number, way in enumerate(combinations) if number >= given.skip
    }
    total = missed = 0
    for name, (way, own) in ways.items():
        if time.monotonic() - began > given.seconds:
            print(f"{name}: no time left")
            continue
        found, preempted, moved = answers(way, own, given.device, mode)
        count = num_different(found, expected[: len(own)])
        total += count
        missed += name == "preempted" and not preempted
        missed += name in WAYS and way.tier != "" and not moved
        took_s = time.monotonic() - began
        print(
            f"{name}: {count} of {len(found)} differ, {preempted} preemptions, "
            f"{moved / 1e6:.1f} MB from {way.tier or 'no tier'}, {took_s:.0f} s",
            flush=True,
        )
    print(f"{total} differ{', and nothing was preempted, or came from a tier' if missed else ''}")
    return int(total + missed > 0)


if __name__ == "__main__":
    sys.exit(main())
