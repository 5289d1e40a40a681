"""The receiving socket of the ZMQ connector: checks each message first, then places its bytes.

Two-sided, so nothing of a forgotten transfer is ever placed. Runs on the connector's thread.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from effuse.kvtransfer.connector import Cause, ConnectorEvent, HandoffRefused, Received, Refused
from effuse.kvtransfer.incoming import Incoming
from effuse.kvtransfer.messages import MAX_MANIFEST_BYTES, MalformedMessage, encode
from effuse.kvtransfer.wire import (
    Accepted,
    Begin,
    Finish,
    Landed,
    Pages,
    Placed,
    Rejected,
    ToReceiver,
    ToSender,
    attempt_of,
    decode_to_receiver,
)

QUEUED_MESSAGES = 16  # per peer, beyond which TCP holds it back
MESSAGES_A_TURN = 32


class ZmqReceiver:
    """A ROUTER socket that fills expected pages and answers every message."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        bind: str,
        max_frame_bytes: int,
        incoming: Incoming,
        emit: Callable[[ConnectorEvent], None],
    ) -> None:
        self._incoming = incoming
        self._emit = emit
        self.num_malformed = 0
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max(max_frame_bytes, MAX_MANIFEST_BYTES))
        self.socket.bind(bind)
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def close(self) -> None:
        """Closes the socket; what is queued is dropped."""
        self.socket.close(linger=0)

    def turn(self) -> bool:
        """Takes what has come, within a bound; True if there was anything."""
        for count in range(MESSAGES_A_TURN):
            try:
                sender, *parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return count > 0
            self._take(sender, parts)
        return True

    def _take(self, sender: zmq.Frame, parts: list[zmq.Frame]) -> None:
        try:
            message = decode_to_receiver(parts[0].buffer if parts else memoryview(b""))
        except MalformedMessage:
            self.num_malformed += 1  # nobody to answer: the sender did not name itself
            return
        answer = self._answer(message, [part.buffer for part in parts[1:]])
        if answer is not None:
            self.socket.send_multipart([sender.bytes, encode(answer)], zmq.NOBLOCK)

    def _answer(self, message: ToReceiver, payload: list[memoryview]) -> ToSender | None:
        transfer_id = attempt_of(message).transfer_id
        was_expected = self._incoming.knows(transfer_id)
        try:
            return self._obey(message, payload)
        except HandoffRefused as refusal:
            if was_expected:
                self._incoming.forget(transfer_id)
                self._emit(Refused(transfer_id, refusal.cause, str(refusal)))
            first = message.first if isinstance(message, Pages) else None
            return Rejected(transfer_id, refusal.cause.value, str(refusal)[:512], first)

    def _obey(self, message: ToReceiver, payload: list[memoryview]) -> ToSender | None:
        match message:
            case Begin(attempt, source, destination, fingerprint, _):
                self._incoming.introduce(attempt, source, destination, fingerprint)
                return None
            case Pages(attempt, source, destination, first, pages):
                self._incoming.place(attempt, source, destination, first, pages, payload)
                return Placed(attempt.transfer_id, first)
            case Landed():
                raise HandoffRefused(Cause.MALFORMED, "over ZMQ, pages come with their bytes")
            case Finish(manifest):
                self._incoming.accept(manifest, one_sided=False)
                self._emit(Received(manifest.transfer_id, manifest))
                return Accepted(manifest.transfer_id)
