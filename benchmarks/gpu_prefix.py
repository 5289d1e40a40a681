"""`python -m effuse.benchmarks.gpu_prefix`: requests with a common beginning, in a whole fleet.

Random weights in SDAR-8B's shape, text or ids over gRPC. Three plans:

- `split`: a prefill and a decode worker on two GPUs. Prompts without a common part are compared
  with prompts that share their first seven eighths, one at a time and many together.
- `alone`: one worker without prefill workers, with and without its cache, for the latter prompts.
- `chats`: 16 chats of 8 turns on a prefill and a decode worker, with and without a cache of
  the decode worker. KV bytes that were handed over, and first blocks less a block's own time.

Without GPUs they run a small model on the CPU.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

import effuse
from effuse.benchmarks.fleet_figures import figures
from effuse.benchmarks.fleet_load import TOKENS_A_FORWARD, Shape
from effuse.benchmarks.fleet_plans import split
from effuse.benchmarks.fleet_runs import Loads, Outcome, Variant, fleet_config, run
from effuse.benchmarks.prefix_cache import LENGTH, REST, SDAR_8B, SMALL
from effuse.benchmarks.random_checkpoint import write_checkpoint
from effuse.cli.fleet import Fleet
from effuse.models.config import ModelConfig

ANSWER, AT_ONCE = 64, 16
APART = Shape(LENGTH, ANSWER)
ALIKE = Shape(LENGTH, ANSWER, common=LENGTH - REST)
SHORT = replace(ALIKE, answer=16)
TURNS, SENT = 8, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A checkpoint, and the GPUs for fleets that serve it."""

    model: Path
    config: ModelConfig
    gpus: Sequence[str]
    log_dir: Path
    seconds: float

    @property
    def connector(self) -> str:
        return "nixl" if self.gpus else "zmq"

    def run(self, variant: Variant, loads: Loads, num_gpus: int) -> Outcome:
        return run(
            variant,
            loads,
            model=self.model,
            config=self.config,
            gpus=self.gpus[:num_gpus],
            log_dir=self.log_dir,
        )


def split_plan(bench: Bench) -> Iterator[str]:
    """Medians and rates of prompts without and with a common beginning, and their ratio."""
    loads = Loads(
        alone=(APART, ALIKE),
        closed=((APART, AT_ONCE), (ALIKE, AT_ONCE)),
        seconds=bench.seconds,
    )
    outcome = bench.run(split(LENGTH, 64, bench.connector), loads, 2)
    yield "| | nothing in common | seven eighths in common | times as fast |"
    yield "|---|--:|--:|--:|"
    apart, alike = (outcome.alone[str(shape)] for shape in (APART, ALIKE))
    for name, field_name in (("first block", "first_s"), ("prefill", "prefill_s")):
        one, other = (1e3 * median(getattr(t, field_name) for t in took) for took in (apart, alike))
        yield f"| {name} alone, ms | {one:.1f} | {other:.1f} | {one / other:.2f} |"
    one, other = (
        figures(outcome.closed[str(shape), AT_ONCE]).tokens_per_s for shape in (APART, ALIKE)
    )
    yield f"| tokens a second, {AT_ONCE} at once | {one:.0f} | {other:.0f} | {other / one:.2f} |"


def alone_plan(bench: Bench) -> Iterator[str]:
    """Tokens a second of one worker without a cache and with one."""
    loads = Loads(closed=((ALIKE, AT_ONCE), (SHORT, AT_ONCE)), seconds=bench.seconds)
    off, on = (
        bench.run(
            Variant(prefill=0, decode=1, prompt_rows=LENGTH, max_num_seqs=64, caches=caches),
            loads,
            1,
        )
        for caches in (False, True)
    )
    yield f"| prompt/answer, {AT_ONCE} at once | no cache, tokens/s | cache | times |"
    yield "|---|--:|--:|--:|"
    for shape in (ALIKE, SHORT):
        rates = [figures(one.closed[str(shape), AT_ONCE]).tokens_per_s for one in (off, on)]
        yield f"| {shape} | {rates[0]:.0f} | {rates[1]:.0f} | {rates[1] / rates[0]:.2f} |"


@dataclass(slots=True)
class Chats:
    """Measurements of all turns of all chats."""

    kv_bytes: int = 0
    waits_s: list[float] = field(default_factory=list)  # first blocks less a block's own time
    seconds: list[float] = field(default_factory=list)  # of whole answers
    num_own: int = 0  # prompts that the decode worker computed
    answers: list[tuple[int, ...]] = field(default_factory=list)


