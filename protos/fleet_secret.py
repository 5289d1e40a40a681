"""A secret that the processes of a fleet share, and what they show each other of it.

A call carries a digest of the secret and of the address that it goes to: who listens there learns
nothing that opens another door. Before anything else is sent, who is called proves by a digest of a
fresh nonce and of its own address that it knows the secret, so that a stranger cannot pass the
question on to one who does. Against who reads or changes what is on the wire only TLS helps.
Not here: calls (`fleet_channel.py`, `gate.py`).
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path
from typing import Final

TOKEN_KEY: Final = "effuse-fleet-token"
"""Metadata under which a call carries its digest."""
LEAST_BYTES: Final = 16
MOST_BYTES: Final = 4096
NONCE_BYTES: Final = 32


class FleetSecret:
    """The secret, which nothing prints."""

    def __init__(self, secret: bytes) -> None:
        """Raises OSError for one that is short, or a file of something else."""
        if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
            raise OSError(
                f"--fleet-secret: expected {LEAST_BYTES} to {MOST_BYTES} bytes, got {len(secret)}"
            )
        self._secret = secret

    @classmethod
    def read(cls, path: Path) -> FleetSecret:
        """The content of a file, less white space around it. Raises OSError."""
        return cls(path.read_bytes().strip())

    @staticmethod
    def make(path: Path) -> None:
        """Writes a new one into a file that its owner alone may read."""
        path.touch(0o600, exist_ok=False)
        path.write_text(secrets.token_hex(32))

    def token(self, address: str) -> str:
        """What a call to the process announced as `address` ("host:port") carries."""
        return self.derive("call", address.encode()).hex()

    def proof(self, address: str, nonce: bytes) -> bytes:
        """What the process announced as `address` answers to a nonce."""
        return self.derive("proof", nonce, address.encode())

    def derive(self, purpose: str, *parts: bytes) -> bytes:
        """32 bytes that follow from the secret, for one purpose; nobody else can tell them."""
        told = b"".join(len(one).to_bytes(4, "big") + one for one in (purpose.encode(), *parts))
        return hmac.digest(self._secret, told, "sha256")
