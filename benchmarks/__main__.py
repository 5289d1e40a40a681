"""`python -m effuse.benchmarks`: every CPU figure, with its limit from the same run.

Prints a table, writes it as JSON, and exits with 1 if a figure misses its limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import torch

from effuse.benchmarks import engine_step, handoff, prefix_cache, router_overhead, tls_cost
from effuse.benchmarks.report import Figure, Report

Measured = tuple[Figure | list[Figure], list[str]]


def _handoff(kind: str) -> Callable[[], Measured]:
    return lambda: handoff.measure(kind)


BENCHMARKS: dict[str, Callable[[], Measured]] = {
    "step": engine_step.measure,
    "prefix-cache": prefix_cache.measure,
    "router": router_overhead.measure,
    "tls": tls_cost.measure,
    "handoff-nixl": _handoff("nixl"),
    "handoff-zmq": _handoff("zmq"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen benchmarks; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks", description=__doc__)
    parser.add_argument(
        "--only", choices=sorted(BENCHMARKS), action="append", help="run only these"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("build/benchmarks/cpu.json"), help="output file"
    )
    asked = parser.parse_args(argv)
    report = Report("effuse on the CPU, each figure beside its limit")
    report.settings = {"torch": torch.__version__, "grpcio": grpc.__version__}
    for name in asked.only or BENCHMARKS:
        print(f"measuring {name} ...", flush=True)
        figures, notes = BENCHMARKS[name]()
        report.figures += figures if isinstance(figures, list) else [figures]
        report.notes += notes
    report.print()
    report.write(asked.json)
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main())
