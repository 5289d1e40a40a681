"""`python -m effuse.benchmarks.xpyd_report FILE`: the output of `gpu_xpyd` as tables and a plot.

Pure arithmetic over its JSON. A fleet's predicted rate follows from one GPU by itself, by the
router's planner (`router/planner.py`). Decode workers of a split fleet do not help with prompts. A
co-located worker spends both times on every request.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from effuse.benchmarks.fleet_report import (
    FIRST_S,
    GAPS,
    MET_SHARE,
    Objectives,
    as_table,
    met,
    milliseconds,
    shares,
)
from effuse.cli.figures import percentile
from effuse.router.planner import AnswerPace, Planner, PromptTime, Times, Workload
from effuse.router.planner import Objectives as Bounds
from effuse.router.policy import PrefillMode

Content = dict[str, Any]


def capacity(
    prefill: int, decode: int, limits: Content, answer: int, gap_s: float = math.inf
) -> float:
    """Predicted requests a second of this many workers, with gaps within `gap_s` seconds.

    limits: of one GPU, for this shape of request. Without prefill workers decode workers prefill;
    gaps are not considered then, because any prefill lengthens them.
    """
    paces = tuple(
        AnswerPace(one["batch"], one["tokens_per_s"], one["gap_p99_s"] or math.inf)
        for one in limits["decode"]
    )
    times = Times((PromptTime(1, limits["prefill_s"]),), paces)
    bound = Bounds(gap_s=gap_s if prefill else None)
    mode: PrefillMode = "remote" if prefill else "local"
    return Planner(times, Workload(0, 1, answer), bound, mode).split(prefill, decode).rate


def report(content: Content) -> str:
    """All tables, as Markdown."""
    parts = [_limits(content), _arriving(content), _best(content), _links(content)]
    return "\n\n".join(part for part in (*parts, _killed(content)) if part)


def unloaded_gap(content: Content, shape: str) -> float:
    """Seconds between blocks of a single request: the fastest fleet's median."""
    medians = [
        percentile([gap for one in fleet["alone"][shape] for gap in one["gaps"]], 0.5)
        for fleet in content["fleets"]
    ]
    return min(medians, default=math.nan)


def objectives(content: Content, shape: str) -> list[Objectives]:
    """One pair for each of GAPS."""
    return [Objectives(FIRST_S, times * unloaded_gap(content, shape)) for times in GAPS]


def _limits(content: Content) -> str:
    rows = []
    for shape, limits in content["limits"].items():
        batches = [
            f"{one['batch']}: {one['tokens_per_s']:.0f} ({1e3 * (one['gap_p99_s'] or 0):.0f})"
            for one in limits["decode"]
        ]
        rows.append([shape, *milliseconds(limits["prefill_s"]), ", ".join(batches)])
    return as_table(["one GPU", "prefill ms", "decode tok/s by batch (gap p99 ms)"], rows)


def _arriving(content: Content) -> str:
    rows = []
    for fleet in content["fleets"]:
        for one in fleet["arriving"]:
            share = [met(one, each)[1] for each in objectives(content, one["shape"])]
            rows.append(
                [
                    *(short_name(fleet), one["shape"], f"{one['rate']:.1f}"),
                    f"{one['tokens_per_s']:.0f}",
                    *milliseconds(one["first_p50_s"], one["first_p99_s"]),
                    *milliseconds(one["gap_p50_s"], one["gap_p99_s"]),
                    *milliseconds(one["handoff_p50_s"], one["handoff_p99_s"]),
                    *(f"{100 * each:.0f} %" for each in share),
                    f"{one['failed']}",
                    shares(one["busy"]),
                ]
            )
    heads = ["fleet", "load", "arrive/s", "tok/s", "first p50 ms", "p99", "gap p50 ms", "p99"]
    heads += ["handoff p50 ms", "p99", *(f"met at {times} gaps" for times in GAPS), "failed"]
    return as_table([*heads, "GPUs busy"], rows)


