"""The figures of benchmark runs, as tables, as JSON and as a plot.

Times are those that a client sees: until its first block, from block to block, and until its end.
Tokens are the server's count of generated tokens. Goodput counts requests that met every objective
(`router/measures.py`). All is pure arithmetic and text, apart from `plot`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final

from effuse.router.measures import Goals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH: Final = 80  # columns of a table
RULE: Final = (
    "in brackets: speed relative to the first row; latency: average of answers' total times"
)
_NONE: Final = "-"  # instead of a figure
_NAME: Final = 19  # columns of a row's name
_HEADINGS: Final = {"total s": 18, "TPS": 18, "avg latency s": 16, "accuracy": 9}  # with columns
_CONTENT: Final = ("prompt", "text", "is_right")  # of samples; all others are figures
_TIMES: Final = {
    "first_block": "time to the first block",
    "gap": "between blocks",
    "latency": "to the end",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished request; times in seconds since it was due."""

    tokens: int
    forward_passes: int
    first_block_s: float
    total_s: float
    gaps_s: tuple[float, ...] = ()  # between blocks, so one less than blocks
    prompt: int = 0  # its index among the prompts
    text: str = ""  # of the answer
    is_right: bool | None = None  # None: not graded


@dataclass(frozen=True, slots=True)
class ServiceGoals(Goals):
    """The same with a bound on the time to the end, which only clients judge."""

    total_s: float = math.inf

    @property
    def asks_nothing(self) -> bool:
        """Whether every finished request meets them."""
        return math.isinf(min(self.first_block_s, self.gap_s, self.total_s))

    def met_by(self, sample: Sample) -> bool:
        kept = self.kept(sample.first_block_s, sample.gaps_s)
        return kept.all is not False and sample.total_s <= self.total_s


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one row, and its duration."""

    name: str
    total_s: float
    samples: Sequence[Sample]
    failed: int = 0
    rate: float = math.nan  # requests per second; NaN if clients waited for answers
    goals: ServiceGoals = ServiceGoals()

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s

    @property
    def latency_s(self) -> float:
        """Duration divided by answers, as in D2F-vLLM's benchmark; NaN without answers."""
        return self.total_s / len(self.samples) if self.samples else math.nan

    @property
    def accuracy(self) -> float:
        """Right answers divided by all requests; NaN without answers or grades."""
        graded = [one.is_right for one in self.samples if one.is_right is not None]
        is_whole = bool(graded) and len(graded) == len(self.samples)
        return sum(graded) / (len(graded) + self.failed) if is_whole else math.nan

    @property
    def num_met(self) -> int:
        return sum(self.goals.met_by(sample) for sample in self.samples)

    @property
    def met_share(self) -> float:
        """The share of these among all requests, including failed ones; NaN without requests."""
        count = len(self.samples) + self.failed
        return self.num_met / count if count else math.nan

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(1, sum(sample.forward_passes for sample in self.samples))

    def times_s(self, kind: str) -> list[float]:
        """Its times of a kind in `_TIMES`; one for each request or, for "gap", each gap."""
        if kind == "gap":
            return [gap for sample in self.samples for gap in sample.gaps_s]
        return [one.first_block_s if kind == "first_block" else one.total_s for one in self.samples]


def _percentile_of(kind: str, share: float) -> Callable[[Run], float]:
    return lambda run: percentile(run.times_s(kind), share)


def _if_asked(figure: Callable[[Run], float]) -> Callable[[Run], float]:
    """There is no goodput without objectives."""
    return lambda run: math.nan if run.goals.asks_nothing else figure(run)


FIGURES: Final[Sequence[tuple[str, str, Callable[[Run], float]]]] = (
    ("rate", "arrive/s", lambda run: run.rate),
    ("samples", "answers", lambda run: len(run.samples)),
    ("failed", "failed", lambda run: run.failed),
    ("total_s", "total s", lambda run: run.total_s),
    ("tokens", "tokens", lambda run: run.tokens),
    ("tokens_per_s", "tokens/s", lambda run: run.tokens_per_s),
    ("requests_per_s", "answers/s", lambda run: len(run.samples) / run.total_s),
    ("goodput_per_s", "goodput/s", _if_asked(lambda run: run.num_met / run.total_s)),
    ("met_share", "met", _if_asked(lambda run: run.met_share)),
    ("latency_mean_s", "mean s", lambda run: fmean(run.times_s("latency") or [math.nan])),
    ("latency_p50_s", "p50 s", _percentile_of("latency", 0.5)),
    ("latency_p99_s", "p99 s", _percentile_of("latency", 0.99)),
    ("first_block_p50_s", "1st block p50 s", _percentile_of("first_block", 0.5)),
    ("first_block_p99_s", "1st block p99 s", _percentile_of("first_block", 0.99)),
    ("gap_p50_s", "gap p50 s", _percentile_of("gap", 0.5)),
    ("gap_p99_s", "gap p99 s", _percentile_of("gap", 0.99)),
    ("tokens_per_forward", "tokens/fwd", lambda run: run.tokens_per_forward),
)
"""Every figure of a run: its name, its heading in a table, and its value; times in seconds."""


