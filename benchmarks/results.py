"""`python -m effuse.benchmarks.results [--check]`: fills the tables of RESULTS.md from JSON files.

A table below `<!-- KIND of FILE -->` is made of that file. With `--check` nothing is written, and a
table that differs from its file is an error. Other figures were copied from a run's output, because
no file of that run was kept.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from effuse.benchmarks import fleet_report, xpyd_report
from effuse.benchmarks.fleet_report import GAPS, Content, as_table, objectives

ROOT: Final = Path(__file__).parent
PAGE: Final = ROOT / "RESULTS.md"
AIMS: Final = {2: 3.0, 4: 0.9}
"""Least ratios of goodput, split over co-located, by the gaps that are allowed."""
KEYS: Final = ("split", "colocated")
ARRIVING: Final = "met two gaps and 1 s, by requests a second"
MARKED: Final = re.compile(r"(<!-- (\w+) of (\w+\.json) -->\n)(?:\|.*\n)*")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page or, with `--check`, compares it; 1 if it is stale."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.results")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if it is stale")
    asked = parser.parse_args(argv)
    before = PAGE.read_text(encoding="utf-8")
    after = filled(before, lambda name: json.loads((ROOT / name).read_text(encoding="utf-8")))
    if not asked.check:
        PAGE.write_text(after, encoding="utf-8")
    elif after != before:
        print(f"{PAGE} is stale; run `make reference`", file=sys.stderr)
        return 1
    return 0


def filled(page: str, read: Callable[[str], Any]) -> str:
    """The page with each marked table made anew; `read` returns the content of a file. Raises
    KeyError for an unknown kind.
    """

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}{KINDS[found[2]](read(found[3]))}\n"

    return MARKED.sub(table, page)


def closed(content: Content) -> str:
    """Tokens a second and the longest gaps of a fixed number of requests at once."""
    colocated = {_load(one): one for one in content["colocated"][0]["closed"]}
    rows = [
        [_load(one), *(cell for each in (one, colocated[_load(one)]) for cell in _pace(each))]
        for one in content["split"][0]["closed"]
    ]
    heads = ["prompt/answer x at once", "split tok/s", "gap p99", "co-located tok/s", "gap p99"]
    return as_table(heads, rows)


def _load(one: Content) -> str:
    return f"{one['shape']} x {one['at_once']}"


def _pace(one: Content) -> tuple[str, str]:
    return f"{one['tokens_per_s']:.0f}", f"{1e3 * one['gap_p99_s']:.0f} ms"


def arriving(content: Content) -> str:
    """Requests that met two gaps, of all that came, by their rate, of each kind of fleet."""
    wanted = objectives(content)[0]
    split, *_ = content["split"]
    rates = [one["rate"] for one in split["arriving"]]
    rows = []
    for name, kind in (("split", "split"), ("co-located, the better setting", "colocated")):
        loads = [one for fleet in content[kind] for one in fleet["arriving"]]
        best = [
            max((sum(map(wanted.met_by, one["each"])), len(one["each"])) for one in loads
                if one["rate"] == rate)
            for rate in rates
        ]  # fmt: skip
        rows.append([name, *(f"{kept} of {came}" for kept, came in best)])
    return as_table([ARRIVING, *(f"{rate:g}" for rate in rates)], rows)


def goodput(content: Content) -> str:
    """Requests a second of both kinds of fleet within so many gaps; bold is below the aim."""
    rows = []
    for gaps, wanted in zip(GAPS, objectives(content), strict=True):
        cells = [f"{gaps} times the unloaded gap"]
        for best_of in (fleet_report.most_met, fleet_report.highest_rate):
            (split, *_), (colocated, *_) = (best_of(content[one], wanted) for one in KEYS)
            ratio = f"{split / colocated:.2f}"
            bold = ratio if split / colocated >= AIMS[gaps] else f"**{ratio}**"
            cells.append(f"{split:.1f} over {colocated:.1f}, {bold}")
        rows.append([*cells, f"at least {AIMS[gaps]:g}"])
    heads = ["goodput, requests a second: first block in 1 s, gaps within", "met at the best rate"]
    heads += ["highest rate at which 9 in 10 met both", "aim"]
    return as_table(heads, rows)


def fleets(content: Content) -> str:
    """Requests a second that met two gaps, of each fleet at its best rate, by their shape."""
    names = [xpyd_report.short_name(one) for one in content["fleets"]]
    rows = []
    for shape in content["limits"]:
        wanted = xpyd_report.objectives(content, shape)[GAPS.index(2)]
        most = [xpyd_report.goodput(one, shape, wanted)[0] for one in content["fleets"]]
        rows.append([shape, *(f"{one:.1f}" for one in most)])
    return as_table(["prompt/answer", *names], rows)


KINDS: Final[dict[str, Callable[[Content], str]]] = {
    "closed": closed,
    "arriving": arriving,
    "goodput": goodput,
    "fleets": fleets,
}

if __name__ == "__main__":
    sys.exit(main())
