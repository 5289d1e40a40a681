"""One connection of the ZMQ connector to a receiver: a socket, and what its monitor says of it."""

from __future__ import annotations

from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from effuse.kvtransfer.memory import PageMemory, consecutive_runs
from effuse.kvtransfer.messages import encode
from effuse.kvtransfer.outgoing import Chunk
from effuse.kvtransfer.wire import ToReceiver

HEARTBEAT_MS = 1000
SILENCE_MS = 5000
WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@dataclass(slots=True)
class InFlight:
    """A chunk whose answer has not come; the tracker says whether ZMQ still reads its pages."""

    num_bytes: int
    tracker: zmq.MessageTracker


class ZmqPeer:
    """A DEALER socket to one endpoint. Raises zmq.ZMQError for an endpoint that is none."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, now: float) -> None:
        self.endpoint = endpoint
        self.opened_at = now
        self.is_connected = False
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # what is in flight is bounded by the sender
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
        """Drops the connection and all that is queued."""
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

    def send_pages(self, header: ToReceiver, memory: PageMemory, chunk: Chunk) -> InFlight:
        """Sends pages straight from the pool, one frame for each run of consecutive ones."""
        frames = [
            memory.read_pages(first, count) for first, count in consecutive_runs(chunk.source_pages)
        ]
        tracker = self.socket.send_multipart(
            [encode(header), *frames], zmq.NOBLOCK, copy=False, track=True
        )
        assert tracker is not None
        return InFlight(sum(frame.nbytes for frame in frames), tracker)
