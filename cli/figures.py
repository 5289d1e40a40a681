"""The figures of one benchmark run and the table they make: pure arithmetic.

Columns are D2F-vLLM's (total time, tokens, tokens a second, and its "average latency", the total
time by the number of samples) and beside them what a client notices. Tokens are those before the
end-of-sequence id.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished request."""

    tokens: int
    forward_passes: int
    first_block_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one way of answering them, and how long they took together."""

    name: str
    total_s: float
    samples: Sequence[Sample]
    failed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers by the time of the whole run."""
        return self.tokens / self.total_s

    @property
    def average_latency_s(self) -> float:
        """Total time by samples: D2F-vLLM's figure, not what a request waits."""
        return self.total_s / max(1, len(self.samples))

    @property
    def tokens_per_forward(self) -> float:
        """Tokens by the forward passes of the requests they belong to."""
        return self.tokens / max(1, sum(sample.forward_passes for sample in self.samples))


COLUMNS = (
    ("samples", "samples"),
    ("total_s", "total s"),
    ("tokens", "tokens"),
    ("tokens_per_s", "tokens/s"),
    ("average_latency_s", "avg. latency s"),
    ("latency_p50_s", "request p50 s"),
    ("latency_p99_s", "request p99 s"),
    ("first_block_p50_s", "1st block p50 s"),
    ("first_block_p99_s", "1st block p99 s"),
    ("tokens_per_forward", "tokens/fwd"),
    ("failed", "failed"),
)


def figures(run: Run) -> dict[str, float]:
    """Every figure of a run by name; times in seconds."""
    latencies = [sample.total_s for sample in run.samples]
    firsts = [sample.first_block_s for sample in run.samples]
    return {
        "samples": len(run.samples),
        "failed": run.failed,
        "total_s": run.total_s,
        "tokens": run.tokens,
        "tokens_per_s": run.tokens_per_s,
        "average_latency_s": run.average_latency_s,
        "latency_p50_s": percentile(latencies, 0.5),
        "latency_p99_s": percentile(latencies, 0.99),
        "first_block_p50_s": percentile(firsts, 0.5),
        "first_block_p99_s": percentile(firsts, 0.99),
        "tokens_per_forward": run.tokens_per_forward,
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(runs: Sequence[Run]) -> str:
    """One line a run under a line of headings."""
    width = max(len(run.name) for run in runs)
    rows = [figures(run) for run in runs]
    cells = [[_cell(row[key]) for key, _ in COLUMNS] for row in rows]
    widths = [
        max(len(heading), *(len(line[at]) for line in cells))
        for at, (_, heading) in enumerate(COLUMNS)
    ]
    headings = [heading for _, heading in COLUMNS]
    lines = [("", headings), *zip([run.name for run in runs], cells, strict=True)]
    return "\n".join(
        "  ".join(
            [name.ljust(width), *(text.rjust(w) for text, w in zip(line, widths, strict=True))]
        )
        for name, line in lines
    )


def as_json(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Figures and samples of every run, for a file; null for a NaN, which JSON has not."""
    return [
        {
            "name": run.name,
            **{name: None if math.isnan(value) else value for name, value in figures(run).items()},
            "requests": [asdict(one) for one in run.samples],
        }
        for run in runs
    ]


def _cell(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"
