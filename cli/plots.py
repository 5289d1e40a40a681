"""Plots of benchmark runs with matplotlib, which is imported only for a plot.

Runs at several arrival rates are drawn by rate, with the objectives. Others are drawn by the share
of requests below each latency.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from effuse.cli.figures import Run, figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LATENCIES = (
    ("first_block", "time to the first block"),
    ("gap", "between blocks"),
    ("latency", "to the end"),
)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draws the runs into a file whose type is its suffix."""
    from matplotlib.figure import Figure

    by_rate = sorted((run for run in runs if not math.isnan(run.rate)), key=lambda run: run.rate)
    figure = Figure(figsize=(14, 3.6), layout="constrained")
    panels = figure.subplots(1, 4)
    if len(by_rate) > 1:
        _draw_goodput(panels[0], by_rate)
        for panel, (name, about) in zip(panels[1:], _LATENCIES, strict=True):
            _draw_latency(panel, by_rate, name, about)
    else:
        panels[0].barh([run.name for run in runs], [run.tokens_per_s for run in runs])
        panels[0].set_xlabel("tokens/s")
        for panel, (name, about) in zip(panels[1:], _LATENCIES, strict=True):
            _draw_shares(panel, runs, name, about)
    figure.savefig(path)


def _draw_goodput(panel: "Axes", runs: Sequence[Run]) -> None:
    rates = [run.rate for run in runs]
    panel.plot(rates, rates, ":", color="grey", label="all requests")
    panel.plot(rates, [len(run.samples) / run.total_s for run in runs], "--s", label="answered")
    if not runs[0].goals.asks_nothing:
        panel.plot(rates, [run.num_met / run.total_s for run in runs], "-o", label="goodput")
    panel.set_xlabel("requests per second")
    panel.set_ylabel("requests a second")
    panel.legend(fontsize=7)


def _draw_latency(panel: "Axes", runs: Sequence[Run], name: str, about: str) -> None:
    for at, style in (("p50", "-o"), ("p99", "--s")):
        values = [figures(run)[f"{name}_{at}_s"] for run in runs]
        panel.plot([run.rate for run in runs], values, style, label=at)
    panel.set_xlabel("requests per second")
    panel.set_ylabel(f"{about}, seconds")
    panel.legend(fontsize=7)


def _draw_shares(panel: "Axes", runs: Sequence[Run], name: str, about: str) -> None:
    for run in runs:
        values = sorted(_values(run, name))
        shares = [(at + 1) / len(values) for at in range(len(values))]
        panel.step(values, shares, where="post", label=run.name)
    panel.set_xlabel(f"{about}, seconds")
    panel.set_ylabel("share of requests")
    panel.legend(fontsize=7)


def _values(run: Run, name: str) -> list[float]:
    if name == "gap":
        return [gap for sample in run.samples for gap in sample.gaps_s]
    return [one.first_block_s if name == "first_block" else one.total_s for one in run.samples]
