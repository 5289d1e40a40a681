"""`effuse check-ghz`: judges a report of ghz, because ghz exits with 0 whatever happened.

Every call must succeed within the limits of the flags; a missing measurement is a failure.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from effuse.cli.arguments import command, file, number, seconds, whole
from effuse.config.checks import UNREADABLE
from effuse.config.flags import BadInput

_NS = 1e-9
PERCENTILES = (50, 90, 95, 99)  # of those that ghz reports by default


class GhzLatency(msgspec.Struct, frozen=True):
    """A latency that this percentage of the calls did not exceed."""

    percentage: int
    latency: int  # nanoseconds


class GhzReport(msgspec.Struct, frozen=True, rename="camel"):
    """The judged figures of a report from `ghz --format json`; times in nanoseconds."""

    count: int
    average: float
    slowest: float
    rps: float
    error_distribution: dict[str, int] | None
    status_code_distribution: dict[str, int] | None
    latency_distribution: list[GhzLatency] | None

    @property
    def num_ok(self) -> int:
        return (self.status_code_distribution or {}).get("OK", 0)

    def seconds_at(self, percentage: int) -> float | None:
        """The latency that this percentage did not exceed, in seconds; None if unreported."""
        found = [one for one in self.latency_distribution or () if one.percentage == percentage]
        return found[0].latency * _NS if found else None

    def line(self) -> str:
        points = [(at, self.seconds_at(at)) for at in PERCENTILES]
        latencies = [f"p{at} {1e3 * found:.0f} ms" for at, found in points if found is not None]
        return ", ".join([f"{self.count} calls, {self.rps:.1f} a second", *latencies])


def main(argv: Sequence[str]) -> int:
    """Run the command: 0 if the report is good, 1 if it is not. Raises BadInput if it is none."""
    limits = make_parser().parse_args(argv)
    report = read(limits.report)
    print(report.line())
    wrong = faults(report, limits)
    for fault in wrong:
        print(f"effuse check-ghz: {fault}", file=sys.stderr)
    return 1 if wrong else 0


def make_parser() -> argparse.ArgumentParser:
    parser = command("check-ghz", "Check a report that ghz wrote with --format json.")
    add = parser.add_argument
    add("report", type=file, metavar="FILE", help="the report")
    add("--count", type=whole(1), metavar="N", help="expected number of calls (default: any)")
    add("--errors", type=whole(0), default=0, metavar="N", help="maximum calls that may fail")
    add("--least-rps", type=number(0), metavar="R", help="minimum calls per second")
    add("--average", type=seconds, metavar="S", help="highest average latency")
    add("--slowest", type=seconds, metavar="S", help="highest latency")
    for at in PERCENTILES:
        add(f"--p{at}", type=seconds, metavar="S",
            help=f"highest latency of the fastest {at} percent")  # fmt: skip
    return parser


def read(path: Path) -> GhzReport:
    """The report in a file. Raises BadInput."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=GhzReport)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    except UNREADABLE as error:
        raise BadInput(f"{path}: expected a ghz report in JSON: {error}") from error


def faults(report: GhzReport, limits: argparse.Namespace) -> list[str]:
    """The failures of the report within the limits of the flags; empty if it is good."""
    return [*_failed(report, limits), *_slow(report, vars(limits))]


def _failed(report: GhzReport, limits: argparse.Namespace) -> list[str]:
    found = []
    failed = report.count - report.num_ok
    if failed > limits.errors or failed < 0:
        statuses = report.status_code_distribution or {"no status": report.count}
        bad = [f"{count} with {name}" for name, count in statuses.items() if name != "OK"]
        texts = [f"{count} x {text}" for text, count in (report.error_distribution or {}).items()]
        found.append(f"{failed} calls failed, {limits.errors} may: {'; '.join([*bad, *texts])}")
    if limits.count is not None and report.count != limits.count:
        found.append(f"{report.count} calls were made, expected {limits.count}")
    if not report.num_ok:
        found.append("no call succeeded")
    if limits.least_rps is not None and report.rps < limits.least_rps:
        found.append(f"{report.rps:.3g} calls per second, expected at least {limits.least_rps:g}")
    return found


def _slow(report: GhzReport, limits: Mapping[str, float | None]) -> list[str]:
    took_s = {
        "average": ("the average", report.average * _NS),
        "slowest": ("the slowest", report.slowest * _NS),
        **{f"p{at}": (f"p{at}", report.seconds_at(at)) for at in PERCENTILES},
    }
    found = []
    for flag, (name, took) in took_s.items():
        most = limits[flag]
        if most is not None and took is None:
            found.append(f"{name} is not in the report")
        elif most is not None and took is not None and took > most:
            found.append(f"{name} is {took:.3g} s, expected at most {most:g} s")
    return found
