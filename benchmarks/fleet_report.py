"""`python -m effuse.benchmarks.fleet_report FILE`: the output of `gpu_fleet` as tables and a plot.

Pure arithmetic over its JSON. A request meets a pair of objectives if its first block arrived in
time and every gap between its blocks is within a multiple of one unloaded gap, the shorter of the
two fleets' medians. Goodput has two forms: the requests a second that met them, at the rate
with the most, and the highest rate at which nine requests in ten did.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effuse.benchmarks.gpu_handoff import Result, table
from effuse.cli.figures import percentile
from effuse.router.measures import Goals

Content = dict[str, Any]

FIRST_S = 1.0
GAPS = (2, 4)  # multiples of one unloaded gap
MET_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Objectives(Goals):
    """A user's objectives for a request, in seconds."""

    def met_by(self, request: Content) -> bool:
        """Whether this request met them."""
        if request["failure"] or request["first_s"] is None:
            return False
        return self.kept(request["first_s"], request["gaps"]).all is not False


def report(content: Content) -> str:
    """All tables, as Markdown."""
    parts = [_handoffs(content), _alone(content), _overlap(content)]
    parts += [_closed(content), _steps(content)]
    parts += [_arriving(content), _best(content), _links(content)]
    return "\n\n".join(part for part in parts if part)


def _handoffs(content: Content) -> str:
    if not content["handoffs"]:
        return ""
    copied = content["peer_copy_gigabytes_per_s"]
    text = f"A copy from GPU to GPU: {copied:.0f} GB/s.\n\n" if copied else ""
    return text + table([Result(**one) for one in content["handoffs"]])


def _alone(content: Content) -> str:
    rows = []
    for split, colocated in _pairs(content):
        for shape, requests in split["alone"].items():
            if colocated is None:
                continue
            ours, theirs = (_firsts(found) for found in (requests, colocated["alone"][shape]))
            moved = percentile([one["handoff_s"] for one in requests], 0.5)
            rows.append([shape, *milliseconds(ours, theirs, ours - theirs, moved)])
    heads = ["alone", "first block, split ms", "co-located ms", "difference", "handoff ms"]
    return as_table(heads, rows)


def _overlap(content: Content) -> str:
    """Forward and handoff together, compared with the longer of the two by itself."""
    forwards, rows = content["limits"].get("prefill", {}), []
    alone = {
        (one["connector"], one["tokens"]): one["handoff_ms"] / 1e3
        for one in content["handoffs"]
        if one["polling"] == "as served"
    }
    for fleet in content["split"]:
        for shape, requests in fleet["alone"].items():
            prompt = shape.split("/")[0]
            forward, handoff = forwards.get(prompt), alone.get((fleet["connector"], int(prompt)))
            if forward is None or handoff is None:
                continue
            left = percentile([one["handoff_s"] for one in requests], 0.5)
            ratio = (forward + left) / max(forward, handoff)
            rows.append(
                [
                    f"{fleet['connector']}, {prompt}",
                    *milliseconds(forward, handoff, left),
                    f"{ratio:.2f}",
                ]
            )
    heads = ["prompt over", "forward ms", "handoff ms", "handoff after the forward ms"]
    return as_table([*heads, "both / longer"], rows)


def _closed(content: Content) -> str:
    rows = []
    for split, colocated in _pairs(content):
        for one in split["closed"]:
            other = _same(colocated["closed"], one) if colocated else None
            allowed = _allowed(content, one)
            beside = _gap_of_batch(content, one)
            rows.append(
                [
                    f"{one['shape']} x {one['at_once']}",
                    *(f"{one['tokens_per_s']:.0f}", f"{allowed:.0f}"),
                    f"{one['tokens_per_s'] / allowed:.2f}",
                    *milliseconds(one["handoff_p50_s"], one["handoff_p99_s"], one["gap_p99_s"]),
                    f"{one['batch']:.1f}",
                    over(one["gap_p99_s"], beside),
                    *_beside_colocated(one, other),
                ]
            )
    heads = ["load", "split tok/s", "allowed", "share", "handoff p50 ms", "p99", "gap p99 ms"]
    heads += ["batch", "gap / KV there", "co-located tok/s", "gap p99 ms", "split / co-located"]
    return as_table([*heads, "GPUs busy"], rows)


def _beside_colocated(one: Content, other: Content | None) -> list[str]:
    if other is None:
        return ["", "", "", shares(one["busy"])]
    return [
        f"{other['tokens_per_s']:.0f}",
        *milliseconds(other["gap_p99_s"]),
        f"{one['tokens_per_s'] / other['tokens_per_s']:.2f}",
        f"{shares(one['busy'])}; {shares(other['busy'])}",
    ]