def _best(content: Content) -> str:
    """For each load: the predicted rate of each fleet and the highest rate that it sustained."""
    rows = []
    for shape, limits in content["limits"].items():
        answer = int(shape.split("/")[1])
        for times, wanted in zip(GAPS, objectives(content, shape), strict=True):
            found = {
                short_name(fleet): (
                    capacity(fleet["prefill"], fleet["decode"], limits, answer, wanted.gap_s),
                    *goodput(fleet, shape, wanted),
                )
                for fleet in content["fleets"]
            }
            split = [one for one in content["fleets"] if one["prefill"]]
            names = [short_name(one) for one in split]
            cells = [
                f"{name}: {should:.1f}, {most:.1f}, {highest:.1f}"
                for name, (should, most, highest) in found.items()
            ]
            best = [
                max([(0.0, "none"), *((found[name][at], name) for name in names)])[1]
                for at in range(3)
            ]
            rows.append([shape, f"{times}", "; ".join(cells), *best])
    heads = ["load", "gaps", "fleet: should bear, met a second, highest rate with 90 % met"]
    return as_table([*heads, "best by sum", "by met", "by rate"], rows)


def goodput(fleet: Content, shape: str, wanted: Objectives) -> tuple[float, float]:
    """Most requests a second that met them, and the highest rate below which 9 in 10 always did."""
    loads = sorted(
        (one for one in fleet["arriving"] if one["shape"] == shape), key=lambda one: one["rate"]
    )
    most = max((met(one, wanted)[0] for one in loads), default=0.0)
    highest = 0.0
    for one in loads:
        if met(one, wanted)[1] < MET_SHARE:
            break
        highest = float(one["rate"])
    return most, highest


def _links(content: Content) -> str:
    rows = [
        [short_name(fleet), pair, f"{rate / 1e9:.1f}"]
        for fleet in content["fleets"]
        for pair, rate in fleet["links"].items()
    ]
    return as_table(["fleet", "pair", "GB/s, median handoff"], rows)


def _killed(content: Content) -> str:
    rows = []
    for fleet in content["fleets"]:
        one = fleet.get("killed")
        if one:
            rows.append(
                [
                    *(short_name(fleet), ", ".join(one["workers"]), f"{one['requests']}"),
                    *(
                        f"{one['failed']}",
                        f"{one['running']}",
                        "; ".join(one["failures"]) or "none",
                    ),
                    *milliseconds(one["gap_p50_s"], one["gap_p99_s"]),
                ]
            )
    heads = ["fleet", "killed under load", "requests", "failed", "running at a kill", "failures"]
    return as_table([*heads, "gap p50 ms", "p99"], rows)


def short_name(fleet: Content) -> str:
    """1P3D, or the number of co-located workers."""
    if not fleet["prefill"]:
        return f"{fleet['decode']} co-located"
    return f"{fleet['prefill']}P{fleet['decode']}D"


def plot(content: Content, path: Path) -> None:
    """Requests that met the objectives by arrival rate, with a panel for each load and pair."""
    from matplotlib.figure import Figure

    shapes = list(content["limits"])
    figure = Figure(figsize=(4.5 * len(shapes), 8), layout="constrained")
    panels = figure.subplots(len(GAPS), len(shapes), squeeze=False)
    for row, times in zip(panels, GAPS, strict=True):
        for panel, shape in zip(row, shapes, strict=True):
            wanted = objectives(content, shape)[GAPS.index(times)]
            for fleet in content["fleets"]:
                loads = [one for one in fleet["arriving"] if one["shape"] == shape]
                rates = [0.0, *(one["rate"] for one in loads)]
                style = "-o" if fleet["prefill"] else "--s"
                found = [0.0, *(met(one, wanted)[0] for one in loads)]
                panel.plot(rates, found, style, label=short_name(fleet), markersize=4)
            longest = max((one for line in panel.lines for one in line.get_xdata()), default=1.0)
            panel.plot([0, longest], [0, longest], ":", color="grey", label="all that arrive")
            panel.set_title(f"{shape}, gaps within {times} x {1e3 * wanted.gap_s / times:.0f} ms")
            panel.set_xlabel("requests that arrive a second")
    panels[0][0].set_ylabel("requests a second that meet both")
    panels[0][0].legend(fontsize=7)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables and writes the plot."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.xpyd_report")
    parser.add_argument("file", type=Path)
    parser.add_argument("--plot", type=Path, default=Path("build/benchmarks/gpu_xpyd.svg"))
    asked = parser.parse_args(argv)
    content = json.loads(asked.file.read_text())
    print(report(content))
    plot(content, asked.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
