"""How a client's calls behave: their deadlines, and retries as a gRPC service config.

Deadlines are told with each call and not in that config: the library takes 1 to 2 s off a time
that stands there, and does not tell the server of it.

A call that nobody answered is tried again, with growing pauses; once a stream has brought its first
event it is not, since the router itself goes on with a lost worker's requests.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from ipaddress import ip_address
from typing import SupportsFloat

from effuse.client.retries import Retries
from effuse.config.decoding import SettingError
from effuse.protos import rpc

DEFAULT_TARGET = "127.0.0.1:50051"
_SERVICES = ("effuse.v1.GenerationService", "effuse.v1.ModelService")
_MOST_ATTEMPTS = 5  # gRPC takes no more
_LEAST_S, _MOST_S = 1e-9, 1e9  # gRPC counts time in nanoseconds, of 64 bits
_TARGET = re.compile(r"(?:https?://)?(?:dns:(?://[^/]*/)?)?(?P<host>\[[^\]]*\]|[^:/]+)(?::\w+)?")
_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of one client. Raises ValueError for what gRPC would silently drop."""

    timeout_s: float = 120.0  # longest that a call may take, all attempts together, by default
    max_attempts: int = 4  # 1 tries once

    def __post_init__(self) -> None:
        if not (_is_number(self.timeout_s) and _LEAST_S <= self.timeout_s <= _MOST_S):
            raise _no_time(self.timeout_s)
        if not (isinstance(self.max_attempts, int) and 1 <= self.max_attempts <= _MOST_ATTEMPTS):
            raise SettingError("max_attempts", f"1 to {_MOST_ATTEMPTS}", repr(self.max_attempts))

    def deadline_s(self, asked_s: float | None) -> float:
        """How long a call may take that asks for so long, or for nothing: what is left of a longer
        time may be none. Raises ValueError for more than gRPC can count."""
        if asked_s is None:
            return self.timeout_s
        if not (_is_number(asked_s) and asked_s <= _MOST_S):
            raise _no_time(asked_s)
        return asked_s

    def retries(self, asked_s: float | None) -> Retries:
        """The attempts at one call that asks for so long, or for nothing. Raises ValueError."""
        return Retries(self.max_attempts, time.monotonic() + self.deadline_s(asked_s))

    def channel_arguments(self, target: str | None = None) -> list[tuple[str, str | int]]:
        """For grpc.insecure_channel and its asyncio twin. With `target` for a client that repeats
        calls itself (`retries.py`); without it gRPC does."""
        return [
            ("grpc.service_config", json.dumps(self.service_config(target))),
            # Alone it repeats what no server has taken, as where a connection is renewed.
            ("grpc.enable_retries", int(target is not None or self.max_attempts > 1)),
            *rpc.reconnect_options(),
            ("grpc.max_receive_message_length", _MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MESSAGE_BYTES),
            # Else a call to a router that says nothing any more lasts until its deadline.
            *rpc.keepalive_options(rpc.CALLER_KEEPALIVE),
        ]

    def service_config(self, target: str | None = None) -> dict[str, object]:
        """As gRPC's service config names things. A name that may stand for several routers has its
        calls spread over all of them."""
        if target is not None:
            return {"loadBalancingConfig": [{"round_robin": {}}]} if is_name(target) else {}
        method: dict[str, object] = {"name": [{"service": name} for name in _SERVICES]}
        if self.max_attempts > 1:
            method["retryPolicy"] = {
                "maxAttempts": self.max_attempts,
                "initialBackoff": "0.5s",
                "maxBackoff": "10s",
                "backoffMultiplier": 4.5,  # four attempts span 10 s at least
                # A server that stops cancels calls that it has not taken yet; those that the client
                # itself cancels are over before.
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            }
        return {"methodConfig": [method]}


def is_name(target: str) -> bool:
    """Whether a target's host is a DNS name other than localhost."""
    found = _TARGET.fullmatch(str(target))  # `read_target` refuses another kind
    if found is None:
        return False
    host = found["host"].removesuffix(".").lower()
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return host != "localhost"
    return False


def _is_number(value: object) -> bool:
    return isinstance(value, SupportsFloat) and not isinstance(value, bool)


def _no_time(found: object) -> ValueError:
    form = f"seconds above 0, at most {_MOST_S:.0f}"
    return SettingError("timeout_s", form, repr(found))
