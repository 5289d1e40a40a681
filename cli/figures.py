"""The figures of a benchmark run and their table: pure arithmetic.

Times are those that a client sees: until its first block, from block to block, and until its end.
Tokens are the server's count of generated tokens. Goodput counts requests that met every objective,
as in DistServe (arXiv 2401.09670).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceGoals:
    """A client's objectives for each request, in seconds; infinity means none."""

    first_block_s: float = math.inf
    gap_s: float = math.inf  # every gap between two blocks
    total_s: float = math.inf

    @property
    def asks_nothing(self) -> bool:
        """Whether every finished request meets them."""
        return math.isinf(min(self.first_block_s, self.gap_s, self.total_s))

    def met_by(self, sample: Sample) -> bool:
        """Whether this request met them."""
        return (
            sample.first_block_s <= self.first_block_s
            and max(sample.gaps_s, default=0.0) <= self.gap_s
            and sample.total_s <= self.total_s
        )


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
        """Tokens of all answers."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers divided by the duration of the run."""
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
        """Requests that met every objective."""
        return sum(self.goals.met_by(sample) for sample in self.samples)

    @property
    def met_share(self) -> float:
        """The share of these among all requests, including failed ones; NaN without requests."""
        count = len(self.samples) + self.failed
        return self.num_met / count if count else math.nan

    @property
    def tokens_per_forward(self) -> float:
        """Tokens divided by the forward passes of their requests."""
        return self.tokens / max(1, sum(sample.forward_passes for sample in self.samples))


WIDTH: Final = 80  # columns of a table
_NONE: Final = "-"  # instead of a figure

COLUMNS = (
    ("rate", "arrive/s"),
    ("samples", "answers"),
    ("failed", "failed"),
    ("total_s", "total s"),
    ("tokens", "tokens"),
    ("tokens_per_s", "tokens/s"),
    ("requests_per_s", "answers/s"),
    ("goodput_per_s", "goodput/s"),
    ("met_share", "met"),
    ("latency_mean_s", "mean s"),
    ("latency_p50_s", "p50 s"),
    ("latency_p99_s", "p99 s"),
    ("first_block_p50_s", "1st block p50 s"),
    ("first_block_p99_s", "1st block p99 s"),
    ("gap_p50_s", "gap p50 s"),
    ("gap_p99_s", "gap p99 s"),
    ("tokens_per_forward", "tokens/fwd"),
)


_CONTENT = ("prompt", "text", "is_right")  # of samples; all others are figures


def figures(run: Run) -> dict[str, float]:
    """Every figure of a run by name; times in seconds. There is no goodput without objectives."""
    latencies = [sample.total_s for sample in run.samples]
    firsts = [sample.first_block_s for sample in run.samples]
    gaps = [gap for sample in run.samples for gap in sample.gaps_s]
    without = run.goals.asks_nothing
    return {
        "rate": run.rate,
        "samples": len(run.samples),
        "failed": run.failed,
        "total_s": run.total_s,
        "tokens": run.tokens,
        "tokens_per_s": run.tokens_per_s,
        "requests_per_s": len(run.samples) / run.total_s,
        "goodput_per_s": math.nan if without else run.num_met / run.total_s,
        "met_share": math.nan if without else run.met_share,
        "latency_mean_s": mean(latencies),
        "latency_p50_s": percentile(latencies, 0.5),
        "latency_p99_s": percentile(latencies, 0.99),
        "first_block_p50_s": percentile(firsts, 0.5),
        "first_block_p99_s": percentile(firsts, 0.99),
        "gap_p50_s": percentile(gaps, 0.5),
        "gap_p99_s": percentile(gaps, 0.99),
        "tokens_per_forward": run.tokens_per_forward,
    }


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; NaN without values."""
    return sum(values) / len(values) if values else math.nan


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
    rows = [figures(run) for run in runs]
    columns: list[list[str]] = []
    for key, heading in COLUMNS:
        cells = [_cell(row[key]) for row in rows]
        if any(cell != _NONE for cell in cells) or key == "latency_mean_s":
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


def as_json(runs: Iterable[Run]) -> list[dict[str, object]]:
    """Figures and samples of every run, for a file; null replaces NaN, which JSON does not have."""
    return [
        {
            "name": run.name,
            **{name: None if math.isnan(value) else value for name, value in figures(run).items()},
            "requests": [
                {name: value for name, value in asdict(one).items() if name not in _CONTENT}
                for one in run.samples
            ],
        }
        for run in runs
    ]


def _cell(value: float) -> str:
    if math.isnan(value):
        return _NONE
    return str(value) if isinstance(value, int) else f"{value:.3f}"
