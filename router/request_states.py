"""The states of a request, or of one of several answers to it: a table of states and events.

Pure. Not here: the data of a request in each of them (`request.py`)."""

from collections.abc import Mapping
from enum import Enum
from typing import Final


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

    __hash__ = object.__hash__  # that of Enum is a Python function, called at each event


class Event(Enum):
    """An event in the life of a request."""

    PLACED = "placed"  # an attempt begins on chosen workers
    RESERVED = "reserved"
    VERIFIED = "verified"
    COMMITTED = "committed"
    LOST = "lost"  # the attempt failed in a way that another one may not
    FINISHED = "finished"  # also of a request whose answers have, or whose answer was kept
    FAILED = "failed"
    CANCELLED = "cancelled"  # by the client or by its deadline

    __hash__ = object.__hash__


_S, _E = State, Event
ENDED: Final = frozenset({_S.FINISHED, _S.FAILED, _S.CANCELLED})

TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = {
    (_S.QUEUED, _E.PLACED): _S.STARTING,
    (_S.QUEUED, _E.FINISHED): _S.FINISHED,
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


class IllegalRequestEvent(Exception):
    """An event that cannot happen in this state; a worker broke the protocol, or we did."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(
            f"a request in state {state.value} does not accept the event {event.value}"
        )
