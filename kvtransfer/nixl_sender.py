"""The sending half of the NIXL connector: one-sided writes into reserved pages.

NIXL has no fence: a released write still lands. So a write is only ever polled until it is over,
and a push counts as cancelled when none of its writes is left. Runs on the connector's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

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
from effuse.kvtransfer.messages import BoundaryState, Reservation, encode
from effuse.kvtransfer.nixl_agent import NixlAgent, PageList, Transfer
from effuse.kvtransfer.nixl_peers import NixlPeer, NixlPeers, attempt
from effuse.kvtransfer.outgoing import Chunk, Origin, Push, checked_push, split
from effuse.kvtransfer.wire import (
    Accepted,
    Begin,
    Finish,
    Landed,
    Placed,
    Rejected,
    ToReceiver,
    ToSender,
)

CHUNK_BYTES = 8 << 20
# xxhash keeps the interpreter lock for small pages, and a thread that wants it back waits 5 ms.
# Yielding once a megabyte hides digests behind copies (64 MB: 12.5 ms against 13.6 ms).
SMALL_PAGE_BYTES = 100_000
YIELD_BYTES = 1 << 20
YIELD_S = 20e-6
POSTED_CHUNKS = 4  # in flight at once, over transports that do not copy while posting


@dataclass(slots=True)
class Outgoing:
    """One push on its way."""

    push: Push
    peer: NixlPeer
    queue: deque[Chunk] = field(default_factory=deque)
    posted: list[Transfer] = field(default_factory=list)
    digesting: list[Future[None]] = field(default_factory=list)
    is_finished: bool = False  # the manifest was sent
    is_failed: bool = False
    is_cancelled: bool = False
    uses_peer: bool = True

    @property
    def is_quiet(self) -> bool:
        """Nothing of it touches memory, neither ours nor the peer's."""
        return not self.posted and not self.digesting