def figures(run: Run) -> dict[str, float]:
    return {name: value(run) for name, _, value in FIGURES}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share does not exceed; NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(runs: Sequence[Run]) -> str:
    """Tables of at most `WIDTH` columns, one below the other, with one line for each run.

    Figures that no run has are left out.
    """
    width = max(len(run.name) for run in runs)
    columns: list[list[str]] = []
    for name, heading, value in FIGURES:
        cells = [_cell(value(run)) for run in runs]
        if any(cell != _NONE for cell in cells) or name == "latency_mean_s":
            length = max(len(heading), *map(len, cells))
            columns.append([cell.rjust(length) for cell in (heading, *cells)])
    names = [name.ljust(width) for name in ("", *(run.name for run in runs))]
    parts = [zip(names, *part, strict=True) for part in _parts(columns, WIDTH - width)]
    return "\n\n".join("\n".join("  ".join(line) for line in part) for part in parts)


def _parts(columns: Iterable[list[str]], width: int) -> list[list[list[str]]]:
    """The columns in as few parts as fit into `width`, with two characters before each column."""
    parts: list[list[list[str]]] = [[]]
    for column in columns:
        taken = sum(2 + len(one[0]) for one in parts[-1])
        if parts[-1] and taken + 2 + len(column[0]) > width:
            parts.append([])
        parts[-1].append(column)
    return parts


def _cell(value: float) -> str:
    if math.isnan(value):
        return _NONE
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def headings() -> str:
    """The line above the rows of the short table, which is like D2F-vLLM's demo benchmark."""
    return _joined("", list(_HEADINGS))


def row(run: Run, first: Run) -> str:
    """The line of one run: total time, tokens a second and average latency, each with its multiple
    of the first row's speed in brackets, and the accuracy."""
    values = (run.total_s, run.tokens_per_s, run.latency_s)
    cells = [_NONE if math.isnan(value) else f"{value:.2f}" for value in values]
    for at, multiple in enumerate(_multiples(run, first).values()):
        cells[at] += "" if math.isnan(multiple) else f" ({multiple:.1f}x)"
    accuracy = _NONE if math.isnan(run.accuracy) else f"{100 * run.accuracy:.1f} %"
    return _joined(run.name, [*cells, accuracy])


def _multiples(run: Run, first: Run) -> dict[str, float]:
    """How many times as fast as `first` a run is, by figure; NaN if one of them has no answer."""
    is_answered = run.samples and first.samples
    return {
        "total_s": _ratio(first.total_s, run.total_s) if is_answered else math.nan,
        "tokens_per_s": _ratio(run.tokens_per_s, first.tokens_per_s),
        "latency_s": _ratio(first.latency_s, run.latency_s),
    }


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.nan


def _joined(name: str, cells: Sequence[str]) -> str:
    widths = _HEADINGS.values()
    return name.ljust(_NAME) + "".join(
        text.rjust(width) for text, width in zip(cells, widths, strict=True)
    )


def as_json(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Figures, samples and answers of every run, for a file; null replaces NaN, which JSON does not
    have."""
    return [_fields(run, runs[0]) for run in runs]


def _fields(run: Run, first: Run) -> dict[str, object]:
    numbers = {
        **figures(run),
        "latency_s": run.latency_s,
        "accuracy": run.accuracy,
        **{f"{name}_multiple": value for name, value in _multiples(run, first).items()},
    }
    samples = [asdict(one) for one in run.samples]
    return {
        "name": run.name,
        **{name: None if math.isnan(value) else value for name, value in numbers.items()},
        "requests": [
            {name: value for name, value in one.items() if name not in _CONTENT} for one in samples
        ],
        "answers": [{name: one[name] for name in _CONTENT} for one in samples],
    }


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draws the runs with matplotlib, into a file whose type is its suffix.

    Runs at several arrival rates are drawn by rate, with the objectives. Others are drawn by the
    share of requests below each latency.
    """
    from matplotlib.figure import Figure

    by_rate = sorted((run for run in runs if not math.isnan(run.rate)), key=lambda run: run.rate)
    figure = Figure(figsize=(14, 3.6), layout="constrained")
    first, *others = figure.subplots(1, 4)
    if len(by_rate) > 1:
        _draw_goodput(first, by_rate)
    else:
        first.barh([run.name for run in runs], [run.tokens_per_s for run in runs])
        first.set_xlabel("tokens/s")
    for panel, (kind, about) in zip(others, _TIMES.items(), strict=True):
        if len(by_rate) > 1:
            _draw_latency(panel, by_rate, kind, about)
        else:
            _draw_shares(panel, runs, kind, about)
        panel.legend(fontsize=7)
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


def _draw_latency(panel: "Axes", runs: Sequence[Run], kind: str, about: str) -> None:
    for label, share, style in (("p50", 0.5, "-o"), ("p99", 0.99, "--s")):
        values = [percentile(run.times_s(kind), share) for run in runs]
        panel.plot([run.rate for run in runs], values, style, label=label)
    panel.set_xlabel("requests per second")
    panel.set_ylabel(f"{about}, seconds")


def _draw_shares(panel: "Axes", runs: Sequence[Run], kind: str, about: str) -> None:
    for run in runs:
        values = sorted(run.times_s(kind))
        shares = [(at + 1) / len(values) for at in range(len(values))]
        panel.step(values, shares, where="post", label=run.name)
    panel.set_xlabel(f"{about}, seconds")
    panel.set_ylabel("share of requests")
