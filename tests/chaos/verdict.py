"""Errors in a ledger: requests lost, duplicated or wrong, faults that did not happen, and leftovers
at the end. Pure; a correct ledger has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from chaos.ledger import Answer, Commit, Exchange, FleetState, Injected, Ledger
from chaos.plan import Kind

Charge = Literal["lost", "duplicated", "missing", "wrong", "no fault", "not back", "left", "leaked"]

# Resources that connections to peers may add, by process.
MORE_DESCRIPTORS = 48
MORE_TASKS = 16


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be."""

    charge: Charge
    story: str
    number: int | None = None  # of the request


def judge(ledger: Ledger) -> list[Finding]:
    """All that is wrong."""
    found = [one for exchange in ledger.exchanges for one in _of_exchange(ledger, exchange)]
    found += [one for injected in ledger.injected for one in _of_fault(injected)]
    if len(ledger.injected) < ledger.planned:
        told = f"{len(ledger.injected)} of {ledger.planned} faults were carried out"
        found.append(Finding("no fault", told))
    changed = sum(a != b for a, b in zip(ledger.expected, ledger.later, strict=False))
    if changed or len(ledger.later) < len(ledger.expected):
        of = f"{len(ledger.later)} of {len(ledger.expected)} jobs were asked once more"
        found.append(Finding("wrong", f"after the faults {of}, {changed} answered otherwise"))
    if ledger.before is None or ledger.after is None:
        return [*found, Finding("left", "the fleet was not looked at before or after")]
    return [*found, *left(ledger.after), *_leaked(ledger.before, ledger.after)]


def _of_exchange(ledger: Ledger, exchange: Exchange) -> Iterator[Finding]:
    """A cancelled request may end early, but its events must be right."""
    name, expected = exchange.number, ledger.expected[exchange.job]
    if exchange.ended_s is None:
        yield Finding("lost", "it never ended", name)
    elif exchange.status != "OK" and not (
        exchange.mode.is_cancelled and exchange.status == "CANCELLED"
    ):
        took_s = exchange.ended_s - exchange.began_s
        story = f"{exchange.status} after {took_s:.1f} s: {exchange.details}"
        yield Finding("lost", story, name)
    if exchange.status == "OK" and not exchange.finishes:
        yield Finding("lost", "it ended well without an answer's end", name)
    yield from _order(exchange)
    yield from _content(exchange, expected)
    for one in exchange.earlier:
        said = replace(exchange, events=one.events)
        yield from _order(said)
        yield from _content(said, expected)
    if exchange.earlier and not _lost_its_router(ledger, exchange):
        told = ", ".join(one.status for one in exchange.earlier)
        yield Finding("lost", f"it was asked again after {told}, and no router was killed", name)


def _lost_its_router(ledger: Ledger, exchange: Exchange) -> bool:
    """Whether its router was killed. A client that connects just then may find the port of one that
    has ended.
    """
    kills = [one.at_s for one in ledger.injected if one.fault.kind is Kind.ROUTER_KILLED]
    first_s = exchange.earlier[0].at_s
    return any(exchange.began_s - 1.0 < at_s <= first_s for at_s in kills)


def _order(exchange: Exchange) -> Iterator[Finding]:
    """Each token once, in its place, and nothing after the end."""
    name, count, is_over = exchange.number, 0, False
    for event in exchange.events:
        if is_over:
            yield Finding("duplicated", f"{event} came after the answer's end", name)
        elif not isinstance(event, Commit):
            is_over = True
            if event.num_tokens > count:
                told = f"{count} tokens came of an answer of {event.num_tokens}"
                yield Finding("missing", told, name)
        elif event.offset < count:
            yield Finding("duplicated", f"{event} came after {count} tokens", name)
        elif event.offset > count:
            yield Finding("missing", f"{event} came after {count} tokens", name)
        if isinstance(event, Commit):
            count += len(event.token_ids)


def _content(exchange: Exchange, expected: Answer) -> Iterator[Finding]:
    """The events are those of an undisturbed fleet, or their beginning."""
    token_ids = tuple(token for commit in exchange.commits for token in commit.token_ids)
    text = "".join(commit.text for commit in exchange.commits)
    if token_ids != expected.token_ids[: len(token_ids)] or not expected.text.startswith(text):
        story = f"{token_ids} {text!r} came, {expected.token_ids} {expected.text!r} was right"
        yield Finding("wrong", story, exchange.number)
    elif finishes := exchange.finishes:
        told = (finishes[0].finish_reason, finishes[0].num_tokens, token_ids, text)
        right = (expected.finish_reason, len(expected.token_ids), expected.token_ids, expected.text)
        if told != right:
            yield Finding("wrong", f"it ended as {told}, {right} was right", exchange.number)


def _of_fault(injected: Injected) -> Iterator[Finding]:
    what = f"{injected.fault.kind.value}, {injected.fault.target}"
    if not injected.evidence:
        yield Finding("no fault", f"{what}: it was not seen to happen")
    if injected.recovered_s is None:
        yield Finding("not back", f"{what}: it was not ready again")


def left(after: FleetState) -> list[Finding]:
    """Resources that an idle fleet holds."""
    found = []
    for name, worker in after.workers.items():
        if not worker.is_ready:
            found.append(f"{name} is not ready")
        held = {
            "pages": worker.held_pages,
            "pages in quarantine": worker.quarantined_pages,
            "requests": worker.requests,
        }
        found += [f"{name} holds {count} {what}" for what, count in held.items() if count]
    found += [f"Redis holds {key}, which says that it runs" for key in after.running_keys]
    found += [f"Redis holds {key} for ever" for key in after.lasting_keys]
    return [Finding("left", story) for story in found]


def _leaked(before: FleetState, after: FleetState) -> Iterator[Finding]:
    """The growth."""
    grown = [("routers", "descriptors", before.router_descriptors, after.router_descriptors)]
    for name, worker in after.workers.items():
        old = before.workers[name]
        grown += [
            (name, "descriptors", old.descriptors, worker.descriptors),
            (name, "tasks", old.tasks, worker.tasks),
        ]
    for name, what, was, now in grown:
        if now - was > (MORE_TASKS if what == "tasks" else MORE_DESCRIPTORS):
            yield Finding("leaked", f"{name} had {was} {what} and has {now}")
