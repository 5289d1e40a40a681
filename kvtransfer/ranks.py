"""Merges the events of a worker's ranks into the events of one connector.

Every rank has a pool with some KV heads of the same pages, and a connector of its own. A transfer
has arrived, was pushed, was cancelled or is fenced once that holds on every rank, and has failed
once it has on one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from effuse.kvtransfer.connector import (
    ArrivalRefused,
    Arrived,
    ConnectorEvent,
    Promised,
    Pushed,
    PushFailed,
)

_FAILURES = (ArrivalRefused, PushFailed)


@dataclass(slots=True)
class _Transfer:
    """The events of one transfer so far, by kind and rank."""

    events: dict[type[ConnectorEvent], dict[int, ConnectorEvent]] = field(default_factory=dict)
    has_failed: bool = False


class RankEvents:
    """Merges the events of ranks, which its caller receives. Does no I/O."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._transfers: dict[str, _Transfer] = {}

    def begin(self, transfer_id: str) -> None:
        """Accepts events of this transfer until it has ended on all ranks; ignores later ones."""
        self._transfers.setdefault(transfer_id, _Transfer())

    def take(self, rank: int, event: ConnectorEvent) -> list[ConnectorEvent]:
        """The merged event after this one; none while other ranks are awaited. A rank may send the
        same event twice."""
        transfer = self._transfers.get(event.transfer_id)
        if transfer is None:
            return []
        if isinstance(event, Promised):
            return [event]
        if isinstance(event, _FAILURES):
            is_first, transfer.has_failed = not transfer.has_failed, True
            return [event] if is_first else []
        said = transfer.events.setdefault(type(event), {})
        said.setdefault(rank, event)
        if len(said) < self._num_ranks:
            return []
        del self._transfers[event.transfer_id]  # each of these events ends it
        return [_merged([said[one] for one in range(self._num_ranks)])]


def _merged(events: Sequence[ConnectorEvent]) -> ConnectorEvent:
    """One event of all ranks, in their order."""
    first = events[0]
    match first:
        case Arrived(transfer_id, manifest):
            arrived = [event for event in events if isinstance(event, Arrived)]
            seconds = max(event.seconds for event in arrived)
            num_bytes = sum(event.num_bytes for event in arrived)
            return Arrived(transfer_id, manifest, seconds, num_bytes)
        case Pushed():
            return functools.reduce(_both, (event for event in events if isinstance(event, Pushed)))
        case _:
            return first


def _both(one: Pushed, other: Pushed) -> Pushed:
    return Pushed(
        one.transfer_id,
        one.pages,
        one.num_bytes + other.num_bytes,
        max(one.seconds, other.seconds),
        one.route if one.num_bytes else other.route,
        max(one.moved_s, other.moved_s),
    )
