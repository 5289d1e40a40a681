"""The sending half of the ZMQ connector: pushes, their credits, deadlines and cancellation.

A push keeps a bounded number of bytes unanswered. Runs on the connector's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from effuse.kvtransfer.connector import (
    Cancelled,
    Cause,
    ConnectorEvent,
    HandoffRefused,
    Pushed,
    PushFailed,
    cause_of,
)
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import BoundaryState, MalformedMessage, Reservation
from effuse.kvtransfer.outgoing import Chunk, Origin, Push, checked_push, split
from effuse.kvtransfer.wire import (
    MAX_CHUNK_PAGES,
    Accepted,
    Begin,
    Finish,
    Pages,
    Placed,
    Rejected,
    decode_to_sender,
)
from effuse.kvtransfer.zmq_peer import InFlight, ZmqPeer

CHUNK_BYTES = 8 << 20
WINDOW_BYTES = 32 << 20
CONNECT_S = 5.0
DRAIN_S = 2.0  # for a receiver to answer what is in flight, before its connection is dropped


@dataclass(slots=True)
class Outgoing:
    """One push on its way."""

    push: Push
    peer: ZmqPeer
    queue: deque[Chunk] = field(default_factory=deque)
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    is_finished: bool = False  # the manifest was sent
    is_failed: bool = False
    cancelled_at: float | None = None

    @property
    def bytes_in_flight(self) -> int:
        """Bytes sent and not yet answered."""
        return sum(chunk.num_bytes for chunk in self.in_flight.values())


class ZmqSender:
    """All pushes of one pool over ZMQ."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        memory: PageMemory,
        origin: Origin,
        emit: Callable[[ConnectorEvent], None],
        now: Callable[[], float],
    ) -> None:
        self._context = context
        self._memory = memory
        self._origin = origin
        self._emit = emit
        self._now = now
        self._chunk_pages = min(MAX_CHUNK_PAGES, max(1, CHUNK_BYTES // memory.page_bytes))
        self._outgoing: dict[str, Outgoing] = {}
        self.peers: dict[str, ZmqPeer] = {}

    def close(self) -> None:
        """Drops every connection."""
        for peer in self.peers.values():
            peer.close()
        self.peers.clear()

    def push_pages(self, reservation: Reservation, source_pages: Sequence[int], first: int) -> None:
        """Queues pages of a reservation."""
        try:
            outgoing = self._find(reservation)
            if not outgoing.is_failed and source_pages:
                chunk = outgoing.push.cover(source_pages, first)
                outgoing.queue.extend(split(chunk, self._chunk_pages))
        except HandoffRefused as refusal:
            self._fail(reservation.transfer_id, refusal)

    def finish(self, reservation: Reservation, boundary: BoundaryState) -> None:
        """Queues the manifest behind the pages."""
        try:
            self._find(reservation).push.boundary = boundary
        except HandoffRefused as refusal:
            self._fail(reservation.transfer_id, refusal)

    def cancel(self, transfer_id: str) -> None:
        """Stops a push; Cancelled follows once nothing of it is in flight."""
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None:
            self._emit(Cancelled(transfer_id))
            return
        outgoing.is_failed = True
        outgoing.queue.clear()
        outgoing.cancelled_at = self._now()

    def turn(self) -> bool:
        """Advances every push; True if there was anything to do."""
        progressed = False
        for peer in list(self.peers.values()):
            for answer in peer.answers():
                progressed = True
                self._hear(peer, answer)
            self._watch(peer)
        for outgoing in list(self._outgoing.values()):
            progressed |= self._advance(outgoing)
        return progressed

    def is_waiting_for_memory(self) -> bool:
        """Whether a dropped connection may still read pages, which no socket will tell of."""
        return any(
            o.in_flight and o.peer.endpoint not in self.peers for o in self._outgoing.values()
        )

    def _find(self, reservation: Reservation) -> Outgoing:
        outgoing = self._outgoing.get(reservation.transfer_id)
        if outgoing is None:
            push = checked_push(reservation, self._origin, "zmq", self._now())
            outgoing = Outgoing(push, self._peer(reservation.address.endpoint))
            self._outgoing[reservation.transfer_id] = outgoing
            outgoing.peer.say(
                Begin(
                    reservation.attempt,
                    self._origin.incarnation,
                    reservation.incarnation,
                    self._origin.fingerprint,
                )
            )
        return outgoing

    def _peer(self, endpoint: str) -> ZmqPeer:
        peer = self.peers.get(endpoint)
        if peer is None:
            if not endpoint.startswith("tcp://"):
                raise HandoffRefused(Cause.PEER, f"endpoint {endpoint!r} is not tcp://host:port")
            try:
                peer = ZmqPeer(self._context, endpoint, self._now())
            except zmq.ZMQError as error:
                raise HandoffRefused(Cause.PEER, f"endpoint {endpoint!r}: {error}") from error
            self.peers[endpoint] = peer
        return peer

    def _advance(self, outgoing: Outgoing) -> bool:
        transfer_id = outgoing.push.reservation.transfer_id
        if outgoing.is_failed:
            return self._drain(outgoing)
        if self._now() > outgoing.push.deadline:
            lease_s = outgoing.push.reservation.lease_s
            self._fail(
                transfer_id,
                HandoffRefused(
                    Cause.LEASE, f"the push did not end within its lease of {lease_s} s"
                ),
            )
            return True
        sent = False
        while outgoing.queue and outgoing.bytes_in_flight < WINDOW_BYTES:
            self._send(outgoing, outgoing.queue.popleft())
            sent = True
        if outgoing.push.boundary is not None and not outgoing.queue and not outgoing.is_finished:
            self._conclude(outgoing)
            sent = True
        return sent

    def _send(self, outgoing: Outgoing, chunk: Chunk) -> None:
        reservation = outgoing.push.reservation
        header = Pages(
            reservation.attempt,
            self._origin.incarnation,
            reservation.incarnation,
            chunk.first,
            chunk.targets,
        )
        outgoing.in_flight[chunk.first] = outgoing.peer.send_pages(header, self._memory, chunk)
        outgoing.push.digest(self._memory, chunk)

    def _conclude(self, outgoing: Outgoing) -> None:
        outgoing.is_finished = True
        try:
            outgoing.peer.say(Finish(outgoing.push.manifest(self._origin)))
        except HandoffRefused as refusal:
            self._fail(outgoing.push.reservation.transfer_id, refusal)

    def _hear(self, peer: ZmqPeer, answer: bytes) -> None:
        try:
            message = decode_to_sender(answer)
        except MalformedMessage as error:
            self._drop(peer, str(error))
            return
        outgoing = self._outgoing.get(message.transfer_id)
        if outgoing is None or outgoing.peer is not peer:
            return
        match message:
            case Placed(_, first):
                outgoing.in_flight.pop(first, None)
            case Accepted(transfer_id):
                if outgoing.is_finished:  # nobody can have accepted what was not claimed yet
                    self._end(transfer_id, outgoing)
            case Rejected(transfer_id, cause, text, first):
                if first is not None:
                    outgoing.in_flight.pop(first, None)
                self._fail(transfer_id, HandoffRefused(cause_of(cause), text))

    def _end(self, transfer_id: str, outgoing: Outgoing) -> None:
        outgoing.in_flight.clear()
        if outgoing.is_failed:
            return  # cancelled or expired meanwhile: draining says the last word
        del self._outgoing[transfer_id]
        push = outgoing.push
        seconds = self._now() - push.started
        self._emit(Pushed(transfer_id, len(push.reservation.pages), push.num_bytes, seconds))

    def _fail(self, transfer_id: str, refusal: HandoffRefused) -> None:
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is not None:
            if outgoing.is_failed:
                return
            outgoing.is_failed = True
            outgoing.queue.clear()
        self._emit(PushFailed(transfer_id, refusal.cause, str(refusal)))

    def _drain(self, outgoing: Outgoing) -> bool:
        """Waits for answers; then for ZMQ itself, once the connection has been dropped."""
        if outgoing.cancelled_at is None:
            return False
        if outgoing.in_flight and self._now() - outgoing.cancelled_at > DRAIN_S:
            self._drop(outgoing.peer, f"did not answer within {DRAIN_S} s")
        if self.peers.get(outgoing.peer.endpoint) is not outgoing.peer:
            outgoing.in_flight = {f: c for f, c in outgoing.in_flight.items() if not c.tracker.done}
        if outgoing.in_flight:
            return False
        transfer_id = outgoing.push.reservation.transfer_id
        del self._outgoing[transfer_id]
        self._emit(Cancelled(transfer_id))
        return True

    def _watch(self, peer: ZmqPeer) -> None:
        if self.peers.get(peer.endpoint) is not peer:
            return  # dropped for what it said
        if peer.is_lost():
            self._drop(peer, "closed the connection")
        elif not peer.is_connected and self._now() - peer.opened_at > CONNECT_S:
            self._drop(peer, f"cannot be reached within {CONNECT_S} s")

    def _drop(self, peer: ZmqPeer, reason: str) -> None:
        if self.peers.get(peer.endpoint) is not peer:
            return
        del self.peers[peer.endpoint]
        peer.close()
        refusal = HandoffRefused(Cause.PEER, f"the receiver at {peer.endpoint} {reason}")
        for transfer_id, outgoing in list(self._outgoing.items()):
            if outgoing.peer is peer:
                self._fail(transfer_id, refusal)
