"""CurveZMQ between the workers of a fleet: who may connect, and what nobody else reads.

One pair of keys follows from the fleet's secret, and every worker has it, as server and as client.
Each connection has keys of its own on top, which are gone with it, so that what was recorded stays
closed to who learns the secret later. http://curvezmq.org/page:read-the-docs
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

KEY_BYTES = 32
FRAME_BYTES = 33
"""That encryption adds to a frame: the command's name, a nonce, the code and flags."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A pair of keys as ZMQ writes them."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, seed: bytes) -> CurveKeys:
        """The pair that follows from 32 bytes of a secret."""
        if len(seed) != KEY_BYTES:
            raise ValueError(f"expected {KEY_BYTES} bytes, got {len(seed)}")
        secret = z85.encode(seed)
        return cls(zmq.curve_public(secret), secret)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Has a socket that is not bound yet take encrypted connections alone."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def ask(self, socket: zmq.Socket[bytes]) -> None:
        """Has a socket that is not connected yet reach one that serves these keys, and no other."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    @contextmanager
    def admitting(self, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[None]:
        """Lets in who has these keys, for as long as the context lasts. ZMQ asks nobody by itself,
        and takes any key then."""
        doorkeeper = ThreadAuthenticator(context)
        doorkeeper.start()
        doorkeeper.configure_curve_callback("*", self)
        try:
            yield
        finally:
            doorkeeper.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether it is the fleet's key; called by the thread that lets in."""
        return key == self.public
