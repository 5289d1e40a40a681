"""How a client's channel behaves: deadlines and retries, as a gRPC service config.

A call that nobody answered is tried again by the library, with growing pauses; once a stream has
brought its first event it is not, since the router itself goes on with a lost worker's requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

DEFAULT_TARGET = "127.0.0.1:50051"
_SERVICES = ("effuse.v1.GenerationService", "effuse.v1.ModelService")
_MOST_ATTEMPTS = 5  # gRPC takes no more
_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of one client. Raises ValueError for what gRPC would silently drop."""

    timeout_s: float = 120.0  # longest that a call may take, all attempts together
    max_attempts: int = 4  # 1 tries once

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"timeout_s: expected seconds above 0, got {self.timeout_s!r}")
        if not 1 <= self.max_attempts <= _MOST_ATTEMPTS:
            raise ValueError(
                f"max_attempts: expected 1 to {_MOST_ATTEMPTS}, got {self.max_attempts}"
            )

    def channel_arguments(self) -> list[tuple[str, str | int]]:
        """For grpc.insecure_channel and its asyncio twin."""
        return [
            ("grpc.service_config", json.dumps(self.service_config())),
            ("grpc.enable_retries", int(self.max_attempts > 1)),
            ("grpc.max_receive_message_length", _MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MESSAGE_BYTES),
        ]

    def service_config(self) -> dict[str, object]:
        """As gRPC's service config names things."""
        method: dict[str, object] = {
            "name": [{"service": name} for name in _SERVICES],
            "timeout": f"{self.timeout_s:.9f}s",
        }
        if self.max_attempts > 1:
            method["retryPolicy"] = {
                "maxAttempts": self.max_attempts,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                # A server that stops cancels calls that it has not taken yet; those that the client
                # itself cancels are over before.
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            }
        return {"methodConfig": [method]}
