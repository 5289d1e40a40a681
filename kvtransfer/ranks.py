"""The connectors of a worker's ranks as one: what all of them together say of a transfer.

Every rank has a pool with some KV heads of the same pages, and a connector of its own. A transfer
has arrived, was pushed, was cancelled or is fenced once that holds on every rank, and has failed
once it has on one.
"""

from __future__ import annotations

import functools
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from effuse.kvtransfer.connector import (
    ArrivalRefused,
    Arrived,
    Connector,
    ConnectorEvent,
    Pending,
    Promised,
    Pushed,
    PushFailed,
)
from effuse.kvtransfer.messages import BoundaryState, Reservation, Shard

_FAILURES = (ArrivalRefused, PushFailed)


@dataclass(slots=True)
class _Transfer:
    """What ranks have said of one transfer."""

    events: dict[type[ConnectorEvent], dict[int, ConnectorEvent]] = field(default_factory=dict)
    has_failed: bool = False


class RankEvents:
    """Merges the events of ranks. No I/O: whoever hears the ranks hands over what they say."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._transfers: dict[str, _Transfer] = {}

    def begin(self, transfer_id: str) -> None:
        """Listens to events of this transfer until it has ended on all ranks; others are late
        repetitions."""
        self._transfers.setdefault(transfer_id, _Transfer())

    def take(self, rank: int, event: ConnectorEvent) -> list[ConnectorEvent]:
        """What the ranks together say, now that one of them has said this; nothing if it waits
        for others. A rank that is asked twice may answer twice."""
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


class RankConnectors:
    """A Connector over those of all ranks, in the order of ranks, in one process."""

    def __init__(self, connectors: Sequence[Connector]) -> None:
        self.name = connectors[0].name
        self._ranks = connectors
        self._events = RankEvents(len(connectors))
        self._poll = select.epoll()

    def start(self) -> None:
        """Starts every rank."""
        for connector in self._ranks:
            connector.start()
            self._poll.register(connector.fileno(), select.EPOLLIN)

    def close(self) -> None:
        """Ends every rank."""
        for connector in self._ranks:
            connector.close()
        self._poll.close()

    def describe(self) -> tuple[Shard, ...]:
        """How peers reach each rank."""
        return tuple(shard for connector in self._ranks for shard in connector.describe())

    def expect(self, reservation: Reservation, writer: str | None) -> None:
        """Accepts this transfer on every rank from now on."""
        self._events.begin(reservation.transfer_id)
        self._all(lambda rank: rank.expect(reservation, writer))

    def forget(self, transfer_id: str) -> None:
        """Refuses this transfer from now on."""
        self._all(lambda rank: rank.forget(transfer_id))

    def fence(self, transfer_id: str, *, has_drained: bool) -> None:
        """The writing ranks of a forgotten transfer write no more."""
        self._all(lambda rank: rank.fence(transfer_id, has_drained=has_drained))

    def push_pages(
        self,
        reservation: Reservation,
        source_pages: Sequence[int],
        first: int,
        num_final: Pending[int] | None = None,
    ) -> None:
        """Pages of a reservation; every rank sends its heads of them."""
        self._events.begin(reservation.transfer_id)
        self._all(lambda rank: rank.push_pages(reservation, source_pages, first, num_final))

    def finish(self, reservation: Reservation, boundary: Pending[BoundaryState]) -> None:
        """No more pages follow."""
        self._events.begin(reservation.transfer_id)
        self._all(lambda rank: rank.finish(reservation, boundary))

    def cancel(self, transfer_id: str) -> None:
        """Stops a push on every rank."""
        self._events.begin(transfer_id)
        self._all(lambda rank: rank.cancel(transfer_id))

    def forget_life(self, incarnation: str) -> None:
        """A receiver's life is over."""
        self._all(lambda rank: rank.forget_life(incarnation))

    def poll(self) -> list[ConnectorEvent]:
        """Events of all ranks together since the last call. Raises ConnectorDied if the connector
        of any rank has ended."""
        return [
            merged
            for number, connector in enumerate(self._ranks)
            for event in connector.poll()
            for merged in self._events.take(number, event)
        ]

    def fileno(self) -> int:
        """Readable while a rank has something."""
        return self._poll.fileno()

    def _all(self, ask: Callable[[Connector], None]) -> None:
        for connector in self._ranks:
            ask(connector)
