"""The work of one worker: the kinds that its role accepts, its attempts, and their errors.

A role is a value. A change of it takes effect at once. Work of a kind that the worker has ceased to
accept goes on to its end, or until it is handed over to other workers.

`Quarantines` knows which pages wait for their writers (`peer.py`), informs operators, and refuses
such a writer more of them.

`Attempts` holds those that run, and those that ended recently. It passes the engine's events to the
handler of an attempt, and turns its failures into errors for callers. No I/O; the clock is
injected. An attempt stays in the table until nothing of it is left in the engine; after that its
transfer id is refused.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, get_args

from effuse.kvtransfer.messages import AttemptId, Tombstones
from effuse.placement.records import MOST_QUARANTINES, Kind, Quarantine, Role
from effuse.protos.errors import (
    AlreadyRunning,
    Bug,
    DeadlineExceeded,
    EffuseError,
    InvalidRequest,
    OtherRole,
    Overloaded,
    Refused,
    TransferFailed,
    Unavailable,
)
from effuse.v1 import worker_pb2 as pb
from effuse.worker.messages import (
    CoreEvent,
    Draft,
    Failed,
    FailureCode,
    PromptProgress,
    Reserved,
)

LOG: Final = logging.getLogger(__name__)
ROLES: Final[tuple[Role, ...]] = get_args(Role)
AUTO: Final = "auto"
"""Leaves the role as it is, to the plans of routers."""
_ROLE_RETRY_S: Final = 0.1
_MOST_QUEUED_DRAFTS = 64  # a slow reader loses drafts, never commits
_RETRY_AFTER_S: Final = 0.5  # if the engine names none: about the time of a short request
SILENT_S = 10.0
"""A writer that has not released pages for this long gets no more."""
ALARM_S: Final = 30.0
_WRITER_RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Duty:
    """The role of a worker at one moment."""

    role: Role
    may_change: bool = False
    hand_over_at: float = math.inf  # until when work of other kinds goes on
    is_pinned: bool = False  # an operator has set the role, and plans leave it
    changed_at: float = -math.inf  # when the role last became another one

    def does(self, kind: Kind) -> bool:
        return self.role in (kind, "both")

    def check(self, kind: Kind | None) -> None:
        """Raises `OtherRole` for new work of a kind that it does not accept; None is accepted in
        every role.
        """
        if kind is not None and not self.does(kind):
            raise self.refusal(f"this worker accepts no {kind} requests now")

    def refusal(self, why: str) -> OtherRole:
        """The error on which a router chooses another worker."""
        text = f"{why}, because its role is {self.role}"
        return OtherRole(text, retry_after_s=_ROLE_RETRY_S, labels={"role": self.role})

    def changed(
        self, role: str, now: float, hand_over_s: float | None, *, is_planned: bool = False
    ) -> "Duty":
        """The role after a request for a change, by an operator or by a router's plan
        (`is_planned`). Work of other kinds goes on for `hand_over_s` seconds, or to its end if that
        is None. Raises `InvalidRequest`; `Refused` for a fixed role, and for a plan that would
        change an operator's role.
        """
        known = {one: one for one in ROLES} | ({} if is_planned else {AUTO: self.role})
        if (found := known.get(role)) is None:
            raise InvalidRequest.of(
                "role", f"expected one of {', '.join(known)}, got {role[:40]!r}"
            )
        if hand_over_s is not None and not hand_over_s >= 0:  # also NaN
            raise InvalidRequest.of("hand_over_s", f"expected 0 seconds or more, got {hand_over_s}")
        if not self.may_change and (found != self.role or role == AUTO):
            raise Refused(
                f"this worker is always a {self.role} worker; effuse-worker starts workers whose "
                "role may change",
                retryable=False,
            )
        if is_planned and self.is_pinned:
            raise Refused("an operator has set this worker's role", retryable=False)
        return Duty(
            found,
            self.may_change,
            hand_over_at=math.inf if hand_over_s is None else now + hand_over_s,
            is_pinned=self.may_change and not is_planned and role != AUTO,
            changed_at=self.changed_at if found == self.role else now,
        )

    def age_s(self, now: float) -> float | None:
        """Seconds since the role became another one; None if it never did."""
        return None if math.isinf(self.changed_at) else now - self.changed_at

    def wait_s(self, now: float) -> float | None:
        """Seconds until work of other kinds is handed over; None if it goes on to its end."""
        return None if math.isinf(self.hand_over_at) else max(0.0, self.hand_over_at - now)


class OpenAttempt:
    """One attempt, from its admission until nothing of it is left here."""

    def __init__(self, attempt_id: AttemptId, incarnation: str, kind: Kind | None = None) -> None:
        self.id = attempt_id
        self.kind = kind  # None is a rehearsal
        self.incarnation = incarnation  # of its engine
        self.ended = asyncio.Event()  # nothing of it is left here
        self.engine_ended = False  # the engine died, and its memory is freed
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
        is_news = isinstance(event, Draft | PromptProgress)
        if is_news and self._events.qsize() > _MOST_QUEUED_DRAFTS:
            return
        self._events.put_nowait(event)


class Attempts:
    """All attempts of a worker, by transfer id."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.running: dict[str, OpenAttempt] = {}  # by transfer id
        self._over = Tombstones()
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
        self._over.add(transfer_id, self._now())

    def deliver(self, event: CoreEvent) -> None:
        """Passes an event to its attempt; events of a missing attempt are dropped."""
        attempt = self.running.get(attempt_of(event).transfer_id)
        if attempt is not None:
            attempt.deliver(event)

    def lose_engine(self, error: EffuseError) -> None:
        """The engine's process is gone: ends every attempt, and nothing is left of them there."""
        for attempt in self.running.values():
            attempt.engine_ended = True
            attempt.deliver(error)

    def leaving(self, duty: Duty) -> list[OpenAttempt]:
        """Attempts of a kind that a worker with this role does not accept."""
        return [one for one in self.running.values() if one.kind and not duty.does(one.kind)]

    def fail_all(self, error: EffuseError) -> None:
        for attempt in self.running.values():
            attempt.deliver(error)


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
    return DeadlineExceeded(f"the deadline passed before {what}")


