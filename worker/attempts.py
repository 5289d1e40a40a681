"""The attempts that run in this worker, those that ended recently, and their errors.

Passes the engine's events to the handler of an attempt, and turns its failures into errors for
callers. No I/O; the clock is injected. An attempt stays in the table until nothing of it is left in
the engine; after that its transfer id is refused.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from effuse.kvtransfer.messages import AttemptId
from effuse.placement.records import Kind
from effuse.protos.errors import (
    AlreadyRunning,
    Bug,
    DeadlineExceeded,
    EffuseError,
    InvalidRequest,
    Overloaded,
    Refused,
    TransferFailed,
    Unavailable,
)
from effuse.worker.messages import CoreEvent, Draft, Failed, FailureCode, Reserved
from effuse.worker.roles import Duty

_MOST_QUEUED_DRAFTS = 64  # a slow reader loses drafts, never commits
_RETRY_AFTER_S: Final = 0.5  # if the engine names none: about the time of a short request


class OpenAttempt:
    """One attempt, from its admission until nothing of it is left here."""

    def __init__(self, attempt_id: AttemptId, incarnation: str, kind: Kind | None = None) -> None:
        self.id = attempt_id
        self.kind = kind  # None is a rehearsal
        self.incarnation = incarnation  # of its engine
        self.ended = asyncio.Event()  # nothing of it is left here
        self.engine_gone = False  # the engine died, and its memory is freed
        self._events: asyncio.Queue[CoreEvent | EffuseError] = asyncio.Queue()
        self._held: Failed | EffuseError | None = None  # arrived next, but is no event of progress

    async def next_event(self) -> CoreEvent:
        """Returns the engine's next event; raises the error that ended the attempt instead.

        Waits without a deadline on purpose: callers have their own.
        """
        held, self._held = self._held, None
        event = held or await self._events.get()
        if isinstance(event, EffuseError):
            raise event
        return event

    def next_ready(self) -> CoreEvent | None:
        """Returns an event that has already arrived; None for nothing or a bad end."""
        if self._held is not None or self._events.empty():
            return None
        event = self._events.get_nowait()
        if isinstance(event, EffuseError | Failed):
            self._held = event
            return None
        return event

    def deliver(self, event: CoreEvent | EffuseError) -> None:
        """Passes an event of the engine to the handler, or an error that ends the attempt."""
        if isinstance(event, Draft) and self._events.qsize() > _MOST_QUEUED_DRAFTS:
            return
        self._events.put_nowait(event)


class Attempts:
    """All attempts of a worker, by transfer id."""

    def __init__(
        self,
        *,
        remember_s: float = 600.0,
        most_remembered: int = 65536,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.running: dict[str, OpenAttempt] = {}  # by transfer id
        self._over: OrderedDict[str, float] = OrderedDict()  # transfer id: when to forget it
        self._remember_s = remember_s
        self._most_remembered = most_remembered
        self._now = now
        self.idle = asyncio.Event()  # set while no attempt runs
        self.idle.set()

    def __len__(self) -> int:
        return len(self.running)

    def open(
        self, attempt_id: AttemptId, incarnation: str, kind: Kind | None = None
    ) -> OpenAttempt:
        """Admits an attempt; raises `AlreadyRunning`, or `Refused` for one that has ended.

        Attempts are identified only by their transfer: if a request is sent again, here or at
        another router, the earlier attempt may still be ending, or not know yet that its router is
        gone.
        """
        self._forget()
        if attempt_id.transfer_id in self._over:
            raise Refused(f"transfer {attempt_id.transfer_id!r} has already ended here")
        if attempt_id.transfer_id in self.running:
            raise AlreadyRunning(f"transfer {attempt_id.transfer_id!r} is already running here")
        attempt = OpenAttempt(attempt_id, incarnation, kind)
        self.running[attempt_id.transfer_id] = attempt
        self.idle.clear()
        return attempt

    def close(self, attempt: OpenAttempt) -> None:
        """Nothing of the attempt is left here; its transfer id is refused for a while."""
        self.bury(attempt.id.transfer_id)
        self.running.pop(attempt.id.transfer_id, None)
        attempt.ended.set()
        if not self.running:
            self.idle.set()

    def bury(self, transfer_id: str) -> None:
        """Refuses a transfer id from now on, known or not."""
        self._over[transfer_id] = self._now() + self._remember_s
        self._over.move_to_end(transfer_id)
        if len(self._over) > self._most_remembered:
            self._over.popitem(last=False)

    def deliver(self, event: CoreEvent) -> None:
        """Passes an event to its attempt; events of a missing attempt are dropped."""
        attempt = self.running.get(attempt_of(event).transfer_id)
        if attempt is not None:
            attempt.deliver(event)

    def lose_engine(self, error: EffuseError) -> None:
        """The engine's process is gone: ends every attempt, and nothing is left of them there."""
        for attempt in self.running.values():
            attempt.engine_gone = True
            attempt.deliver(error)

    def leaving(self, duty: Duty) -> list[OpenAttempt]:
        """Attempts of a kind that a worker with this role does not accept."""
        return [one for one in self.running.values() if one.kind and not duty.does(one.kind)]

    def fail_all(self, error: EffuseError) -> None:
        """Ends every attempt for its handler, which then ends it in the engine."""
        for attempt in self.running.values():
            attempt.deliver(error)

    def _forget(self) -> None:
        now = self._now()
        while self._over and next(iter(self._over.values())) <= now:
            self._over.popitem(last=False)


def attempt_of(event: CoreEvent) -> AttemptId:
    return event.reservation.attempt if isinstance(event, Reserved) else event.attempt


_KINDS: Final[Mapping[FailureCode, type[EffuseError]]] = {
    "ALREADY_EXISTS": AlreadyRunning,
    "FAILED_PRECONDITION": Refused,
    "RESOURCE_EXHAUSTED": Overloaded,
    "ABORTED": Refused,
    "DEADLINE_EXCEEDED": TransferFailed,
    "UNAVAILABLE": Unavailable,
    "DATA_LOSS": TransferFailed,
    "INTERNAL": Bug,
}


def to_error(failed: Failed) -> EffuseError:
    """Returns the error for the caller from an engine's failure."""
    if failed.code == "INVALID_ARGUMENT":
        return InvalidRequest.of(failed.field or "", failed.message)
    kind = _KINDS[failed.code]
    labels = {"field": failed.field} if failed.field else None
    retry_after_s = failed.retry_after_s
    if retry_after_s is None and kind in (Overloaded, Unavailable, TransferFailed):
        retry_after_s = _RETRY_AFTER_S
    # The class has the usual value; only the engine knows about bugs.
    retryable = failed.retryable if kind is Bug else None
    return kind(failed.message, retryable=retryable, retry_after_s=retry_after_s, labels=labels)


def deadline_passed(what: str) -> DeadlineExceeded:
    """The error of a caller whose time has ended."""
    return DeadlineExceeded(f"the deadline passed before {what}")
