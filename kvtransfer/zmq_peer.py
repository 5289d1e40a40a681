"""One connection of the ZMQ transport to a receiver: a socket, and what its monitor says of it."""

from __future__ import annotations

from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from effuse.kvtransfer.messages import encode
from effuse.kvtransfer.wire import ToReceiver
from effuse.kvtransfer.zmq_curve import CurveKeys

HEARTBEAT_MS = 1000
SILENCE_MS = 5000
WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class ZmqPeer:
    """A DEALER socket to one endpoint. Raises zmq.ZMQError for an endpoint that is none."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        now: float,
        keys: CurveKeys | None = None,
    ) -> None:
        """keys: what the receiver must have, too; None asks any, in plain text."""
        self.endpoint = endpoint
        self.opened_at = now
        self.is_connected = False
        self.is_open = True
        self.socket = context.socket(zmq.DEALER)
        if keys is not None:
            keys.ask(self.socket)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # what is under way is bounded by the sender
        self.socket.setsockopt(zmq.MAXMSGSIZE, 1 << 16)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        self.monitor = self.socket.get_monitor_socket(WATCHED)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        """Drops the connection and all that is queued; may be called twice."""
        if self.is_open:
            self.is_open = False
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=0)

    def is_lost(self) -> bool:
        """Reads the monitor; True once the connection that was up went down."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event != zmq.EVENT_CONNECTED:
                return True
            self.is_connected = True
        return False

    def answers(self) -> list[bytes]:
        """What the receiver has said since the last call."""
        said: list[bytes] = []
        while True:
            try:
                said.append(self.socket.recv_multipart(zmq.NOBLOCK)[-1])
            except zmq.Again:
                return said

    def say(self, message: ToReceiver) -> None:
        """Sends a message without payload."""
        self.socket.send(encode(message), zmq.NOBLOCK)

    def send(self, header: ToReceiver, frames: Sequence[memoryview]) -> zmq.MessageTracker:
        """Sends frames straight from their memory, which is read until the tracker is done."""
        tracker = self.socket.send_multipart(
            [encode(header), *frames], zmq.NOBLOCK, copy=False, track=True
        )
        assert tracker is not None
        return tracker
