"""The connector over ZMQ: the receiver places the bytes, after it has checked them.

The safe fallback, and what machines without RDMA use. Composition and the thread's loop only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import zmq

from effuse.kvtransfer.incoming import Incoming
from effuse.kvtransfer.layout import Fingerprint
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import BoundaryState, ReceiverAddress, Reservation
from effuse.kvtransfer.outgoing import Origin
from effuse.kvtransfer.thread import ConnectorThread
from effuse.kvtransfer.zmq_receiver import ZmqReceiver
from effuse.kvtransfer.zmq_sender import CHUNK_BYTES, ZmqSender

IDLE_S = 0.1  # between looks at deadlines; sockets wake the thread sooner
MEMORY_S = 0.005


class ZmqConnector(ConnectorThread):
    """A connector that listens on `host`, reached by peers as `advertised_host`."""

    name = "zmq"

    def __init__(
        self,
        memory: PageMemory,
        incarnation: str,
        fingerprint: Fingerprint,
        *,
        host: str = "127.0.0.1",
        advertised_host: str | None = None,
        port: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(f"zmq connector of {incarnation}")
        self._memory = memory
        self._origin = Origin(incarnation, fingerprint, memory.page_bytes)
        self._bind = f"tcp://{host}:{port or '*'}"
        self._advertised = advertised_host or host
        self._now = now
        self._incoming = Incoming(memory, incarnation, fingerprint)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._endpoint = ""

    def describe(self) -> ReceiverAddress:
        """Where this pool listens."""
        return ReceiverAddress(connector=self.name, endpoint=self._endpoint)

    def expect(self, reservation: Reservation, writer: str | None) -> None:
        """Accepts this transfer from now on."""
        self._incoming.expect(reservation, writer)

    def forget(self, transfer_id: str) -> None:
        """Refuses this transfer from now on; nothing more of it is placed."""
        self._incoming.forget(transfer_id)

    def push_pages(self, reservation: Reservation, source_pages: Sequence[int], first: int) -> None:
        """Queues pages of a reservation."""
        self.request(lambda: self._sender.push_pages(reservation, source_pages, first))

    def finish(self, reservation: Reservation, boundary: BoundaryState) -> None:
        """Queues the manifest behind the pages."""
        self.request(lambda: self._sender.finish(reservation, boundary))

    def cancel(self, transfer_id: str) -> None:
        """Stops a push."""
        self.request(lambda: self._sender.cancel(transfer_id))

    def open(self) -> None:
        """Binds the receiving socket."""
        frame_bytes = max(CHUNK_BYTES, self._memory.page_bytes)
        self._receiver = ZmqReceiver(
            self._context, self._bind, frame_bytes, self._incoming, self.emit
        )
        self._sender = ZmqSender(self._context, self._memory, self._origin, self.emit, self._now)
        self._endpoint = f"tcp://{self._advertised}:{self._receiver.port}"

    def shut(self) -> None:
        """Closes every socket."""
        self._sender.close()
        self._receiver.close()
        self._context.term()

    def turn(self) -> float:
        """Receives, sends, and looks at deadlines."""
        busy = self._receiver.turn()
        busy |= self._sender.turn()
        if busy:
            return 0.0
        return MEMORY_S if self._sender.is_waiting_for_memory() else IDLE_S

    def wait(self, seconds: float) -> None:
        """Sleeps until a socket or the engine has something."""
        if not seconds:
            return
        poller = zmq.Poller()
        poller.register(self.request_signal, zmq.POLLIN)
        poller.register(self._receiver.socket, zmq.POLLIN)
        for peer in self._sender.peers.values():
            poller.register(peer.socket, zmq.POLLIN)
            poller.register(peer.monitor, zmq.POLLIN)
        poller.poll(int(seconds * 1000))
