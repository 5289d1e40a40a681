"""Deadlines of a client's calls, the attempts at each, and the pauses between these.

Each call carries its own deadline. A deadline in gRPC's service config would lose 1 to 2 s in the
library, and the server would not receive it.

An attempt that ended because no router could answer is repeated. The pauses grow, and together they
span at least `SPAN_S`, so that a call survives the replacement of a router. If the connection was
lost, the next attempt follows as soon as there is a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, SupportsFloat, cast

import grpc
import grpc.aio

from effuse.config.decoding import SettingError
from effuse.protos import rpc
from effuse.protos.errors import (
    AlreadyRunning,
    Cancelled,
    EffuseError,
    PeerLost,
    from_rpc_error,
    lost,
)

Metadata = tuple[tuple[str, str], ...]
SPAN_S: Final = 10.5
"""Least seconds from the first failed attempt to the last attempt; replacing a router takes 2."""
SOON_S: Final = 0.1
"""The pause before the second attempt, if the first one got no answer and a third may follow."""
JITTER: Final = 0.25
"""Share by which a pause may be longer, so that clients do not all return at the same moment."""
NEVER_CONNECTED: Final = ("failed to connect", "errors resolving", "DNS", "name resolution")
"""The library's texts about servers to which there was no connection begin with one of these."""
REPEATED_KEY: Final = "grpc-previous-rpc-attempts"
"""Metadata of each attempt except the first: the number of earlier attempts, in gRPC's own form."""
_UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE
_READY: Final = grpc.ChannelConnectivity.READY
DEFAULT_TARGET = "127.0.0.1:50051"
_MOST_ATTEMPTS = 5  # gRPC accepts no more
_LEAST_S, _MOST_S = 1e-9, 1e9  # gRPC counts time in nanoseconds, with 64 bits
_TARGET = re.compile(r"(?:https?://)?(?:dns:(?://[^/]*/)?)?(?P<host>\[[^\]]*\]|[^:/]+)(?::\w+)?")
_MESSAGE_BYTES = 64 << 20
_POLLED_S = 2.0  # the library looks every 0.2 s whether anybody still waits


@dataclass(slots=True)
class Retries:
    """The attempts at one call. `deadline` and all times are seconds of `now`, a monotonic clock;
    `chance` returns numbers from 0 to 1.
    """

    max_attempts: int
    deadline: float
    now: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random
    shown: Metadata = ()  # of every attempt
    attempts: int = 1  # begun so far
    failed_at: float | None = None  # when the first attempt failed

    @property
    def left_s(self) -> float:
        """Seconds for the next attempt until the deadline."""
        return self.deadline - self.now()

    @property
    def metadata(self) -> Metadata:
        if self.attempts == 1:
            return self.shown
        return (*self.shown, (REPEATED_KEY, str(self.attempts - 1)))

    def pause_s(self, error: EffuseError) -> float | None:
        """Returns the seconds to wait before the next attempt, after one that ended with `error`;
        None if there is no other attempt. Counts that attempt as begun.
        """
        now = self.now()
        if self.failed_at is None:
            self.failed_at = now
        left = self.max_attempts - self.attempts
        # Under an id that was asked for before, it is the earlier attempt that runs.
        is_ours = isinstance(error, AlreadyRunning) and self.attempts > 1
        if left < 1 or not (is_ours or _may_be_repeated(error)):
            return None
        if self.attempts == 1 and left > 1 and isinstance(error, PeerLost | Cancelled):
            pause_s = SOON_S
        else:  # each pause is half as long as the next; the last one fills the span
            pause_s = max(SOON_S, (self.failed_at + SPAN_S - now) / (2**left - 1))
        pause_s = max(pause_s * (1 + JITTER * self.chance()), error.retry_after_s or 0.0)
        if pause_s >= self.left_s:
            return None
        self.attempts += 1
        return pause_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one client. Raises ValueError for values that gRPC would silently drop."""

    timeout_s: float = 120.0  # default time limit of a call, all attempts together
    max_attempts: int = 4  # 1 means a single attempt
    shown: Metadata = ()  # of every call

    def __post_init__(self) -> None:
        timeout_s = seconds_of(self.timeout_s)
        if not _LEAST_S <= timeout_s <= _MOST_S:
            raise _no_time(self.timeout_s)
        object.__setattr__(self, "timeout_s", timeout_s)
        if not (isinstance(self.max_attempts, int) and 1 <= self.max_attempts <= _MOST_ATTEMPTS):
            raise SettingError("max_attempts", f"1 to {_MOST_ATTEMPTS}", repr(self.max_attempts))

    def deadline_s(self, asked_s: float | None) -> float:
        """The time limit of a call that asks for this one, or for none. It may be negative if it is
        the rest of a longer time. Raises ValueError for more than gRPC can count.
        """
        if asked_s is None:
            return self.timeout_s
        if not (limit_s := seconds_of(asked_s)) <= _MOST_S:
            raise _no_time(asked_s)
        return limit_s

    def retries(self, asked_s: float | None) -> Retries:
        """The attempts at a call with this time limit, or none. Raises ValueError."""
        deadline = time.monotonic() + self.deadline_s(asked_s)
        return Retries(self.max_attempts, deadline, shown=self.shown)

    def channel_arguments(self, target: str) -> list[tuple[str, str | int]]:
        """Arguments for the channel of a client that retries calls itself. Its calls
        are spread over the routers of a name.
        """
        config: dict[str, Any] = (
            {"loadBalancingConfig": [{"round_robin": {}}]} if is_name(target) else {}
        )
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


def seconds_of(value: object) -> float:
    """A number of any type as one that adds to a clock's; NaN for what is none."""
    if isinstance(value, SupportsFloat) and not isinstance(value, bool | Sized):
        with contextlib.suppress(ValueError, OverflowError):  # such as a NaN that signals
            return float(value)
    return math.nan


