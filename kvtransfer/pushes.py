"""The sending half of every connector: the messages of each push, their times, and its end.

Layers leave as they become final, digests are computed beside them, and the manifest follows when
everything has arrived. The transport moves the bytes. Runs on the connector's thread.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from effuse.kvtransfer.connector import (
    UNKNOWN,
    Cause,
    HandoffRefused,
    Pending,
    PushCancelled,
    Pushed,
    PushFailed,
    cause_of,
)
from effuse.kvtransfer.digest import PageDigests, finish_of
from effuse.kvtransfer.messages import (
    Accepted,
    BoundaryState,
    Placed,
    Rejected,
    Reservation,
    ToSender,
)
from effuse.kvtransfer.push import Push, Stage, check_push, parts_of
from effuse.kvtransfer.transport import Chunk, ConnectorParts, Delivery, Peer


@dataclass(eq=False)
class Pushes(ConnectorParts):
    """All transfers that leave one pool.

    A transfer has a push to each receiving rank that this rank serves. It is over once all of them
    are, and fails with the first that does.
    """

    _transfers: dict[str, list[Push]] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self._transfers)

    @property
    def is_moving(self) -> bool:
        """Whether any of them advances by itself, or waits for its receiver's last message."""
        return any(push.is_moving for push in self._all())

    @property
    def awaits_forward(self) -> bool:
        """Whether any of them waits for a forward."""
        return any(push.awaits_forward for push in self._all())

    def _all(self) -> Iterator[Push]:
        return chain.from_iterable(self._transfers.values())

    # Requests of the engine.

    def push_pages(
        self,
        reservation: Reservation,
        source_pages: tuple[int, ...],
        first: int,
        num_final: Pending[int] | None,
        at: float,
    ) -> None:
        """Pages of a reservation, which leave as their layers become final; requested then."""
        try:
            is_new = reservation.transfer_id not in self._transfers
            for push in self._find(reservation, at):
                if push.stage is Stage.FAILED:
                    continue
                if source_pages:
                    push.cover(source_pages, first, num_final)
                elif not is_new:  # a new introduction restarts the lease at the other end
                    push.promised_at = at
                    self._transport.send(push.peer, push.begin())
        except HandoffRefused as refusal:
            self._fail(reservation.transfer_id, refusal)

    def finish(self, reservation: Reservation, boundary: Pending[BoundaryState], at: float) -> None:
        """No more pages follow; requested then."""
        try:
            pushes = self._find(reservation, at)
            for push in pushes:
                push.boundary, push.final_at = boundary, at
            if not pushes:  # other ranks have the same heads, and send them
                self._conclude(reservation)
        except HandoffRefused as refusal:
            self._fail(reservation.transfer_id, refusal)

    def cancel(self, transfer_id: str) -> None:
        """Sends nothing more of a transfer; PushCancelled follows once sent parts have ended."""
        pushes = self._transfers.get(transfer_id)
        if not pushes:
            self._transfers.pop(transfer_id, None)
            self._emit(PushCancelled(transfer_id))
            return
        for push in pushes:
            push.stop()
            if push.cancelled_at is None:
                push.cancelled_at = self._now()

    # Messages of receivers and of the transport.

    def take(self, peer: Peer, message: ToSender) -> None:
        """An answer of a receiver; only a push's own receiver may send it."""
        for one in self._all():
            if one.peer is peer:
                one.answered_at = self._now()
        pushes = self._transfers.get(message.transfer_id, [])
        push = next((one for one in pushes if one.peer is peer), None)
        if push is None:
            return
        match message:
            case Accepted() if push.stage is Stage.FINISHED:  # its manifest was sent
                push.stage = Stage.ACCEPTED
            case Rejected(transfer_id, cause, text):
                self._fail(transfer_id, HandoffRefused(cause_of(cause), text))
            case Accepted() | Placed():
                pass  # the latter by the transport

    def lose(self, peer: Peer, refusal: HandoffRefused) -> None:
        """A receiver is unreachable: fails its pushes that were not accepted."""
        for push in list(self._all()):
            if push.peer is peer and push.stage in (Stage.PUSHING, Stage.FINISHED):
                self._fail(push.transfer_id, refusal)

    def turn(self) -> bool:
        """Advances every push; True if anything moved."""
        moved = False
        for pushes in list(self._transfers.values()):
            for push in pushes:
                moved |= push.stage is not Stage.OVER and self._advance(push)
            if pushes and all(push.stage is Stage.OVER for push in pushes):
                self._conclude(pushes[0].reservation)
                moved = True
        return moved

    # One push.

    def _find(self, reservation: Reservation, at: float) -> list[Push]:
        """The pushes of a transfer; new ones introduce themselves."""
        pushes = self._transfers.get(reservation.transfer_id)
        if pushes is not None:
            return pushes
        checked = check_push(reservation, self._own, self._transport.name)
        layout, seed = self._own.layout, checked.digest_seed
        self._transfers[reservation.transfer_id] = pushes = []
        try:
            for shard, part in parts_of(checked, layout):
                peer = self._transport.reach(checked, shard)
                count = len(checked.moved(shard.part, part))
                digests = PageDigests(self._digester, layout, part, count, seed)
                pushes.append(Push(checked, shard, part, peer, self._own, digests, at))
        except HandoffRefused:
            del self._transfers[reservation.transfer_id]
            for push in pushes:
                self._transport.leave(push.peer)
            raise
        for push in pushes:
            self._transport.send(push.peer, push.begin())
        return pushes

    def _advance(self, push: Push) -> bool:
        moved = self._reap(push)
        if push.stage is Stage.FAILED:
            return self._drain(push) or moved
        if push.stage is Stage.ACCEPTED and push.is_quiet:
            push.stage = Stage.OVER
            return True
        if self._now() > push.deadline:
            text = f"the push did not end within its lease of {push.reservation.lease_s:g} s"
            self._fail(push.transfer_id, HandoffRefused(Cause.LEASE, text))
            return True
        try:
            return self._move_on(push) or moved
        except HandoffRefused as refusal:
            self._fail(push.transfer_id, refusal)
            return True

    def _reap(self, push: Push) -> bool:
        """Notes deliveries and digests that have ended."""
        before = len(push.deliveries), len(push.digests)
        push.deliveries = [pair for pair in push.deliveries if not self._is_over(push, pair[0])]
        push.digests.poll()
        return before != (len(push.deliveries), len(push.digests))

    def _is_over(self, push: Push, delivery: Delivery) -> bool:
        try:
            return delivery.is_over()
        except HandoffRefused as refusal:
            self._fail(push.transfer_id, refusal)
            return True

    def _move_on(self, push: Push) -> bool:
        """Sends final pages, and after them the manifest. True if it sent anything."""
        # First: the boundary exists after the pages, so all of these are looked at below.
        if push.boundary_state is None and push.boundary is not None:
            push.boundary_state = push.boundary()
            if push.boundary_state is None:
                push.final_at = self._now()
        boundary = push.boundary_state
        moved = push.queue_final(self._transport.chunk_bytes)
        while push.queue and push.bytes_under_way < self._transport.window_bytes:
            if not self._deliver(push, push.queue[0]):
                break
            del push.queue[0]
            moved = True
        if boundary is None or push.stage is not Stage.PUSHING:
            return moved
        if push.batches or push.queue or len(push.digests):
            return moved
        manifest = push.account(boundary)  # while bytes are on their way
        if push.deliveries:
            return moved
        push.stage = Stage.FINISHED
        elapsed_us = round(push.elapsed_s(self._now()) * 1e6)
        self._transport.send(push.peer, finish_of(manifest, elapsed_us))
        return True

    def _deliver(self, push: Push, chunk: Chunk) -> bool:
        """Sends a chunk; False if there is no room for it now."""
        now, is_first = self._now(), self._transport.copies_in_deliver
        digest = partial(push.digests.begin, chunk.first, chunk.source_pages, chunk.groups)
        if is_first:  # beside the copy, or so that it finds the bytes in a cache
            digest()
        delivery = self._transport.deliver(push.peer, push.header(chunk), chunk)
        if delivery is None:
            assert not is_first, "such a transport always has room"
            return False
        push.left_at = now if push.left_at is None else push.left_at
        num_bytes = len(chunk.targets) * len(chunk.groups) * push.group_bytes
        push.deliveries.append((delivery, num_bytes))
        if not is_first:  # digests are only needed once the bytes have arrived
            digest()
        return True

    # Its end.

    def _conclude(self, reservation: Reservation) -> None:
        now, pushes = self._now(), self._transfers.pop(reservation.transfer_id)
        left = [push.left_at for push in pushes if push.left_at is not None]
        routes = [self._transport.route(push.peer) for push in pushes]
        for push in pushes:
            self._transport.leave(push.peer)
        pushed = Pushed(
            reservation.transfer_id,
            reservation.num_source_pages,
            sum(push.num_bytes for push in pushes),
            max((push.elapsed_s(now) for push in pushes), default=0.0),
            routes[0] if routes else UNKNOWN,
            now - min(left, default=now),
        )
        self._emit(pushed)

    def _fail(self, transfer_id: str, refusal: HandoffRefused) -> None:
        pushes = self._transfers.get(transfer_id, [])
        if any(push.stage is Stage.FAILED for push in pushes):
            return
        for push in pushes:
            push.stop()
        self._emit(PushFailed(transfer_id, refusal.cause, str(refusal)))

    def _drain(self, push: Push) -> bool:
        """Waits for sent parts; a push that was not cancelled yet also waits for that."""
        if push.cancelled_at is None:
            return False
        # A slow link alone does not justify closing it for the others; but not beyond the lease.
        silent_since = max(push.cancelled_at, min(push.answered_at, push.deadline))
        if push.deliveries and self._now() - silent_since > self._transport.drain_s:
            self._transport.drop(push.peer)
            self._reap(push)
            text = "the receiver did not answer, and its connection was closed"
            self.lose(push.peer, HandoffRefused(Cause.PEER, text))  # others wait for it in vain
        pushes = self._transfers.get(push.transfer_id, [])
        if not pushes or not all(one.is_quiet for one in pushes):
            return False
        del self._transfers[push.transfer_id]
        for one in pushes:
            self._transport.leave(one.peer)
        self._emit(PushCancelled(push.transfer_id))
        return True
