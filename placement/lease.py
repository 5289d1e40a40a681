"""A worker's lease as its holder sees it: a table of states and events, and what is due when.

Pure: events come in, the next action goes out, the clock is an argument. Redis is spoken to by
`announcer.py`. Time is in monotonic seconds of this process; no timestamp leaves it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class LeaseState(Enum):
    """Where the holder stands."""

    ABSENT = "absent"  # never registered, or Redis has lost it
    HELD = "held"
    SUPERSEDED = "superseded"  # another life of this worker has taken it; final
    RELEASED = "released"  # given back; final


class LeaseEvent(Enum):
    """What Redis answered, or did not."""

    REGISTERED = "registered"
    RENEWED = "renewed"
    MISSING = "missing"  # expired, or Redis was emptied
    SUPERSEDED = "superseded"
    UNREACHABLE = "unreachable"
    RELEASED = "released"


class Action(Enum):
    """What the holder does next."""

    REGISTER = "register"
    RENEW = "renew"
    STOP = "stop"


class IllegalLeaseEvent(Exception):
    """An event that cannot happen in this state."""

    def __init__(self, state: LeaseState, event: LeaseEvent) -> None:
        super().__init__(f"a lease that is {state.value} cannot be told {event.value}")


_S, _E = LeaseState, LeaseEvent
TRANSITIONS: Final[Mapping[tuple[LeaseState, LeaseEvent], LeaseState]] = {
    (_S.ABSENT, _E.REGISTERED): _S.HELD,
    (_S.ABSENT, _E.SUPERSEDED): _S.SUPERSEDED,
    (_S.ABSENT, _E.UNREACHABLE): _S.ABSENT,
    (_S.ABSENT, _E.RELEASED): _S.RELEASED,
    (_S.HELD, _E.RENEWED): _S.HELD,
    (_S.HELD, _E.MISSING): _S.ABSENT,
    (_S.HELD, _E.SUPERSEDED): _S.SUPERSEDED,
    (_S.HELD, _E.UNREACHABLE): _S.HELD,  # renewing later is safe: the renewal compares lives
    (_S.HELD, _E.RELEASED): _S.RELEASED,
}
_ACTIONS: Final[Mapping[LeaseState, Action]] = {
    _S.ABSENT: Action.REGISTER,
    _S.HELD: Action.RENEW,
    _S.SUPERSEDED: Action.STOP,
    _S.RELEASED: Action.STOP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """Durations of a lease, in seconds."""

    ttl_s: float = 5.0  # a worker that is silent this long is gone
    renew_s: float = 1.0  # from one renewal to the next
    retry_s: float = 0.25  # to the next try after Redis did not answer

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
    due_at: float = 0.0  # when the next action is due

    @property
    def action(self) -> Action:
        """What to do once it is due."""
        return _ACTIONS[self.state]

    def wait_s(self, now: float) -> float:
        """Seconds until the next action is due; never negative."""
        return max(0.0, self.due_at - now)


def advance(lease: Lease, event: LeaseEvent, now: float) -> Lease:
    """Returns the lease after `event`; raises `IllegalLeaseEvent` naming both."""
    state = TRANSITIONS.get((lease.state, event))
    if state is None:
        raise IllegalLeaseEvent(lease.state, event)
    return Lease(lease.times, state, now + _pause_s(lease.times, event))


def _pause_s(times: LeaseTimes, event: LeaseEvent) -> float:
    if event is LeaseEvent.UNREACHABLE:
        return times.retry_s
    if event is LeaseEvent.MISSING:
        return 0.0
    return times.renew_s