def _no_time(found: object) -> ValueError:
    form = f"seconds above 0, at most {_MOST_S:.0f}"
    return SettingError("timeout_s", form, repr(found))


def _may_be_repeated(error: EffuseError) -> bool:
    """Whether another attempt may succeed. A stopping server cancels calls that it has not accepted
    yet; the client's own cancellations have no gRPC status.
    """
    status = error.__cause__
    if not isinstance(status, grpc.RpcError):
        return False
    if isinstance(error, Cancelled):
        return True
    return error.retryable and cast("grpc.aio.AioRpcError", status).code() is _UNAVAILABLE


@dataclass
class Waiter:
    """Waits between the attempts of a blocking call; in another thread, `cancel` ends the wait, and
    so does closing the client."""

    channel: grpc.Channel
    target: str
    _is_closed: threading.Event  # of the client
    _changed: threading.Condition  # of the client
    _state: grpc.ChannelConnectivity | None = None
    _was_lost: bool = False
    _is_cancelled: bool = False

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled or self._is_closed.is_set()

    def wait(self, pause_s: float) -> None:
        """Returns after `pause_s`, or once a lost connection is back. Raises Cancelled."""
        self._state, self._was_lost = None, False
        with self._changed:
            self._check()  # a closed channel has no state to wait for
            self.channel.subscribe(self._note, try_to_connect=True)
        try:
            with self._changed:
                self._changed.wait_for(self._is_over, pause_s)
        finally:
            self.channel.unsubscribe(self._note)
        self._check()

    def _check(self) -> None:
        """Raises Cancelled if there is no other attempt."""
        if self._is_closed.is_set():
            raise closed(self.target)
        if self._is_cancelled:
            raise Cancelled(f"the call to {self.target} was cancelled")

    def cancel(self) -> None:
        """Ends this wait and each later one."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()

    def _note(self, state: grpc.ChannelConnectivity) -> None:
        with self._changed:
            self._was_lost = self._was_lost or state is not _READY
            self._state = state
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self.is_cancelled or (self._was_lost and self._state is _READY)


def end_polls(channel: grpc.Channel) -> None:
    """Returns once no thread of the library polls the channel's state for a `Waiter`, or after
    `_POLLED_S`: such a thread would print a traceback about a channel that is closed.
    """
    state, end_s = getattr(channel, "_connectivity_state", None), time.monotonic() + _POLLED_S
    while getattr(state, "polling", False) and time.monotonic() < end_s:
        time.sleep(0.01)


async def wait(channel: grpc.aio.Channel, pause_s: float) -> None:
    """Returns after `pause_s`, or once a lost connection of the channel is back."""
    try:
        async with asyncio.timeout(pause_s):
            was_lost = False
            while not (was_lost and channel.get_state(try_to_connect=True) is _READY):
                state = channel.get_state(try_to_connect=True)
                was_lost = was_lost or state is not _READY
                await channel.wait_for_state_change(state)
    except TimeoutError:
        return


def closed(target: str) -> Cancelled:
    return Cancelled(f"the client of {target} is closed")


def _mapped(error: grpc.aio.AioRpcError, target: str) -> EffuseError:
    """An error of a call, with the library's own text if no router has answered."""
    found, details = from_rpc_error(error, target), error.details()
    if not details or not str(found).endswith(lost(error.code())):
        return found
    is_absent = details.startswith(NEVER_CONNECTED)
    return PeerLost(f"{f'no router answers on {target}' if is_absent else found}: {details}")


@contextlib.contextmanager
def raising(target: str) -> Iterator[None]:
    """Turns gRPC's errors, from both kinds of channel, into ours."""
    try:
        yield
    except grpc.RpcError as error:
        raise _mapped(cast("grpc.aio.AioRpcError", error), target) from error
    except asyncio.CancelledError as error:
        # A closed channel raises for its calls the same error as asyncio for a cancelled task.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Cancelled(
            f"the call to {target} was cancelled, because its client or stream was closed"
        ) from error
    except (ValueError, grpc.aio.UsageError) as error:  # of a new call on a closed channel
        if "closed" not in str(error):
            raise
        raise closed(target) from error