@dataclass(slots=True, eq=False)
class _Held:
    """Pages of one handoff that wait for its writer."""

    writer: pb.WorkerRef
    pages: int
    since: float


class Quarantines:
    """All waiting pages; a worker has few handoffs, so these are few."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._held: list[_Held] = []
        self._reported: set[str] = set()  # writers that the log already reports as silent

    @contextmanager
    def holding(self, writer: pb.WorkerRef, pages: int) -> Iterator[Callable[[], None]]:
        """Counts pages that wait for `writer`; returns a function that the waiter calls."""
        held = _Held(writer, pages, self._now())
        self._held.append(held)
        try:
            yield lambda: self._report(held)
        finally:
            self._held.remove(held)
            if writer.address in self._reported and not self._of(writer.address):
                self._reported.remove(writer.address)
                LOG.warning("all pages that %s held are free again", writer.address)

    def check(self, writer: pb.WorkerRef) -> None:
        """Raises `TransferFailed` for a writer that has held pages for too long."""
        ages = [self._now() - one.since for one in self._held if _is_same(one.writer, writer)]
        if ages and max(ages) >= SILENT_S:
            raise TransferFailed(
                f"the prefill worker at {writer.address} has not released pages here for "
                f"{max(ages):.0f} s, so it gets no more pages",
                retry_after_s=_WRITER_RETRY_S,
            )

    def listed(self) -> tuple[Quarantine, ...]:
        """Pages by writer, those that have waited longest first, at most `MOST_QUARANTINES`."""
        by_writer: dict[str, list[_Held]] = defaultdict(list)
        for one in self._held:  # oldest first
            by_writer[one.writer.address].append(one)
        now = self._now()
        return tuple(
            Quarantine(address, sum(one.pages for one in held), now - held[0].since)
            for address, held in list(by_writer.items())[:MOST_QUARANTINES]
        )

    def _of(self, address: str) -> list[_Held]:
        return [one for one in self._held if one.writer.address == address]

    def _report(self, held: _Held) -> None:
        address, age_s = held.writer.address, self._now() - held.since
        if age_s < ALARM_S or address in self._reported:
            return
        self._reported.add(address)
        LOG.error(
            "%d pages cannot be used, because the prefill worker at %s, on this machine, may still "
            "write into them and has not answered for %.0f s. They become free once it answers or "
            "its engine's process ends: continue the process if it is stopped, otherwise kill it",
            sum(one.pages for one in self._of(address)),
            address,
            age_s,
        )


def _is_same(one: pb.WorkerRef, other: pb.WorkerRef) -> bool:
    """Whether both are one life of one worker; earlier lives do not count."""
    return (one.address, one.incarnation) == (other.address, other.incarnation)
