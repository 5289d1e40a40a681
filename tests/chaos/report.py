"""A run's ledger in figures, as JSON and as a text for people."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

from chaos.ledger import Exchange, Injected, Ledger
from chaos.plan import KILLS
from chaos.verdict import Finding

_TOLD = 50  # findings and slow requests in the text; JSON has all
SLOW_S = 5.0
ON_THE_WAY_S = 0.5  # most time of a message from before a fault, and to notice a fault
ON_TARGET = ("prefilled there", "decodes there")


def figures(ledger: Ledger, findings: Sequence[Finding]) -> dict[str, Any]:
    """The report of a run. Seconds throughout."""
    kills = [one for one in ledger.injected if one.fault.kind in KILLS]
    return {
        "seed": ledger.seed,
        "connector": ledger.connector,
        "model": ledger.model,
        "requests": len(ledger.exchanges),
        "faults": len(ledger.injected),
        "kills": len(kills),
        "seconds": _duration_s(ledger),
        "statuses": Counter(f"{one.mode.value}: {one.status}" for one in ledger.exchanges),
        "attempts": Counter(one.attempts for one in ledger.exchanges if one.attempts),
        "cancelled_after_blocks": Counter(
            len(one.commits) for one in ledger.exchanges if one.status == "CANCELLED"
        ),
        "asked_again": Counter(one.status for e in ledger.exchanges for one in e.earlier),
        "jobs": len(ledger.expected),
        "right": [ledger.right(ledger.expected), ledger.right(ledger.later)],
        "tokens": sum(len(c.token_ids) for one in ledger.exchanges for c in one.commits),
        "by_fault": {
            name: _of_kind(ledger, some) for name, some in _by_kind(ledger.injected).items()
        },
        "gap_after_kill": spread([gap for one in kills for gap in gaps(ledger, one)]),
        "longest_waits": spread([longest_wait_s(one) for one in ledger.exchanges
                                 if not one.mode.is_cancelled]),
        "longest_request": max((_took_s(one) for one in ledger.exchanges), default=0.0),
        "slow": [_line_of(ledger, one) for one in slow(ledger)],
        "router_bytes": [ledger.before and ledger.before.router_bytes,
                         ledger.after and ledger.after.router_bytes],
        "findings": Counter(one.charge for one in findings),
    }  # fmt: skip


def gaps(ledger: Ledger, injected: Injected) -> list[float]:
    """How long each stream that the fault hit waited for an event after the fault. The first events
    may have been on their way, so the longest wait counts that began soon enough.
    """
    hit = [one.number for one in injected.running if one.state.startswith(ON_TARGET)]
    streams = [one for one in map(ledger.exchanges.__getitem__, hit) if one.mode.is_streamed]
    found = []
    for one in streams:
        times = [injected.at_s, *(e.at_s for e in one.events if e.at_s > injected.at_s)]
        soon = [b - a for a, b in pairwise(times) if a < injected.at_s + ON_THE_WAY_S]
        found += [max(soon)] if soon else []
    return found


def longest_wait_s(exchange: Exchange) -> float:
    """The longest time in which a client that did not break off saw nothing of its request."""
    if exchange.ended_s is None or exchange.mode.is_cancelled:
        return 0.0
    moments = [exchange.began_s, *(event.at_s for event in exchange.events), exchange.ended_s]
    return max(later - earlier for earlier, later in pairwise(moments))


def slow(ledger: Ledger) -> list[Exchange]:
    """Requests that took long; first the one whose client saw nothing for the longest time."""
    found = [one for one in ledger.exchanges if _took_s(one) > SLOW_S]
    return sorted(found, key=longest_wait_s, reverse=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and worst of some seconds."""
    if len(values) < 2:
        return {"count": len(values), "worst": max(values, default=0.0)}
    cuts = quantiles(values, n=100, method="inclusive")
    return {"count": len(values), "p50": cuts[49], "p99": cuts[98], "worst": max(values)}


def write(ledger: Ledger, findings: Sequence[Finding], directory: Path) -> Path:
    """Writes report.json and report.txt; where the text is."""
    directory.mkdir(parents=True, exist_ok=True)
    told = figures(ledger, findings)
    everything = told | {
        "stories": [_story(ledger, one) for one in findings],
        "injected": [_line(ledger, one) for one in ledger.injected],
    }
    (directory / "report.json").write_text(json.dumps(everything, indent=1))
    text = directory / "report.txt"
    text.write_text("\n".join(lines(ledger, findings)) + "\n")
    return text


