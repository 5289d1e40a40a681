"""A request's life in the router: a table of states and events, and the story of what happened.

Pure: no I/O, no clock of its own, no text. What is done on each event is `relay.py`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

STORY_LENGTH: Final = 64
"""Events kept of each request; the first ones are dropped, the end is what one looks for."""


class State(Enum):
    """Where a request is."""

    QUEUED = "queued"  # admitted, waits for its turn
    STARTING = "starting"  # an attempt is open, no pages are held for it yet
    PREFILLING = "prefilling"  # pages are held, the prompt's KV is not complete
    DECODING = "decoding"  # the prompt's KV is complete
    LOST = "lost"  # the attempt is over, another one may follow
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Event(Enum):
    """What happens to a request."""

    PLACED = "placed"  # an attempt begins on chosen workers
    RESERVED = "reserved"
    VERIFIED = "verified"
    COMMITTED = "committed"
    LOST = "lost"  # the attempt failed in a way that another one may not
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"  # by the client or by its deadline


_S, _E = State, Event
ENDED: Final = frozenset({_S.FINISHED, _S.FAILED, _S.CANCELLED})

TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = {
    (_S.QUEUED, _E.PLACED): _S.STARTING,
    (_S.QUEUED, _E.FAILED): _S.FAILED,
    (_S.QUEUED, _E.CANCELLED): _S.CANCELLED,
    (_S.STARTING, _E.RESERVED): _S.PREFILLING,
    (_S.STARTING, _E.LOST): _S.LOST,
    (_S.STARTING, _E.FAILED): _S.FAILED,
    (_S.STARTING, _E.CANCELLED): _S.CANCELLED,
    (_S.PREFILLING, _E.VERIFIED): _S.DECODING,
    (_S.PREFILLING, _E.LOST): _S.LOST,
    (_S.PREFILLING, _E.FAILED): _S.FAILED,
    (_S.PREFILLING, _E.CANCELLED): _S.CANCELLED,
    (_S.DECODING, _E.COMMITTED): _S.DECODING,
    (_S.DECODING, _E.FINISHED): _S.FINISHED,
    (_S.DECODING, _E.LOST): _S.LOST,
    (_S.DECODING, _E.FAILED): _S.FAILED,
    (_S.DECODING, _E.CANCELLED): _S.CANCELLED,
    (_S.LOST, _E.PLACED): _S.STARTING,
    (_S.LOST, _E.FAILED): _S.FAILED,
    (_S.LOST, _E.CANCELLED): _S.CANCELLED,
}


class IllegalTransition(Exception):
    """An event that cannot happen in this state; a worker broke the protocol, or we did."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"a request that is {state.value} cannot be {event.value}")
        self.state = state
        self.event = event


@dataclass(frozen=True, slots=True)
class Moment:
    """One line of a story."""

    at_s: float  # on the router's clock
    event: Event
    state: State  # after the event
    note: str


@dataclass(slots=True)
class Life:
    """The state of one request, and how it came there. Placements are ids for people to read."""

    request_id: str
    state: State = State.QUEUED
    attempt: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    status: str = ""  # name of the gRPC status it ended with
    story: deque[Moment] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def is_ended(self) -> bool:
        """No event can follow."""
        return self.state in ENDED

    def handle(self, event: Event, now: float, note: str = "") -> State:
        """Moves on `event`; raises `IllegalTransition` naming state and event."""
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise IllegalTransition(self.state, event)
        self.state = state
        self.story.append(Moment(now, event, state, note))
        return state

    def place(self, prefill_worker: str, decode_worker: str, now: float) -> int:
        """Begins the next attempt on these workers ("" where decode prefills); returns its number.

        The number rises before anything is sent, so nothing of an earlier attempt is taken."""
        self.handle(Event.PLACED, now, f"{prefill_worker or 'local'} -> {decode_worker}")
        self.attempt += 1
        self.prefill_worker, self.decode_worker = prefill_worker, decode_worker
        return self.attempt

    def tell(self) -> str:
        """The story in one line, times relative to its first event."""
        if not self.story:
            return "nothing happened"
        start = self.story[0].at_s
        return ", ".join(
            f"{m.event.value}{f' ({m.note})' if m.note else ''} +{m.at_s - start:.3f}s"
            for m in self.story
        )