def _steps(content: Content) -> str:
    """A step in a fleet compared with one in the engine by itself, and next to arriving
    handoffs.
    """
    rows = []
    for split, _ in _pairs(content):
        for load, turns in split.get("steady", {}).items():
            alone = content["limits"]["steady"][load]
            found = [
                f"{1e3 * statistics.median(one['step_s'] for one in paces):.3f}"
                for paces in (turns, alone)
            ]
            pairs = list(zip(turns, alone, strict=True))
            each = [ours["step_s"] / theirs["step_s"] for ours, theirs in pairs]
            by_turn = ", ".join(f"{ratio:.3f}" for ratio in each)
            phases = ", ".join(f"{ours['phases']}/{theirs['phases']}" for ours, theirs in pairs)
            rows.append([load, *found, f"{statistics.median(each):.3f}", by_turn, phases])
    heads = ["a step of requests and prompt tokens", "ms, fleet", "ms, alone", "ratio", "by turn"]
    heads.append("phases, fleet/alone")
    text = as_table(heads, rows)
    found = content["limits"].get("arrivals")
    if found:
        text += (
            f"\n\nA step beside 20 handoffs a second: {1e3 * found['with']:.3f} ms, without "
            f"{1e3 * found['without']:.3f} ms, ratio {found['with'] / found['without']:.3f}; "
            f"a handoff then takes {1e3 * found['handoff_p50_s']:.2f} ms."
        )
    return text


def _arriving(content: Content) -> str:
    wanted = objectives(content)
    rows = []
    for fleet in (*content["split"], *content["colocated"]):
        for one in fleet["arriving"]:
            kept = [met(one, each) for each in wanted]
            rows.append(
                [
                    *(fleet["name"], f"{one['rate']:g}"),
                    *milliseconds(one["first_p50_s"], one["first_p99_s"]),
                    *milliseconds(one["gap_p50_s"], one["gap_p99_s"], one["handoff_p99_s"]),
                    *(f"{100 * share:.0f} %" for _, share in kept),
                    shares(one["busy"]),
                ]
            )
    heads = ["fleet", "arrive/s", "first p50 ms", "p99", "gap p50 ms", "p99", "handoff p99 ms"]
    return as_table([*heads, *(f"met at {times} gaps" for times in GAPS), "GPUs busy"], rows)


def _best(content: Content) -> str:
    """Goodput of each kind of fleet at its best setting and rate."""
    rows = []
    for times, each in zip(GAPS, objectives(content), strict=True):
        for name, best_of in (("met a second", most_met), (HIGHEST, highest_rate)):
            best = [best_of(content[kind], each) for kind in ("split", "colocated")]
            ratio = f"{best[0][0] / best[1][0]:.2f}" if best[1][0] else "co-located has none"
            cells = [f"{goodput:.1f} ({fleet} at {rate:g}/s)" for goodput, fleet, rate in best]
            rows.append([f"{times} x {1e3 * each.gap_s / times:.1f} ms", name, *cells, ratio])
    return as_table(["gaps within", "goodput", "split", "co-located", "ratio"], rows)


def _links(content: Content) -> str:
    rows = [
        [fleet["name"], pair, f"{rate / 1e9:.1f}"]
        for fleet in content["split"]
        for pair, rate in fleet["links"].items()
    ]
    return as_table(["fleet", "pair", "GB/s, median handoff"], rows)


def objectives(content: Content) -> list[Objectives]:
    """One pair for each of GAPS. NaN gaps, which no request meets, if there was no unloaded run."""
    gap = unloaded_gap(content)
    return [Objectives(FIRST_S, times * gap) for times in GAPS]


def unloaded_gap(content: Content) -> float:
    """Seconds between blocks of a single request: the faster fleet's median."""
    medians = [
        percentile([gap for one in fleet["alone"][content["served"]] for gap in one["gaps"]], 0.5)
        for fleet in (*content["split"], *content["colocated"])
        if content["served"] in fleet["alone"]
    ]
    return min(medians, default=math.nan)


Best = tuple[float, str, float]
"""Goodput, and its fleet and arrival rate."""
HIGHEST = f"highest rate with {MET_SHARE:.0%} met"


def most_met(fleets: Sequence[Content], wanted: Objectives) -> Best:
    """The most requests a second that met them."""
    found = [
        (met(one, wanted)[0], str(fleet["name"]), float(one["rate"]))
        for fleet in fleets
        for one in fleet["arriving"]
    ]
    return max(found, default=(0.0, "none", 0.0))


def highest_rate(fleets: Sequence[Content], wanted: Objectives) -> Best:
    """The highest rate such that it and all lower ones of the same fleet had this share."""
    found = [(0.0, "none", 0.0)]
    for fleet in fleets:
        for one in sorted(fleet["arriving"], key=lambda load: float(load["rate"])):
            if met(one, wanted)[1] < MET_SHARE:
                break
            found.append((float(one["rate"]), str(fleet["name"]), float(one["rate"])))
    return max(found)


