"""The secret that the processes of a fleet share; `channels.py` says how they use it.

Engines read it too, and import no gRPC for it.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path
from typing import Final

LEAST_BYTES: Final = 16
MOST_BYTES: Final = 4096


class FleetSecret:
    """The secret, which is never printed."""

    def __init__(self, secret: bytes) -> None:
        """Raises OSError if the file is too short or too long."""
        if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
            raise OSError(
                f"--fleet-secret: expected {LEAST_BYTES} to {MOST_BYTES} bytes, got {len(secret)}"
            )
        self._secret = secret

    @classmethod
    def read(cls, path: Path) -> FleetSecret:
        """The content of a file without surrounding white space. Raises OSError."""
        with path.open("rb") as file:  # which may have no end
            return cls(file.read(2 * MOST_BYTES).strip())

    @staticmethod
    def make(path: Path) -> None:
        """Writes a new secret into a file that only its owner may read."""
        path.touch(0o600, exist_ok=False)
        path.write_text(secrets.token_hex(32))

    def token(self, address: str) -> str:
        """The token of a call to the process announced as `address` ("host:port")."""
        return self.derive("call", address.encode()).hex()

    def proof(self, address: str, nonce: bytes) -> bytes:
        """The answer of the process announced as `address` to a nonce."""
        return self.derive("proof", nonce, address.encode())

    def derive(self, purpose: str, *parts: bytes) -> bytes:
        """32 bytes derived from the secret for one purpose; only its owners can compute them."""
        message = b"".join(len(one).to_bytes(4, "big") + one for one in (purpose.encode(), *parts))
        return hmac.digest(self._secret, message, "sha256")
