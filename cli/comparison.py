"""The short table of `effuse bench`, row by row, like D2F-vLLM's demo benchmark.

Total time, tokens a second (TPS) and average latency, each with its multiple of the first row's
speed in brackets, and the accuracy. Pure arithmetic and text.
"""

import math
from collections.abc import Sequence
from typing import Final

from effuse.cli.figures import Run

RULE: Final = (
    "in brackets: speed relative to the first row; latency: average of answers' total times"
)
_NAME = 19
_WIDTHS = (18, 18, 16, 9)
_HEADINGS = ("total s", "TPS", "avg latency s", "accuracy")


def multiples(run: Run, first: Run) -> dict[str, float]:
    """How many times as fast as `first` a run is, by figure; NaN if one of them has no answer."""
    return {
        "total_s": _ratio(first.total_s, run.total_s)
        if run.samples and first.samples
        else math.nan,
        "tokens_per_s": _ratio(run.tokens_per_s, first.tokens_per_s),
        "latency_s": _ratio(first.latency_s, run.latency_s),
    }


def headings() -> str:
    """The line above the rows."""
    return _joined("", _HEADINGS)


def row(run: Run, first: Run) -> str:
    """The line of one run, which only needs the first row for comparison."""
    times = multiples(run, first)
    values = {
        "total_s": run.total_s,
        "tokens_per_s": run.tokens_per_s,
        "latency_s": run.latency_s,
    }
    cells = [_cell(value, times[name]) for name, value in values.items()]
    accuracy = "-" if math.isnan(run.accuracy) else f"{100 * run.accuracy:.1f} %"
    return _joined(run.name, [*cells, accuracy])


def as_fields(run: Run, first: Run) -> dict[str, object]:
    """Fields of a row in a file, in addition to those of `figures.as_json`; null replaces NaN,
    which JSON does not have.
    """
    found = {
        "latency_s": run.latency_s,
        "accuracy": run.accuracy,
        **{f"{name}_multiple": value for name, value in multiples(run, first).items()},
    }
    answers = [
        {"prompt": one.prompt, "text": one.text, "is_right": one.is_right} for one in run.samples
    ]
    numbers = {name: None if math.isnan(value) else value for name, value in found.items()}
    return {**numbers, "answers": answers}


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.nan


def _cell(value: float, multiple: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" + ("" if math.isnan(multiple) else f" ({multiple:.1f}x)")


def _joined(name: str, cells: Sequence[str]) -> str:
    padded = [text.rjust(width) for text, width in zip(cells, _WIDTHS, strict=True)]
    return "".join([name.ljust(_NAME), *padded])
