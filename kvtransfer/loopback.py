"""The connector within one process: a complete twin of the others without a wire or a thread.

Bytes move when push_pages is called, so tests are deterministic; `Hub.pause` holds them back.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence

from effuse.kvtransfer.connector import (
    Cancelled,
    Cause,
    ConnectorEvent,
    HandoffRefused,
    Pushed,
    PushFailed,
    Received,
    Refused,
)
from effuse.kvtransfer.incoming import Incoming
from effuse.kvtransfer.layout import Fingerprint
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import BoundaryState, Manifest, ReceiverAddress, Reservation
from effuse.kvtransfer.outgoing import Chunk, Origin, Push, checked_push


class Hub:
    """Where the loopback connectors of one process find each other."""

    def __init__(self) -> None:
        self.members: dict[str, LoopbackConnector] = {}
        self._paused: deque[Callable[[], None]] | None = None

    def pause(self) -> None:
        """Holds everything back that is pushed from now on."""
        self._paused = deque()

    def resume(self) -> None:
        """Delivers what was held back, in order."""
        held, self._paused = self._paused or deque(), None
        for deliver in held:
            deliver()

    def deliver(self, action: Callable[[], None]) -> None:
        """Runs an action now, or once resumed."""
        if self._paused is None:
            action()
        else:
            self._paused.append(action)


class LoopbackConnector:
    """A connector whose peers live in the same process and the same hub."""

    name = "loopback"

    def __init__(
        self,
        hub: Hub,
        memory: PageMemory,
        incarnation: str,
        fingerprint: Fingerprint,
        now: Callable[[], float],
    ) -> None:
        self._hub = hub
        self._memory = memory
        self._now = now
        self._origin = Origin(incarnation, fingerprint, memory.page_bytes)
        self._events: deque[ConnectorEvent] = deque()
        self._pushes: dict[str, Push] = {}
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._incoming = Incoming(memory, incarnation, fingerprint)

    def start(self) -> None:
        """Joins the hub."""
        self._hub.members[self._origin.incarnation] = self

    def close(self) -> None:
        """Leaves the hub."""
        if self._hub.members.pop(self._origin.incarnation, None) is not None:
            os.close(self._signal)

    def describe(self) -> ReceiverAddress:
        """This pool's name in the hub."""
        return ReceiverAddress(connector=self.name, endpoint=self._origin.incarnation)

    def expect(self, reservation: Reservation, writer: str | None) -> None:
        """Accepts this transfer from now on."""
        self._incoming.expect(reservation, writer)

    def forget(self, transfer_id: str) -> None:
        """Refuses this transfer from now on."""
        self._incoming.forget(transfer_id)

    def push_pages(self, reservation: Reservation, source_pages: Sequence[int], first: int) -> None:
        """Copies the pages into the peer's pool."""
        push = self._push(reservation)
        if push is None:
            return
        try:
            chunk = push.cover(source_pages, first)
        except HandoffRefused as refusal:
            self._fail(reservation.transfer_id, refusal)
            return
        push.digest(self._memory, chunk)
        self._hub.deliver(lambda: self._deliver(push, chunk))

    def finish(self, reservation: Reservation, boundary: BoundaryState) -> None:
        """Delivers the manifest after the pages."""
        push = self._push(reservation)
        if push is not None:
            push.boundary = boundary
            self._hub.deliver(lambda: self._conclude(push))

    def cancel(self, transfer_id: str) -> None:
        """Stops a push; what is held back of it will not be delivered."""
        self._pushes.pop(transfer_id, None)
        self._emit(Cancelled(transfer_id))

    def poll(self) -> list[ConnectorEvent]:
        """Events since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._signal)
        events = list(self._events)
        self._events.clear()
        return events

    def fileno(self) -> int:
        """Readable while poll() has something."""
        return self._signal

    def receive(self, transfer_id: str, take: Callable[[Incoming], None]) -> None:
        """Takes what a peer hands over. Where that is refused, tells the engine and raises."""
        was_expected = self._incoming.knows(transfer_id)
        try:
            take(self._incoming)
        except HandoffRefused as refusal:
            if was_expected:
                self._incoming.forget(transfer_id)
                self._emit(Refused(transfer_id, refusal.cause, str(refusal)))
            raise

    def received(self, manifest: Manifest) -> None:
        """Tells the engine that a transfer is complete."""
        self._emit(Received(manifest.transfer_id, manifest))

    def _push(self, reservation: Reservation) -> Push | None:
        push = self._pushes.get(reservation.transfer_id)
        if push is None:
            try:
                push = checked_push(reservation, self._origin, self.name, self._now())
            except HandoffRefused as refusal:
                self._emit(PushFailed(reservation.transfer_id, refusal.cause, str(refusal)))
                return None
            self._pushes[reservation.transfer_id] = push
        return push

    def _deliver(self, push: Push, chunk: Chunk) -> None:
        attempt = push.reservation.attempt
        source, destination = self._origin.incarnation, push.reservation.incarnation
        payload = [self._memory.read_pages(page_id) for page_id in chunk.source_pages]

        def take(incoming: Incoming) -> None:
            incoming.introduce(attempt, source, destination, self._origin.fingerprint)
            incoming.place(attempt, source, destination, chunk.first, chunk.targets, payload)

        self._hand(push, take)

    def _conclude(self, push: Push) -> None:
        transfer_id, num_pages = push.reservation.transfer_id, len(push.reservation.pages)
        try:
            manifest = push.manifest(self._origin)
        except HandoffRefused as refusal:
            self._fail(transfer_id, refusal)
            return

        def take(incoming: Incoming) -> None:
            incoming.accept(manifest, one_sided=False)
            self._peer(push.reservation).received(manifest)

        if self._hand(push, take):
            del self._pushes[transfer_id]
            seconds = self._now() - push.started
            self._emit(Pushed(transfer_id, num_pages, push.num_bytes, seconds))

    def _hand(self, push: Push, take: Callable[[Incoming], None]) -> bool:
        """Has the peer take something, unless the push is over; False where it was refused."""
        transfer_id = push.reservation.transfer_id
        if self._pushes.get(transfer_id) is not push:
            return False
        try:
            self._peer(push.reservation).receive(transfer_id, take)
        except HandoffRefused as refusal:
            self._fail(transfer_id, refusal)
            return False
        return True

    def _peer(self, reservation: Reservation) -> LoopbackConnector:
        peer = self._hub.members.get(reservation.address.endpoint)
        if peer is None:
            raise HandoffRefused(Cause.PEER, f"no peer at {reservation.address.endpoint}")
        return peer

    def _fail(self, transfer_id: str, refusal: HandoffRefused) -> None:
        if self._pushes.pop(transfer_id, None) is not None:
            self._emit(PushFailed(transfer_id, refusal.cause, str(refusal)))

    def _emit(self, event: ConnectorEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._signal, 1)
