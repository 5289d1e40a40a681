"""`python -m effuse.benchmarks.gpu_prefix`: prompts with the same beginning, through a whole fleet.

One prefill and one decode worker on two GPUs, random weights in SDAR-8B's shape, text over gRPC
streams. Prompts without a common part are compared with prompts that share their first seven
eighths, one at a time and many together. Prints the ratios; without GPUs a small model on the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from effuse.benchmarks.fleet_figures import figures
from effuse.benchmarks.fleet_load import Shape
from effuse.benchmarks.fleet_plans import split
from effuse.benchmarks.fleet_runs import Loads, Outcome, run
from effuse.benchmarks.prefix_cache import LENGTH, REST, SDAR_8B, SMALL
from effuse.benchmarks.random_checkpoint import write_checkpoint

ANSWER, AT_ONCE = 64, 16
APART = Shape(LENGTH, ANSWER)
ALIKE = Shape(LENGTH, ANSWER, common=LENGTH - REST)


def loads(seconds: float) -> Loads:
    """One at a time, then many together; first those without a common part."""
    return Loads(
        alone=(APART, ALIKE),
        closed=((APART, AT_ONCE), (ALIKE, AT_ONCE)),
        seconds=seconds,
    )


def report(outcome: Outcome) -> str:
    """Medians and rates of both, and their ratio."""
    lines = [
        "| | nothing in common | seven eighths in common | times as fast |",
        "|---|--:|--:|--:|",
    ]
    apart, alike = (outcome.alone[str(shape)] for shape in (APART, ALIKE))
    for name, field in (("first block", "first_s"), ("prefill", "prefill_s")):
        one, other = (1e3 * median(getattr(t, field) for t in took) for took in (apart, alike))
        lines.append(f"| {name} alone, ms | {one:.1f} | {other:.1f} | {one / other:.2f} |")
    one, other = (
        figures(outcome.closed[str(shape), AT_ONCE]).tokens_per_s for shape in (APART, ALIKE)
    )
    lines.append(
        f"| tokens a second, {AT_ONCE} at once | {one:.0f} | {other:.0f} | {other / one:.2f} |"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures it."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_prefix")
    parser.add_argument("--checkpoint", type=Path, help="directory for the weights")
    parser.add_argument("--logs", type=Path, default=Path("build/benchmarks/fleet-logs"))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    asked = parser.parse_args(argv)
    gpus = [one for one in os.environ.get("EFFUSE_GPUS", "").split(",") if one]
    config, dtype = (SDAR_8B, torch.bfloat16) if gpus else (SMALL, torch.float32)
    with tempfile.TemporaryDirectory() as made:
        device = torch.device("cuda" if gpus else "cpu")
        model = write_checkpoint(asked.checkpoint or Path(made), config, device, dtype)
        outcome = run(
            split(LENGTH, 64, "nixl" if gpus else "zmq"),
            loads(asked.seconds),
            model=model,
            config=config,
            gpus=gpus,
            log_dir=asked.logs,
        )
    print(report(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
