"""`python -m effuse.benchmarks.gpu_long_context`: decode steps over long contexts on four GPUs.

Ranks that cut the context against one GPU: SDAR-8B's shape with tensor parallel 2 and 4, and
Fast-dLLM v2 1.5B's with 4, of which each 2 cut the context. Steps run as CUDA graphs. Prints the
table of `gpu_ranks` and the ratios that matter, and writes JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from effuse.benchmarks.gpu_ranks import Result, run_wave, table
from effuse.benchmarks.gpu_record import write_record

CASES = {"sdar-8b": ("1@131072", "8@32768"), "fast-dllm-1.5b": ("8@32768",)}
# Model, degrees that run side by side, ranks that cut the context.
WAVES = (
    ("sdar-8b", (1, 2), 2),
    ("sdar-8b", (4,), 4),
    ("fast-dllm-1.5b", (1,), 1),
    ("fast-dllm-1.5b", (4,), 2),
)
AIMS = {("sdar-8b", 2): (1.6, 0.52), ("sdar-8b", 4): (2.6, 0.27), ("fast-dllm-1.5b", 4): (0, 0.27)}


def lines(results: Sequence[Result]) -> list[str]:
    """For each case on several GPUs: how much faster than one, its share of KV, and the aims."""
    ones = {each.case: each for each in results if each.degree == 1}
    found = []
    for each in results:
        one, aims = ones.get(each.case), AIMS.get((each.model, each.degree))
        if one is None or aims is None:
            continue
        faster, least, share, most = (
            one.ms / each.ms,
            aims[0],
            each.kv_bytes / one.kv_bytes,
            aims[1],
        )
        is_met = faster >= least and share <= most
        found.append(
            f"{each.model} TP {each.degree} DCP {each.context_parallel}, {each.batch} x "
            f"{each.context}: {faster:.2f}x (aim {least or '-'}), KV {share:.3f} of one GPU's "
            f"(aim {most}){'' if is_met else '  MISSED'}"
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all of it; the exit status is 1 if a case is missing or an aim is missed."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.gpu_long_context")
    parser.add_argument("--seconds", type=float, default=190, help="for all of it")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu_long_context.json"))
    asked = parser.parse_args(argv)
    deadline = time.monotonic() + asked.seconds
    results: list[Result] = []
    for model, degrees, cut in WAVES:
        cases = [word for case in CASES[model] for word in ("--long", case)]
        flags = ["--model", model, "--context-parallel", str(cut), *cases]
        results += run_wave(degrees, flags, deadline)
        write_record(asked.json, [asdict(each) for each in results], [])
    found = lines(results)
    print("\n".join([table(results), *found]))
    is_whole = len(found) == sum(len(CASES[model]) for model, _ in AIMS)
    return int(not is_whole or any("MISSED" in line for line in found))


if __name__ == "__main__":
    sys.exit(main())
