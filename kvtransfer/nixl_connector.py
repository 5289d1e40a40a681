"""The connector over NIXL: the sender writes straight into reserved pages, the receiver verifies.

One agent per engine, on one thread, because a NIXL call can block for more than a second. A
one-sided writer cannot be fenced: see connector.py on what forget() can and cannot do here.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence

from effuse.kvtransfer.connector import Cause, HandoffRefused, Received, Refused
from effuse.kvtransfer.incoming import Incoming
from effuse.kvtransfer.layout import Fingerprint
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import (
    BoundaryState,
    MalformedMessage,
    ReceiverAddress,
    Reservation,
)
from effuse.kvtransfer.nixl_agent import NixlAgent
from effuse.kvtransfer.nixl_replies import NixlReplies
from effuse.kvtransfer.nixl_sender import NixlSender
from effuse.kvtransfer.outgoing import Origin
from effuse.kvtransfer.thread import ConnectorThread
from effuse.kvtransfer.wire import (
    Accepted,
    Begin,
    Finish,
    Landed,
    Pages,
    Rejected,
    ToReceiver,
    ToSender,
    attempt_of,
    decode_either,
    source_of,
)

IDLE_S = 0.1
EXPECTING_S = 0.001  # a notification wakes nobody: it must be asked for
LIVELY_S = 1.0  # a notification that was sent may need more polling here before it leaves
MOVING_S = 0.00005  # over TCP the receiver's polling is what moves the bytes


class NixlConnector(ConnectorThread):
    """A connector whose agent is named after the role and this life of the engine."""

    name = "nixl"

    def __init__(
        self,
        memory: PageMemory,
        incarnation: str,
        fingerprint: Fingerprint,
        *,
        role: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(f"nixl connector of {incarnation}")
        self._memory = memory
        self._origin = Origin(incarnation, fingerprint, memory.page_bytes)
        self._agent_name = f"{role}-{incarnation}"
        self._now = now
        self._incoming = Incoming(memory, incarnation, fingerprint)
        self._moving: set[str] = set()
        self._lively_until = 0.0
        self.num_malformed = 0

    def describe(self) -> ReceiverAddress:
        """This agent and its pool."""
        return self._address

    def expect(self, reservation: Reservation, writer: str | None) -> None:
        """Accepts this transfer from now on."""
        self._incoming.expect(reservation, writer)
        self.request(_nothing)  # wakes the thread, which polls faster while it expects something

    def forget(self, transfer_id: str) -> None:
        """Refuses this transfer's notifications from now on; its writes may still land."""
        self._incoming.forget(transfer_id)
        self.request(lambda: self._moving.discard(transfer_id))

    def push_pages(self, reservation: Reservation, source_pages: Sequence[int], first: int) -> None:
        """Queues pages of a reservation."""
        self.request(lambda: self._sender.push_pages(reservation, source_pages, first))

    def finish(self, reservation: Reservation, boundary: BoundaryState) -> None:
        """Queues the manifest behind the pages."""
        self.request(lambda: self._sender.finish(reservation, boundary))

    def cancel(self, transfer_id: str) -> None:
        """Stops a push; answered once what was posted is over."""
        self.request(lambda: self._sender.cancel(transfer_id))

    def open(self) -> None:
        """Creates the agent and registers the whole pool, once."""
        memory, device = self._memory, self._memory.device
        kind, device_id = ("VRAM", device.index or 0) if device.type == "cuda" else ("DRAM", 0)
        agent = NixlAgent(self._agent_name)
        agent.register(memory.address, memory.num_bytes, device_id, kind)
        own = agent.pages("", memory.address, memory.page_bytes, memory.num_pages, device_id, kind)
        self._agent = agent
        self._sender = NixlSender(agent, own, memory, self._origin, self.emit, self._now)
        self._replies = NixlReplies(agent)
        self._address = ReceiverAddress(
            connector=self.name,
            agent_name=agent.name,
            agent_metadata=agent.metadata(),
            pool_address=memory.address,
            device_id=device_id,
            memory_kind=kind,
        )

    def shut(self) -> None:
        """Ends what the sender runs; the agent goes with the process."""
        self._sender.close()

    def turn(self) -> float:
        """Hears notifications, moves writes on."""
        heard = self._agent.notifications()
        for peer, message in heard:
            self._hear(peer, message)
        if self._sender.turn() or heard:
            self._lively_until = self._now() + LIVELY_S
            return 0.0
        if self._sender.is_active or self._moving:
            return MOVING_S
        is_expecting = len(self._incoming) or len(self._sender) or self._now() < self._lively_until
        return EXPECTING_S if is_expecting else IDLE_S

    def wait(self, seconds: float) -> None:
        """Sleeps; a request ends the longer sleeps early."""
        if seconds < EXPECTING_S:
            time.sleep(seconds)
        else:
            select.select([self.request_signal], [], [], seconds)

    def _hear(self, peer: str, data: bytes) -> None:
        try:
            message = decode_either(data)
        except MalformedMessage:
            self.num_malformed += 1
            return
        if isinstance(message, ToSender):
            self._sender.hear(peer, message)
            return
        transfer_id = attempt_of(message).transfer_id
        was_expected = self._incoming.knows(transfer_id)
        try:
            self._obey(message)
        except HandoffRefused as refusal:
            self._moving.discard(transfer_id)
            if was_expected:
                self._incoming.forget(transfer_id)
                self.emit(Refused(transfer_id, refusal.cause, str(refusal)))
            rejected = Rejected(transfer_id, refusal.cause.value, str(refusal)[:512])
            self._replies.answer(source_of(message), rejected)

    def _obey(self, message: ToReceiver) -> None:
        match message:
            case Begin(attempt, source, destination, fingerprint, reply_to):
                self._incoming.introduce(attempt, source, destination, fingerprint)
                self._replies.learn(source, reply_to)
                self._moving.add(attempt.transfer_id)
            case Landed(attempt, source, first, count):
                self._incoming.landed(attempt, source, first, count)
            case Finish(manifest):
                self._moving.discard(manifest.transfer_id)
                self._incoming.accept(manifest, one_sided=True)
                self.emit(Received(manifest.transfer_id, manifest))
                accepted = Accepted(manifest.transfer_id)
                self._replies.answer(manifest.source_incarnation, accepted)
            case Pages():
                raise HandoffRefused(Cause.MALFORMED, "over NIXL, pages come without bytes")


def _nothing() -> None:
    """A request that only wakes."""
