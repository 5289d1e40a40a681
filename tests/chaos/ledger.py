"""Records of a run: every request with everything its client received, every fault with its
evidence, and the fleet before and after. Plain data; `verdict.py` finds the errors in it.

All moments are seconds of one monotonic clock, the one of the process that sent the requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from chaos.plan import Fault


class Mode(Enum):
    """How a request is sent."""

    UNARY = "unary"
    STREAM = "stream"
    UNARY_CANCELLED = "unary, cancelled"  # by the client, some time after it was sent
    STREAM_CANCELLED = "stream, cancelled"  # by the client, after some blocks

    @property
    def is_cancelled(self) -> bool:
        """Whether the client does not wait for the answer's end."""
        return self in (Mode.UNARY_CANCELLED, Mode.STREAM_CANCELLED)

    @property
    def is_streamed(self) -> bool:
        """Whether blocks come as they are final."""
        return self in (Mode.STREAM, Mode.STREAM_CANCELLED)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: int  # of the public enumeration


@dataclass(frozen=True, slots=True)
class Commit:
    """Final tokens as a client received them; of a unary answer all together."""

    at_s: float
    offset: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer as its client received it."""

    at_s: float
    finish_reason: int
    num_tokens: int


@dataclass(slots=True)
class Try:
    """A try that ended badly, after which the client asked again under the same id."""

    at_s: float
    status: str
    events: list[Commit | Finish]


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request and its responses, in order; `events` are those of the last attempt."""

    number: int
    job: int  # the index of its undisturbed answer
    mode: Mode
    began_s: float
    events: list[Commit | Finish] = field(default_factory=list)
    ended_s: float | None = None  # None while it runs
    status: str = ""  # name of the gRPC status it ended with
    details: str = ""
    earlier: list[Try] = field(default_factory=list)
    attempts: int = 0  # of the router; 0 if it was not called
    workers: str = ""  # of the last one

    @property
    def name(self) -> str:
        """Its request id."""
        return f"chaos-{self.number}"

    def begin_again(self, status: str, at_s: float) -> None:
        """This try ended so, and another one follows."""
        self.earlier.append(Try(at_s, status, self.events))
        self.events = []

    @property
    def commits(self) -> list[Commit]:
        """All tokens that came."""
        return [event for event in self.events if isinstance(event, Commit)]

    @property
    def finishes(self) -> list[Finish]:
        """All ends that were received; exactly one is right."""
        return [event for event in self.events if isinstance(event, Finish)]


@dataclass(frozen=True, slots=True)
class Standing:
    """Place of a request just before a fault."""

    number: int
    state: str  # seen from the fault's target


@dataclass(slots=True, kw_only=True)
class Injected:
    """A fault that was carried out."""

    fault: Fault
    at_s: float
    evidence: str  # evidence that it happened; empty if it did not
    running: list[Standing] = field(default_factory=list)
    recovered_s: float | None = None  # from the fault until the target was ready; None: never


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """One worker, from its own report and from its kernel."""

    is_ready: bool  # from the router's list
    held_pages: int
    quarantined_pages: int
    requests: int
    tasks: int
    descriptors: int  # of front and engine


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """An idle fleet."""

    workers: dict[str, WorkerState]
    router_descriptors: int  # of all routers together
    router_bytes: int  # resident memory
    running_keys: tuple[str, ...]  # in Redis, of requests without an end
    lasting_keys: tuple[str, ...]  # in Redis, that would never expire; bounded indexes left out


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Everything about one run."""

    seed: int
    connector: str
    model: str = "tiny"  # or bundled
    all_cancel: bool = False  # every client breaks off
    epoch_s: float = 0.0  # the wall clock when the monotonic one was 0, to find moments in logs
    planned: int = 0  # faults
    fault_s: float = math.inf  # no fault begins after so many seconds
    expected: list[Answer] = field(default_factory=list)  # by job, from the undisturbed fleet
    later: list[Answer] = field(default_factory=list)  # the same, once all faults are over
    solutions: list[str] = field(default_factory=list)  # right answers by job, where there are any
    exchanges: list[Exchange] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    before: FleetState | None = None
    after: FleetState | None = None

    def right(self, answers: Sequence[Answer]) -> int:
        """How many of the answers to all jobs are right."""
        pairs = zip(answers, self.solutions, strict=False)
        return sum(answer.text.strip() == solution.strip() for answer, solution in pairs)

    def in_flight(self) -> list[Exchange]:
        """Requests that have not ended; also while others are added."""
        return [one for one in list(self.exchanges[-1000:]) if one.ended_s is None]