class NixlSender:
    """All pushes of one pool over NIXL."""

    def __init__(
        self,
        agent: NixlAgent,
        own_pages: PageList,
        memory: PageMemory,
        origin: Origin,
        emit: Callable[[ConnectorEvent], None],
        now: Callable[[], float],
    ) -> None:
        self._agent = agent
        self._own_pages = own_pages
        self._memory = memory
        self._origin = origin
        self._emit = emit
        self._now = now
        self._metadata = agent.metadata()
        self._chunk_pages = max(1, CHUNK_BYTES // memory.page_bytes)
        self._outgoing: dict[str, Outgoing] = {}
        self._peers = NixlPeers(agent)
        self._digests = ThreadPoolExecutor(1, f"digests of {origin.incarnation}")

    def close(self) -> None:
        """Ends the digest thread; writes that are in flight stay so."""
        self._digests.shutdown()

    def __len__(self) -> int:
        return len(self._outgoing)

    @property
    def is_active(self) -> bool:
        """Whether anything is on its way and wants to be polled often."""
        return any(
            o.queue or o.is_finished or not o.is_quiet
            for o in self._outgoing.values()
            if not o.is_failed
        )

    def push_pages(self, reservation: Reservation, source_pages: Sequence[int], first: int) -> None:
        """Queues pages of a reservation; their digests are taken while others fly."""
        try:
            outgoing = self._find(reservation)
            if outgoing.is_failed or not source_pages:
                return
            for chunk in split(outgoing.push.cover(source_pages, first), self._chunk_pages):
                outgoing.queue.append(chunk)
                digest = self._digests.submit(self._digest, outgoing.push, chunk)
                outgoing.digesting.append(digest)
        except HandoffRefused as refusal:
            self._fail(reservation.transfer_id, refusal)

    def finish(self, reservation: Reservation, boundary: BoundaryState) -> None:
        """Queues the manifest behind the pages."""
        try:
            self._find(reservation).push.boundary = boundary
        except HandoffRefused as refusal:
            self._fail(reservation.transfer_id, refusal)

    def cancel(self, transfer_id: str) -> None:
        """Posts nothing more of a push; Cancelled follows once what was posted is over."""
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None:
            self._emit(Cancelled(transfer_id))
            return
        outgoing.is_failed = outgoing.is_cancelled = True
        outgoing.queue.clear()

    def hear(self, peer: str, message: ToSender) -> None:
        """What a receiver answers; only the one that a push goes to may."""
        outgoing = self._outgoing.get(message.transfer_id)
        if outgoing is None or outgoing.is_failed or outgoing.peer.name != peer:
            return
        match message:
            case Accepted(transfer_id):
                if outgoing.is_finished:
                    self._end(transfer_id, outgoing)
            case Rejected(transfer_id, cause, text):
                self._fail(transfer_id, HandoffRefused(cause_of(cause), text))
            case Placed():
                pass  # said over ZMQ only

    def turn(self) -> bool:
        """Advances every push; True if anything moved."""
        progressed = False
        for outgoing in list(self._outgoing.values()):
            progressed |= self._advance(outgoing)
        return progressed

    def _find(self, reservation: Reservation) -> Outgoing:
        outgoing = self._outgoing.get(reservation.transfer_id)
        if outgoing is not None:
            return outgoing
        push = checked_push(reservation, self._origin, "nixl", self._now())
        outgoing = Outgoing(push, self._peers.find(push.reservation))
        self._say(
            outgoing,
            Begin(
                reservation.attempt,
                self._origin.incarnation,
                reservation.incarnation,
                self._origin.fingerprint,
                self._metadata,
            ),
        )
        outgoing.peer.num_pushes += 1
        self._outgoing[reservation.transfer_id] = outgoing
        return outgoing

    def _advance(self, outgoing: Outgoing) -> bool:
        before = len(outgoing.posted), len(outgoing.queue), len(outgoing.digesting)
        self._reap(outgoing)
        transfer_id = outgoing.push.reservation.transfer_id
        if outgoing.is_failed:
            self._end_failed(transfer_id, outgoing)
        elif self._now() > outgoing.push.deadline:
            lease_s = outgoing.push.reservation.lease_s
            text = f"the push did not end within its lease of {lease_s} s"
            self._fail(transfer_id, HandoffRefused(Cause.LEASE, text))
        else:
            self._move_on(outgoing)
        after = len(outgoing.posted), len(outgoing.queue), len(outgoing.digesting)
        return before != after

    def _digest(self, push: Push, chunk: Chunk) -> None:
        """Digests a chunk on the digest thread, yielding to the connector's thread now and then."""
        if self._memory.page_bytes > SMALL_PAGE_BYTES:
            push.digest(self._memory, chunk)
            return
        for piece in split(chunk, max(1, YIELD_BYTES // self._memory.page_bytes)):
            push.digest(self._memory, piece)
            time.sleep(YIELD_S)

    def _reap(self, outgoing: Outgoing) -> None:
        """Takes note of writes and digests that are over. A write that raised is over, too."""
        for transfer in list(outgoing.posted):
            try:
                over = attempt("a write failed", partial(self._release_if_done, transfer))
            except HandoffRefused as refusal:
                over = True
                self._lose(outgoing, refusal)
            if over:
                outgoing.posted.remove(transfer)
        for digest in [d for d in outgoing.digesting if d.done()]:
            digest.result()
            outgoing.digesting.remove(digest)

    def _release_if_done(self, transfer: Transfer) -> bool:
        is_done = self._agent.is_done(transfer)
        if is_done:
            self._agent.release(transfer)
        return is_done

    def _move_on(self, outgoing: Outgoing) -> None:
        try:
            while outgoing.queue and len(outgoing.posted) < POSTED_CHUNKS:
                self._post(outgoing, outgoing.queue.popleft())
            is_whole = not outgoing.queue and outgoing.is_quiet and not outgoing.is_finished
            if is_whole and outgoing.push.boundary is not None:
                self._conclude(outgoing)
        except HandoffRefused as refusal:
            self._lose(outgoing, refusal)

    def _post(self, outgoing: Outgoing, chunk: Chunk) -> None:
        targets = [page.page_id for page in chunk.targets]
        landed = Landed(
            outgoing.push.reservation.attempt,
            self._origin.incarnation,
            chunk.first,
            len(targets),
        )

        def post() -> None:
            write = self._agent.write(
                self._own_pages, chunk.source_pages, outgoing.peer.pages, targets
            )
            if self._agent.post(write, encode(landed)):
                self._agent.release(write)
            else:
                outgoing.posted.append(write)

        attempt("a write could not be posted", post)

    def _conclude(self, outgoing: Outgoing) -> None:
        outgoing.is_finished = True
        self._say(outgoing, Finish(outgoing.push.manifest(self._origin)))

    def _end(self, transfer_id: str, outgoing: Outgoing) -> None:
        push = outgoing.push
        self._leave_peer(outgoing)
        del self._outgoing[transfer_id]
        seconds = self._now() - push.started
        self._emit(Pushed(transfer_id, len(push.reservation.pages), push.num_bytes, seconds))

    def _say(self, outgoing: Outgoing, message: ToReceiver) -> None:
        def notify() -> None:
            self._agent.notify(outgoing.peer.name, encode(message))

        try:
            attempt("the peer could not be notified", notify)
        except HandoffRefused:
            self._peers.lose(outgoing.peer)
            raise

    def _lose(self, outgoing: Outgoing, refusal: HandoffRefused) -> None:
        """Fails a push; where NIXL itself failed, the peer must be added anew."""
        if refusal.cause is Cause.PEER:
            self._peers.lose(outgoing.peer)
        self._fail(outgoing.push.reservation.transfer_id, refusal)

    def _fail(self, transfer_id: str, refusal: HandoffRefused) -> None:
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is not None:
            if outgoing.is_failed:
                return
            outgoing.is_failed = True
            outgoing.queue.clear()
        self._emit(PushFailed(transfer_id, refusal.cause, str(refusal)))

    def _end_failed(self, transfer_id: str, outgoing: Outgoing) -> None:
        if not outgoing.is_quiet:
            return
        self._leave_peer(outgoing)
        if outgoing.is_cancelled:
            del self._outgoing[transfer_id]
            self._emit(Cancelled(transfer_id))

    def _leave_peer(self, outgoing: Outgoing) -> None:
        if outgoing.uses_peer:
            outgoing.uses_peer = False
            outgoing.peer.num_pushes -= 1
