"""All that one pool sends and receives over one transport: what the connector's thread runs.

Knows no thread itself: thread.py gives it one, loopback.py does without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from effuse.kvtransfer.connector import ConnectorEvent, Pending
from effuse.kvtransfer.digest import Digester
from effuse.kvtransfer.layout import Fingerprint, KVLayout
from effuse.kvtransfer.messages import BoundaryState, Reservation
from effuse.kvtransfer.push import Origin
from effuse.kvtransfer.pushes import Pushes
from effuse.kvtransfer.reception import Destination, Receptions
from effuse.kvtransfer.transport import (
    FromReceiver,
    FromWriter,
    Heard,
    Lost,
    Pace,
    Transport,
)

LIVELY_S = 1.0  # a message that was sent may need more looks here before it leaves
HOT_S = 0.0005  # after a movement the next one is due so soon that sleeping costs more


class Exchange:
    """Pushes and receptions of one pool; the methods are Connector's, events go to `emit`."""

    def __init__(
        self,
        transport: Transport,
        digester: Digester,
        layout: KVLayout,
        incarnation: str,
        fingerprint: Fingerprint,
        emit: Callable[[ConnectorEvent], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._now = now
        self._moved_at = -LIVELY_S
        origin = Origin(incarnation, fingerprint, layout)
        destination = Destination(incarnation, fingerprint, layout)
        self._pushes = Pushes(transport, digester, origin, emit, now)
        self._receptions = Receptions(transport, digester, destination, emit, now)

    def close(self) -> None:
        """Ends the transport."""
        self._transport.close()

    def expect(self, reservation: Reservation, writer: str | None) -> None:
        """Accepts this transfer from now on."""
        self._receptions.expect(reservation, writer)

    def forget(self, transfer_id: str) -> None:
        """Refuses this transfer from now on."""
        self._receptions.forget(transfer_id)

    def fence(self, transfer_id: str, *, has_drained: bool) -> None:
        """The writer of a forgotten transfer writes no more."""
        self._receptions.fence(transfer_id, has_drained=has_drained)

    def push_pages(
        self,
        reservation: Reservation,
        source_pages: Sequence[int],
        first: int,
        num_final: Pending[int] | None,
        at: float,
    ) -> None:
        """Pages of a reservation, to leave as their layers become final; asked for then."""
        self._pushes.push_pages(reservation, source_pages, first, num_final, at)

    def finish(self, reservation: Reservation, boundary: Pending[BoundaryState], at: float) -> None:
        """No more pages follow; said then."""
        self._pushes.finish(reservation, boundary, at)

    def cancel(self, transfer_id: str) -> None:
        """Stops a push."""
        self._pushes.cancel(transfer_id)

    def hear(self) -> list[Heard]:
        """What has been said since the last call."""
        return self._transport.hear()

    def turn(self, heard: Sequence[Heard]) -> bool:
        """Takes in what was heard and moves on what can be; True if anything did."""
        for item in heard:
            match item:
                case FromWriter():
                    self._receptions.take(item)
                case FromReceiver(peer, message):
                    self._pushes.hear(peer, message)
                case Lost(peer, refusal):
                    self._pushes.lose(peer, refusal)
        moved = self._pushes.turn() | self._receptions.turn() | bool(heard)
        if moved:
            self._moved_at = self._now()
        return moved

    @property
    def is_moving(self) -> bool:
        """Whether bytes or digests are under way, or the last word of a peer."""
        return self._pushes.is_moving or self._receptions.is_moving

    def wait(self, requests: int) -> None:
        """Sleeps for as long as nothing is likely to happen, or until `requests` is readable."""
        self._transport.wait(self._pace(), requests)

    def _pace(self) -> Pace:
        since = self._now() - self._moved_at
        if self.is_moving:
            return Pace.HOT if since < HOT_S else Pace.MOVING
        if self._receptions.has_begun:
            return Pace.BEGUN
        has_open = len(self._pushes) or len(self._receptions)
        return Pace.EXPECTING if has_open or since < LIVELY_S else Pace.IDLE
