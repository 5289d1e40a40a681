"""Prints `states.md`: diagrams generated from the code's state tables.

`make states` writes the page; a test compares it with the tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from effuse.kvtransfer import handoff, pool
from effuse.placement import leases as lease
from effuse.router import request_states

INTRODUCTION = """\
# States

Written by `make states` from the tables in the code. An arrow is labelled `event / actions`; an
event that has no arrow in a state is an error there.
"""

Step = Enum | tuple[Enum, tuple[Enum, ...]]
"""The state after an event, with its actions if there are any."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One table and its introduction."""

    title: str
    about: str
    start: Enum
    table: Mapping[Any, Step]  # (state, event) to the result


MACHINES = (
    Machine(
        "A request",
        "In the router, `router/request_states.py`. An attempt begins at *starting*; *lost*\nends "
        "it, and another one may follow. Each of several answers has its own state.",
        request_states.State.QUEUED,
        request_states.TRANSITIONS,
    ),
    Machine(
        "A page",
        "In a worker's pool, `kvtransfer/pool.py`. A prefill worker takes pages; a decode "
        "worker\nreserves pages and opens them to a writer, or takes them if it prefills itself.",
        pool.PageState.FREE,
        pool.TRANSITIONS,
    ),
    Machine(
        "A handoff at the receiver",
        "One reservation of a decode worker, `kvtransfer/handoff.py`.",
        handoff.ReceiverState.RESERVED,
        handoff.RECEIVER,
    ),
    Machine(
        "A handoff at the sender",
        "One prompt of a prefill worker, `kvtransfer/handoff.py`.",
        handoff.SenderState.COMPUTING,
        handoff.SENDER,
    ),
    Machine(
        "A lease",
        "A worker's lease in Redis, in the worker's own view, `placement/leases.py`.",
        lease.LeaseState.ABSENT,
        lease.TRANSITIONS,
    ),
)


def page() -> str:
    """The whole page, in Markdown with Mermaid diagrams."""
    sections = (
        f"## {one.title}\n\n{one.about}\n\n```mermaid\n{diagram(one)}\n```\n" for one in MACHINES
    )
    return "\n".join([INTRODUCTION, *sections])


def diagram(machine: Machine) -> str:
    """One table as a Mermaid state diagram: events that do the same share an arrow."""
    arrows: dict[tuple[Enum, Enum, tuple[Enum, ...]], list[str]] = {}
    for (state, event), step in machine.table.items():
        after, actions = step if isinstance(step, tuple) else (step, ())
        arrows.setdefault((state, after, actions), []).append(_words(event))
    lines = ["stateDiagram-v2", f"    [*] --> {_id(machine.start)}"]
    for (state, after, actions), events in arrows.items():
        label = ", ".join(events)
        if actions:
            label += f" / {', '.join(map(_words, actions))}"
        lines.append(f"    {_id(state)} --> {_id(after)} : {label}")
    states = dict.fromkeys(after for _, after, _ in arrows)
    ends = [one for one in states if not any(state is one for state, _, _ in arrows)]
    return "\n".join([*lines, *(f"    {_id(one)} --> [*]" for one in ends)])


def _id(state: Enum) -> str:
    return state.name.lower()


def _words(one: Enum) -> str:
    return one.name.lower().replace("_", " ")


if __name__ == "__main__":
    print(page(), end="")
