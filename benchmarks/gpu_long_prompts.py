"""`python -m effuse.benchmarks.gpu_long_prompts`: long prompts of one GPU and of several that cut
them (context-parallel prefill).

Every rank is a process with all weights of a published shape, drawn at random. A prompt is computed
in forwards of `--chunk` tokens and timed by the host's clock; then its last forward is repeated
without any exchange between ranks. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from effuse.benchmarks.gpu_models import MODELS
from effuse.benchmarks.gpu_prefill import elapsed_ms
from effuse.benchmarks.gpu_processes import run_processes
from effuse.benchmarks.gpu_ranks import JOIN_S, LongBench
from effuse.benchmarks.gpu_ranks_floor import Silent
from effuse.benchmarks.gpu_record import kernel_classes, write_record
from effuse.benchmarks.gpu_step import PAGE_SIZE
from effuse.benchmarks.gpu_timing import synchronize
from effuse.kernels.attention_batch import ContextCut
from effuse.models.group import ALL, ALONE, ContextGroup, RankPlace, join_group
from effuse.models.part import Part
from effuse.models.runner import ModelRunner

MODULE = "effuse.benchmarks.gpu_long_prompts"
LENGTHS = (131072, 262144)
AIM = 0.90
"""Of one GPU's time over that of N times as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """One prompt on so many GPUs."""

    model: str
    degree: int
    length: int
    chunk: int
    ms: float
    last_ms: float  # of its last forward
    silent_ms: float  # of the same without any exchange
    kv_bytes: int  # of the prompt on each GPU
    peak_bytes: int  # of device memory, weights and all
    kernels: tuple[str, ...] = ()  # of the last forward


def measure(
    asked: argparse.Namespace,
    place: RankPlace,
    device: torch.device,
    keep: Callable[[PromptResult], None],
) -> None:
    """All prompts of a rank; all ranks call it together."""
    bench = LongBench(asked.model, device, 1, max(asked.length), place)
    model, layout = bench.model, bench.memory.layout
    runner = ModelRunner(
        model, bench.memory.layer_views(), page_size=layout.span, block_size=model.config.block_size
    )

    def forward(length: int, begin: int) -> None:
        end = min(begin + asked.chunk, length)
        rng = np.random.default_rng(begin)
        part = Part(
            token_ids=rng.integers(0, model.config.mask_token_id, end - begin).tolist(),
            start=begin,
            pages=range(layout.pages_for(end)),
            num_stored=end - begin,
            block_origin=model.config.block_origin(length),
        )
        runner.run([part])

    def prompt(length: int) -> None:
        for begin in range(0, length, asked.chunk):
            forward(length, begin)
        synchronize(device)

    def last(length: int) -> None:
        forward(length, (length - 1) // asked.chunk * asked.chunk)
        synchronize(device)

    prompt(2 * asked.chunk)  # compiles
    for length in asked.length:
        ms = elapsed_ms(lambda: prompt(length))  # noqa: B023
        last_ms = elapsed_ms(lambda: last(length))  # noqa: B023
        kernels = kernel_classes(lambda: last(length), 1)  # noqa: B023
        silent_ms = last_ms
        if model.prompts is not None:
            group, model.prompts.group = model.prompts.group, Silent(place.size)
            silent_ms = min(elapsed_ms(lambda: last(length)) for _ in range(2))  # noqa: B023
            model.prompts.group = group
        is_gpu = device.type == "cuda"
        keep(
            PromptResult(
                model=bench.name,
                degree=place.size,
                length=length,
                chunk=asked.chunk,
                ms=ms,
                last_ms=last_ms,
                silent_ms=silent_ms,
                kv_bytes=layout.pages_for(length) * layout.page_bytes,
                peak_bytes=torch.cuda.max_memory_allocated(device) if is_gpu else 0,
                kernels=tuple(kernels),
            )
        )


def lines(results: Sequence[PromptResult]) -> list[str]:
    """For each prompt on several GPUs: its share of one GPU's time and KV, and the aim."""
    ones = {(each.model, each.length): each for each in results if each.degree == 1}
    found = []
    for each in results:
        one = ones.get((each.model, each.length))
        if each.degree == 1 or one is None:
            continue
        share = one.ms / (each.degree * each.ms)
        found.append(
            f"{each.model}, prompt of {each.length} over {each.degree}: {each.ms / 1e3:.2f} s, one "
            f"{one.ms / 1e3:.2f} s: {share:.3f} of {each.degree}x (aim {AIM}), KV "
            f"{each.kv_bytes / one.kv_bytes:.3f} of one GPU's; last forward {each.last_ms:.0f} ms, "
            f"without exchange {each.silent_ms:.0f}, of one GPU {one.last_ms:.0f}; peak "
            f"{each.peak_bytes / 1e9:.1f} GB, one {one.peak_bytes / 1e9:.1f}"
            f"{'' if share >= AIM else '  MISSED'}"
        )
    return found


def run_rank(asked: argparse.Namespace) -> None:
    """The process of one rank; the first one writes the results."""
    rank, size, place = asked.rank, asked.size, ALL
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    if size > 1:
        meeting = asked.home / "meeting"
        group = join_group(rank, size, device, meeting, JOIN_S)
        context = ContextGroup(ContextCut(rank, size, PAGE_SIZE), group, ALONE)
        place = RankPlace(rank, size, meeting=group, context=context)
    results: list[dict[str, object]] = []

    def keep(result: PromptResult) -> None:
        if not rank:
            results.append(asdict(result))
            (asked.home / "results.json").write_text(json.dumps(results))
            print(result, flush=True)

    measure(asked, place, device, keep)
    place.meeting.least(0)  # no rank ends while others still exchange
    sys.stdout.flush()
    os._exit(0)  # without the teardown of communicators, which waits for the slowest rank


def run(degrees: Sequence[int], flags: Sequence[str], deadline: float) -> list[PromptResult]:
    """What each of these degrees has measured before the deadline, one after another."""
    return [
        PromptResult(**one)
        for degree in degrees
        for one in run_processes([degree], [*flags], deadline, MODULE)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for; the exit status is 1 if a case is missing or misses the aim."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--model", choices=sorted(MODELS), default="sdar-8b")
    parser.add_argument("--degree", type=int, action="append", help="default: 1 and 4")
    parser.add_argument("--length", type=int, action="append", help=f"default: {LENGTHS}")
    parser.add_argument("--chunk", type=int, default=32768, help="tokens in a forward")
    parser.add_argument("--seconds", type=float, default=400, help="for all of it")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu_long_prompts.json"))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    asked.length = asked.length or list(LENGTHS)
    if asked.rank is not None:
        run_rank(asked)
    degrees = asked.degree or [1, 4]
    results = run(degrees, argv, time.monotonic() + asked.seconds)
    write_record(asked.json, [asdict(each) for each in results], [])
    found = lines(results)
    print("\n".join(found))
    is_whole = len(results) == len(degrees) * len(asked.length)
    return int(not is_whole or any("MISSED" in line for line in found))


if __name__ == "__main__":
    sys.exit(main())