def chats_plan(bench: Bench) -> Iterator[str]:
    """Bytes and first blocks of chats without and with a cache of the decode worker."""
    off, on = (_chats(bench, caches=caches) for caches in (False, True))
    same = sum(one == other for one, other in zip(off.answers, on.answers, strict=True))
    yield f"| {AT_ONCE} chats of {TURNS} turns, {SENT} tokens each way | no cache | cache | share |"
    yield "|---|--:|--:|--:|"
    moved = [one.kv_bytes / 1e9 for one in (off, on)]
    yield f"| handed over, GB | {moved[0]:.3f} | {moved[1]:.3f} | {moved[1] / moved[0]:.3f} |"
    waits = [1e3 * median(one.waits_s) for one in (off, on)]
    yield (
        f"| first block less its own forwards, median, ms | {waits[0]:.1f} | {waits[1]:.1f} | "
        f"{waits[1] / waits[0]:.3f} |"
    )
    whole = [1e3 * median(one.seconds) for one in (off, on)]
    yield f"| answer, median, ms | {whole[0]:.0f} | {whole[1]:.0f} | {whole[1] / whole[0]:.3f} |"
    yield f"| prompts that the decode worker computed | {off.num_own} | {on.num_own} | |"
    yield f"\n{same} of {len(off.answers)} answers are equal."


def _chats(bench: Bench, *, caches: bool) -> Chats:
    variant = replace(split(LENGTH, 64, bench.connector), caches=caches)
    settings = fleet_config(
        variant,
        2 * TURNS * SENT,
        model=bench.model,
        config=bench.config,
        gpus=bench.gpus[:2],
        log_dir=bench.log_dir,
    )
    found = Chats()
    with (
        Fleet(settings) as fleet,
        effuse.Client(fleet.address, timeout_s=300) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        _chat(bench, client, pool, Chats(), seed=0, turns=2)  # warms all up
        _chat(bench, client, pool, found, seed=1, turns=TURNS)
    return found


def _chat(
    bench: Bench,
    client: effuse.Client,
    pool: ThreadPoolExecutor,
    into: Chats,
    *,
    seed: int,
    turns: int,
) -> None:
    """All chats take each turn together."""
    draw, size = random.Random(seed), bench.config.block_size
    words = min(bench.config.mask_token_id, *bench.config.eos_token_ids)
    params = effuse.Params(
        max_tokens=SENT,
        ignore_eos=True,
        algorithm="block_diffusion",
        remasking="low_confidence_static",
        denoising_steps=max(1, size // TOKENS_A_FORWARD),
    )
    chats: list[list[int]] = [[] for _ in range(AT_ONCE)]
    for _ in range(turns):
        for chat in chats:
            chat += draw.choices(range(words), k=SENT)
        for chat, answer in zip(
            chats, pool.map(lambda chat: client.generate(chat, params), chats), strict=True
        ):
            chat += answer.token_ids
            into.kv_bytes += answer.stats.kv_bytes
            into.answers.append(tuple(answer.token_ids))
            stats = answer.stats
            block_s = (stats.total_s - stats.first_block_s) / max(1, SENT // size - 1)
            into.waits_s.append(stats.first_block_s - block_s)
            into.seconds.append(stats.total_s)
            into.num_own += not stats.prefill_worker


PLANS = {"split": split_plan, "alone": alone_plan, "chats": chats_plan}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures it."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_prefix")
    parser.add_argument("--plan", choices=tuple(PLANS), default="split")
    parser.add_argument("--checkpoint", type=Path, help="directory for the weights")
    parser.add_argument("--logs", type=Path, default=Path("build/benchmarks/fleet-logs"))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    asked = parser.parse_args(argv)
    gpus = [one for one in os.environ.get("EFFUSE_GPUS", "").split(",") if one]
    config, dtype = (SDAR_8B, torch.bfloat16) if gpus else (SMALL, torch.float32)
    with tempfile.TemporaryDirectory() as made:
        device = torch.device("cuda" if gpus else "cpu")
        model = write_checkpoint(asked.checkpoint or Path(made), config, device, dtype)
        bench = Bench(
            model=model, config=config, gpus=gpus, log_dir=asked.logs, seconds=asked.seconds
        )
        print(*PLANS[asked.plan](bench), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
