"""Options of a client's calls: their deadlines, attempts and channel.

Each call carries its own deadline. A deadline in gRPC's service config would lose 1 to 2 s in the
library, and the server would not receive it.
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
_MOST_ATTEMPTS = 5  # gRPC accepts no more
_LEAST_S, _MOST_S = 1e-9, 1e9  # gRPC counts time in nanoseconds, with 64 bits
_TARGET = re.compile(r"(?:https?://)?(?:dns:(?://[^/]*/)?)?(?P<host>\[[^\]]*\]|[^:/]+)(?::\w+)?")
_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one client. Raises ValueError for values that gRPC would silently drop."""

    timeout_s: float = 120.0  # default time limit of a call, all attempts together
    max_attempts: int = 4  # 1 means a single attempt

    def __post_init__(self) -> None:
        if not (_is_number(self.timeout_s) and _LEAST_S <= self.timeout_s <= _MOST_S):
            raise _no_time(self.timeout_s)
        if not (isinstance(self.max_attempts, int) and 1 <= self.max_attempts <= _MOST_ATTEMPTS):
            raise SettingError("max_attempts", f"1 to {_MOST_ATTEMPTS}", repr(self.max_attempts))

    def deadline_s(self, asked_s: float | None) -> float:
        """The time limit of a call that asks for this one, or for none. It may be negative if it is
        the rest of a longer time. Raises ValueError for more than gRPC can count.
        """
        if asked_s is None:
            return self.timeout_s
        if not (_is_number(asked_s) and asked_s <= _MOST_S):
            raise _no_time(asked_s)
        return asked_s

    def retries(self, asked_s: float | None) -> Retries:
        """The attempts at a call with this time limit, or none. Raises ValueError."""
        return Retries(self.max_attempts, time.monotonic() + self.deadline_s(asked_s))

    def channel_arguments(self, target: str) -> list[tuple[str, str | int]]:
        """Arguments for the channel of a client that retries calls itself (`retries.py`). Its calls
        are spread over the routers of a name.
        """
        config = {"loadBalancingConfig": [{"round_robin": {}}]} if is_name(target) else {}
        return [
            ("grpc.service_config", json.dumps(config)),
            # gRPC itself only repeats calls that no server has accepted, for example while a
            # connection is renewed.
            ("grpc.enable_retries", 1),
            *rpc.reconnect_options(),
            ("grpc.max_receive_message_length", _MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MESSAGE_BYTES),
            # Otherwise a call to a silent router would last until its deadline.
            *rpc.keepalive_options(rpc.CALLER_KEEPALIVE),
        ]


def is_name(target: str) -> bool:
    """Whether a target's host is a DNS name other than localhost."""
    found = _TARGET.fullmatch(str(target))  # `read_target` refuses other forms
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