def lines(ledger: Ledger, findings: Sequence[Finding]) -> list[str]:
    """The report in a form for people."""
    told = figures(ledger, findings)
    found = [
        f"{told['requests']} requests and {told['faults']} faults, {told['kills']} of them kills, "
        f"in {told['seconds']:.0f} s over {told['connector']}, {ledger.model} model, "
        f"seed {told['seed']}",
        *(f"  {name}: {count}" for name, count in sorted(told["statuses"].items())),
        f"attempts that requests took: {dict(sorted(told['attempts'].items()))}",
        f"cancelled after so many blocks: {dict(sorted(told['cancelled_after_blocks'].items()))}",
        f"asked again after: {dict(sorted(told['asked_again'].items())) or 'nothing'}",
        *_accuracy(ledger),
        f"a stream's gap after a kill: {_tell(told['gap_after_kill'])}",
        f"the longest time in which a client saw nothing: {_tell(told['longest_waits'])}",
        f"the longest request: {told['longest_request']:.1f} s",
        f"requests that took longer than {SLOW_S:g} s: {len(told['slow'])}",
        *(f"  {line}" for line in told["slow"][:_TOLD]),
        "faults, and what ran at their moment:",
    ]
    for name, kind in told["by_fault"].items():
        found.append(f"  {name}: {kind['count']}, ready again after {_tell(kind['recovery'])}")
        found += [f"    {state}: {count}" for state, count in sorted(kind["running"].items())]
        if kind["gap"]["count"]:
            found.append(f"    gap of the streams that it hit: {_tell(kind['gap'])}")
    found.append(f"findings: {dict(told['findings']) or 'none'}")
    found += [f"  {_story(ledger, one)}" for one in findings[:_TOLD]]
    return found


def _accuracy(ledger: Ledger) -> list[str]:
    """How many answers to all jobs are right, if jobs are problems."""
    if not ledger.solutions:
        return []
    before, after = ledger.right(ledger.expected), ledger.right(ledger.later)
    return [f"right of {len(ledger.solutions)} problems: {before} before the faults, {after} after"]


def _by_kind(injected: Sequence[Injected]) -> dict[str, list[Injected]]:
    """By kind of fault and role."""
    found: dict[str, list[Injected]] = {}
    for one in injected:
        found.setdefault(f"{one.fault.kind.value} ({one.fault.role})", []).append(one)
    return dict(sorted(found.items()))


def _of_kind(ledger: Ledger, injected: Sequence[Injected]) -> dict[str, Any]:
    return {
        "count": len(injected),
        "recovery": spread([one.recovered_s for one in injected if one.recovered_s is not None]),
        "gap": spread([gap for one in injected for gap in gaps(ledger, one)]),
        "running": Counter(standing.state for one in injected for standing in one.running),
    }


def _story(ledger: Ledger, finding: Finding) -> str:
    if finding.number is None:
        return f"{finding.charge}: {finding.story}"
    told = _line_of(ledger, ledger.exchanges[finding.number])
    return f"{finding.charge}: {finding.story}; {told}"


def _line_of(ledger: Ledger, exchange: Exchange) -> str:
    """A request, and the faults that it met with."""
    began_s, took_s = exchange.began_s, _took_s(exchange)
    met = [
        _line(ledger, one)
        for one in ledger.injected
        if began_s - 1 < one.at_s < (exchange.ended_s or math.inf)
    ]
    moments = ", ".join(f"+{event.at_s - began_s:.2f}" for event in exchange.events)
    return (
        f"{exchange.name}, {exchange.mode.value}, job {exchange.job}, began at "
        f"{_clock(ledger, began_s)} and took {took_s:.1f} s, attempt {exchange.attempts} on "
        f"{exchange.workers or 'nobody'}, events at {moments or 'no time'}, asked again "
        f"{len(exchange.earlier)} times; "
        f"{'; '.join(met) or 'no fault'}"
    )


def _line(ledger: Ledger, injected: Injected) -> str:
    back = "never" if injected.recovered_s is None else f"after {injected.recovered_s:.1f} s"
    fault, clock = injected.fault, _clock(ledger, injected.at_s)
    return f"{clock} {fault.kind.value}, {fault.target}: {injected.evidence}, ready {back}"


def _clock(ledger: Ledger, at_s: float) -> str:
    """As logs write it."""
    at = datetime.fromtimestamp(ledger.epoch_s + at_s)
    return at.isoformat(" ", "milliseconds").replace(".", ",")


def _tell(spread_s: dict[str, float]) -> str:
    told = [f"{name} {value:.2f} s" for name, value in spread_s.items() if name != "count"]
    return f"{', '.join(told)} (of {spread_s['count']:.0f})"


def _took_s(exchange: Exchange) -> float:
    return 0.0 if exchange.ended_s is None else exchange.ended_s - exchange.began_s


def _duration_s(ledger: Ledger) -> float:
    ends = [one.ended_s for one in ledger.exchanges if one.ended_s is not None]
    return max(ends) - ledger.exchanges[0].began_s if ends else 0.0
