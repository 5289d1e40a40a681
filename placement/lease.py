"""A worker's lease as its holder sees it: a table of states and events, and the next time to ask.

Pure, with the clock as an argument. `announcer.py` calls Redis. Time is in monotonic seconds of
this process; no timestamp leaves it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class LeaseState(Enum):
    """The state of the lease."""

    ABSENT = "absent"  # not taken yet
    HELD = "held"
    SUPERSEDED = "superseded"  # a later process with this worker's id has taken it; final
    RELEASED = "released"  # released; final


class LeaseEvent(Enum):
    """The answer of Redis, or that there was none."""

    HELD = "held"  # taken or renewed
    SUPERSEDED = "superseded"
    UNREACHABLE = "unreachable"
    RELEASED = "released"


class IllegalLeaseEvent(Exception):
    """An event that cannot happen in this state."""

    def __init__(self, state: LeaseState, event: LeaseEvent) -> None:
        super().__init__(f"a lease in state {state.value} does not accept the event {event.value}")


_S, _E = LeaseState, LeaseEvent
TRANSITIONS: Final[Mapping[tuple[LeaseState, LeaseEvent], LeaseState]] = {
    (_S.ABSENT, _E.HELD): _S.HELD,
    (_S.ABSENT, _E.UNREACHABLE): _S.ABSENT,
    (_S.ABSENT, _E.RELEASED): _S.RELEASED,
    (_S.HELD, _E.HELD): _S.HELD,
    (_S.HELD, _E.SUPERSEDED): _S.SUPERSEDED,
    (_S.HELD, _E.UNREACHABLE): _S.HELD,  # renewing late is safe: the renewal compares holders
    (_S.HELD, _E.RELEASED): _S.RELEASED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """Durations of a lease, in seconds."""

    ttl_s: float = 3.0  # a worker that is silent for this long is gone
    renew_s: float = 0.5  # from one renewal to the next
    retry_s: float = 0.25  # until the next attempt after Redis did not answer

    def __post_init__(self) -> None:
        if not 0 < self.retry_s <= self.renew_s < self.ttl_s:
            raise ValueError(
                f"expected 0 < retry_s <= renew_s < ttl_s, got {self.retry_s:g}, "
                f"{self.renew_s:g}, {self.ttl_s:g}"
            )


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease at one moment."""

    times: LeaseTimes
    state: LeaseState = LeaseState.ABSENT
    due_at: float = 0.0  # when to ask Redis again

    @property
    def is_over(self) -> bool:
        """Whether another process has the lease, or this one has released it."""
        return self.state in (LeaseState.SUPERSEDED, LeaseState.RELEASED)

    def wait_s(self, now: float) -> float:
        """Seconds until Redis is asked again; never negative."""
        return max(0.0, self.due_at - now)


def advance(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    """Returns the lease after `event`; raises `IllegalLeaseEvent` that names both."""
    state = TRANSITIONS.get((lease.state, event))
    if state is None:
        raise IllegalLeaseEvent(lease.state, event)
    times = lease.times
    pause_s = times.retry_s if event is LeaseEvent.UNREACHABLE else times.renew_s
    return Lease(times, state, now + pause_s)
