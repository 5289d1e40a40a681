"""Settings in combination: every two choices that the commands accept together meet in a fleet. Its
tokens are the reference decoder's, or those of the authors' own code.

All pairs, and not all combinations: most defects of several settings need two of them (Kuhn,
Wallace, Gallo, Software Fault Interactions). Fleets run on CPUs, one after another. In some an
engine is killed while it answers.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.combinations --seconds 600
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from checkpoints import ARCHITECTURES
from e2e.client import all_at_once, connect
from e2e.degrees import CANVASES, LOOPS, REPLICAS, SPREAD, asked_of, count_wrong, model_of
from e2e.processes import engine_of

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet, FleetError
from effuse.config.flags import parse
from effuse.router.config import RouterConfig
from effuse.worker.config import BothConfig, DecodeConfig, PrefillConfig

BOTH: Final = "2 of both"
TIER: Final = "TIER"  # in a flag: a directory of the fleet's own
MOST_ASKED: Final = 20  # requests of a fleet, each twice
KILL_AFTER_S: Final = 0.4
DEADLINE_S: Final = 30.0
DRAWN: Final = 1000  # combinations of which the one with the most new pairs is next

Flags = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What one choice adds to a fleet."""

    workers: Flags = ()
    prefill: Flags = ()
    decode: Flags = ()
    router: Flags = ()
    fleet: Mapping[str, Any] = field(default_factory=dict)  # fields of its config


def _sizes(flag: str, *, prefill: bool = False) -> dict[str, Choice]:
    """One device or two, of prefill workers or of decode workers."""
    words = (flag, "2")
    return {"1": Choice(), "2": Choice(prefill=words) if prefill else Choice(decode=words)}


_TIER_FLAGS: Final = ("--kv-offloading-size", "0.05")
SETTINGS: Final[Mapping[str, Mapping[str, Choice]]] = {
    "work": dict.fromkeys([*ARCHITECTURES, *LOOPS, *CANVASES], Choice())
    | {
        SPREAD: Choice(("--expert-parallel",)),
        REPLICAS: Choice(decode=("--data-parallel-size", "2")),
    },
    "workers": {
        "1P1D": Choice(),
        "1D": Choice(fleet={"prefill": 0}),
        "2P2D": Choice(fleet={"prefill": 2, "decode": 2}),
        BOTH: Choice(fleet={"prefill": 0, "decode": 0, "workers": 2}),
    },
    "pages move": {
        "nixl": Choice(fleet={"connector": "nixl"}),
        "zmq": Choice(fleet={"connector": "zmq"}),
        "encrypted": Choice(("--encrypt-pages",), fleet={"connector": "zmq", "has_secret": True}),
    },
    "prefill heads": _sizes("--tensor-parallel-size", prefill=True),
    "prefill stages": _sizes("--pipeline-parallel-size", prefill=True),
    "prefill rows": _sizes("--prefill-context-parallel-size", prefill=True),
    "decode heads": _sizes("--tensor-parallel-size"),
    "decode stages": _sizes("--pipeline-parallel-size"),
    "decode context": _sizes("--decode-context-parallel-size"),
    "page": {size: Choice(("--page-size", size)) for size in ("4", "8", "16")},
    "layout": {name: Choice(("--kv-layout", name)) for name in ("unified", "distinct")},
    "attention": {name: Choice(("--attention", name)) for name in ("triton", "flex")},
    "cache": {
        "on": Choice(),
        "off": Choice(("--no-enable-prefix-caching",)),
        "large units": Choice(("--kv-unit-tokens", "32")),
        "host": Choice(_TIER_FLAGS),
        "disk": Choice(
            (*_TIER_FLAGS, "--kv-offloading-dir", TIER, "--kv-offloading-dir-size", "0.1")
        ),
    },
    "forwards": {
        "large": Choice(),
        "of few tokens": Choice(prefill=("--max-num-batched-tokens", "32")),
        "of few requests": Choice(("--max-num-seqs", "2")),
    },
    "pages": {"many": Choice(), "few": Choice(decode=("--num-pages", "60"))},
    "prefill by": {
        mode: Choice(router=("--prefill", mode)) for mode in ("auto", "remote", "local")
    },
    "objective": {"none": Choice(), "gap": Choice(router=("--gap-objective-s", "0.2"))},
    "routers": {"1": Choice(), "2": Choice(fleet={"routers": 2})},
    "engine": {"lives": Choice(), "is killed": Choice()},
}

Combination = dict[str, str]  # the choice by the setting's name
Pair = tuple[str, str, str, str]


def pairs_of(one: Combination) -> set[Pair]:
    return {(a, x, b, y) for (a, x), (b, y) in itertools.combinations(one.items(), 2)}