def met(load: Content, wanted: Objectives) -> tuple[float, float]:
    """Requests a second that met them, and their share of all."""
    kept = sum(wanted.met_by(one) for one in load["each"])
    return kept / load["seconds"], kept / max(1, len(load["each"]))


def _allowed(content: Content, load: Content) -> float:
    """Tokens a second that the busier GPU's time allows."""
    prompt, answer = (int(part) for part in load["shape"].split("/"))
    limits = content["limits"]
    bounds = [answer / limits["prefill"][str(prompt)]] if str(prompt) in limits["prefill"] else []
    alone = _decode_alone(content, load)
    return min([*bounds, *([alone["tokens_per_s"]] if alone else [])], default=math.nan)


def _decode_alone(content: Content, load: Content) -> Content | None:
    same = [
        one
        for one in _decode_limits(content)
        if (one["shape"], one["at_once"]) == (load["shape"], load["at_once"])
    ]
    return same[0] if same else None


def _gap_of_batch(content: Content, load: Content) -> float:
    """p99 of gaps in the smallest measured batch of this shape that is at least as large as the
    load's; the largest if there is none.
    """
    batches = sorted(
        (one["at_once"], one["gap_p99_s"])
        for one in _decode_limits(content)
        if one["shape"] == load["shape"]
    )
    fitting = [gap for size, gap in batches if size >= load["batch"]]
    return float(fitting[0] if fitting else batches[-1][1]) if batches else math.nan


def _decode_limits(content: Content) -> list[Content]:
    """Those that ran long enough to see gaps."""
    return [one for one in content["limits"].get("decode", []) if one["gap_p99_s"] is not None]


def _pairs(content: Content) -> Iterator[tuple[Content, Content | None]]:
    """The fleets with all loads; a split one may have no counterpart."""
    if content["split"]:
        yield content["split"][0], next(iter(content["colocated"]), None)


def _same(loads: Sequence[Content], load: Content) -> Content:
    key = load["shape"], load["at_once"]
    return next(one for one in loads if (one["shape"], one["at_once"]) == key)


def _firsts(requests: Sequence[Content]) -> float:
    return percentile([one["first_s"] for one in requests if one["first_s"] is not None], 0.5)


def milliseconds(*seconds: float | None) -> list[str]:
    """Cells of a table."""
    return ["" if each is None else f"{1e3 * each:.2f}" for each in seconds]


def over(value: float | None, limit: float) -> str:
    """A cell: one over the other."""
    return "" if value is None else f"{value / limit:.2f}"


def shares(busy: Sequence[float] | None) -> str:
    """A cell: how busy each GPU was."""
    return ", ".join(f"{100 * share:.0f} %" for share in busy or ()) or "?"


def as_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown, all columns but the first to the right; empty without rows."""
    if not rows:
        return ""
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(content: Content, path: Path) -> None:
    """Goodput by arrival rate, a panel for each pair of objectives, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, len(GAPS), sharey=True)
    for panel, times, wanted in zip(panels, GAPS, objectives(content), strict=True):
        for fleet in (*content["split"], *content["colocated"]):
            if not fleet["arriving"]:
                continue
            rates = [one["rate"] for one in fleet["arriving"]]
            kept = [met(one, wanted)[0] for one in fleet["arriving"]]
            style = "-o" if fleet["prefill"] else "--s"
            panel.plot(rates, kept, style, label=fleet["name"], markersize=4)
        longest = max((one for line in panel.lines for one in line.get_xdata()), default=1.0)
        panel.plot([0, longest], [0, longest], ":", color="grey", label="all that arrive")
        panel.set_title(
            f"first block within {FIRST_S:g} s, gaps within {times} x "
            f"{1e3 * wanted.gap_s / times:.0f} ms"
        )
        panel.set_xlabel(f"requests of {content['served']} tokens that arrive a second")
    prefill = content["limits"].get("prefill", {}).get(content["served"].split("/")[0])
    if prefill is not None:
        gap = unloaded_gap(content)
        figure.suptitle(
            f"a prefill between two steps adds {1e3 * prefill:.0f} ms to a gap of {1e3 * gap:.0f} "
            "ms with co-located workers; in a split fleet, prefills follow one another and bound "
            f"the rate at {1 / prefill:.1f} a second",
            fontsize=9,
        )
    panels[0].set_ylabel("requests a second that meet both")
    panels[0].legend(fontsize=7)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables and writes the plot."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.fleet_report")
    parser.add_argument("file", type=Path)
    parser.add_argument("--plot", type=Path, default=Path("build/benchmarks/gpu_fleet.svg"))
    asked = parser.parse_args(argv)
    content = json.loads(asked.file.read_text())
    print(report(content))
    plot(content, asked.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