def config_of(one: Combination, home: Path | None = None) -> FleetConfig:
    """The fleet's config, without a model if there is no `home`. Raises ValueError if the fleet
    cannot be, or its requests cannot be served there."""
    is_whole = one["work"] in (*CANVASES, "dream", "llada")  # prompts cannot be split
    if one["forwards"] == "of few tokens" and is_whole:
        raise ValueError("whole prompts need forwards of more tokens")
    if one["forwards"] == "of few tokens" and one["workers"] == BOTH:
        raise ValueError("a worker that decodes needs forwards of all blocks of a window")
    if one["prefill by"] == "remote" and (one["work"] in CANVASES or one["workers"] == "1D"):
        raise ValueError("no prefill worker could compute a canvas, or there is none")
    chosen = [SETTINGS[name][choice] for name, choice in one.items()]
    tier = "tier" if home is None else str(home / "tier")

    def flags(kind: str) -> Flags:
        words = itertools.chain.from_iterable(getattr(choice, kind) for choice in chosen)
        return tuple(tier if word == TIER else word for word in words)

    fields: dict[str, Any] = {"has_secret": False}
    for choice in chosen:
        fields |= choice.fleet
    return FleetConfig(
        model=None if home is None else model_of(one["work"], home),
        worker_flags=("--device", "cpu", "--max-model-len", "256", *flags("workers")),
        prefill_flags=flags("prefill"),
        decode_flags=flags("decode"),
        router_flags=flags("router"),
        **fields,
    )


def is_accepted(one: Combination) -> bool:
    """Whether the commands take these flags: what they refuse together needs no list here."""
    try:
        config = config_of(one)
        both = (*config.prefill_flags, *config.decode_flags)
        with contextlib.redirect_stderr(io.StringIO()):
            for kind, count, own in (
                (PrefillConfig, config.prefill, config.prefill_flags),
                (DecodeConfig, config.decode, config.decode_flags),
                (BothConfig, config.workers, both),
            ):
                if count:
                    given = (*config.worker_flags, *own, "--connector", config.connector)
                    parse(kind, given, prog="worker", about="")
            parse(RouterConfig, config.router_flags, prog="router", about="")
    except (ValueError, SystemExit):
        return False
    return True


def combinations(rng: random.Random) -> Iterator[Combination]:
    """Accepted combinations, each with the most pairs of those drawn that no earlier one has, until
    none of those drawn has a new one."""
    covered: set[Pair] = set()
    while True:
        drawn = [
            {name: rng.choice(list(choices)) for name, choices in SETTINGS.items()}
            for _ in range(DRAWN)
        ]
        ranked = sorted(drawn, key=lambda one: len(pairs_of(one) - covered), reverse=True)
        new = (one for one in ranked if pairs_of(one) - covered)
        if (found := next(filter(is_accepted, new), None)) is None:
            return
        covered |= pairs_of(found)
        yield found


def differing(one: Combination) -> tuple[int, int]:
    """(tokens that differ from the expected ones, tokens) of a fleet that is asked twice."""
    asked = asked_of(one["work"])[:MOST_ASKED]
    requests = [request for request, _ in asked]
    with tempfile.TemporaryDirectory(prefix="effuse-combined-") as home:
        Path(home, "tier").mkdir()
        with Fleet(config_of(one, Path(home))) as fleet, connect(fleet.address) as client:
            names = sorted(fleet.processes.keys() & {"prefill-0", "decode-0", "worker-0"})
            victims = names if one["engine"] == "is killed" else []
            engines = [engine_of(fleet.processes[name].pid) for name in victims]
            killers = [threading.Timer(KILL_AFTER_S, engine.kill) for engine in engines]
            for killer in killers:
                killer.start()
            answers = all_at_once(client.generate, requests)
            for killer, engine in zip(killers, engines, strict=True):
                killer.join()
                engine.wait(DEADLINE_S)  # proves that it was killed
            answers += all_at_once(client.generate, requests)
    return count_wrong(asked * 2, answers)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs fleets; 1 if a token differs, or a fleet does not start or answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="no fleet begins after them")
    given = parser.parse_args(argv)
    ends, num_bad, total = time.monotonic() + given.seconds, 0, 0
    covered: set[Pair] = set()
    for number, one in enumerate(combinations(random.Random(given.seed)), start=1):
        if (began := time.monotonic()) > ends:
            break
        try:
            num_wrong, num_tokens = differing(one)
            result = f"{num_wrong} of {num_tokens} differ"
        except (FleetError, grpc.RpcError, TimeoutError, psutil.TimeoutExpired) as error:
            num_wrong, num_tokens, result = 1, 0, f"failed: {error}"
        num_bad += num_wrong > 0
        total += num_tokens
        covered |= pairs_of(one)
        name = ", ".join(f"{setting} {choice}" for setting, choice in one.items())
        print(f"{number} ({time.monotonic() - began:.0f} s) {result}: {name}", flush=True)
    print(f"{len(covered)} pairs of choices, {total} tokens; {num_bad} fleets were wrong or failed")
    return int(num_bad > 0 or not total)


if __name__ == "__main__":
    sys.exit(main())
