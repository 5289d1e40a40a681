"""Requests that engines die of: they run beside others, then without others, then are refused.

An engine ends with all requests in it, so one death is weak evidence. After two of them a request
runs without others. If that engine dies too, the request was the cause, of the earlier deaths as
well, and requests beside it are cleared. A request that survives without others is cleared, too. An
engine that was killed or hung counts half while that happens to engines without the request: then
the cause is outside. If it happens only to engines with it, the request may use up their memory. A
digest of its question identifies a request, because a client may send it again under another id.
The verdicts are pure, with the clock as an argument; `PoisonGuard` acts on them. Not here: keeping
workers free (`fleet.py`)."""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

from effuse.placement.records import Kind, Role
from effuse.placement.store import Store, StoreUnavailable
from effuse.protos.errors import EngineLost, Poisonous
from effuse.router.client import failed
from effuse.router.failures import Failure
from effuse.router.fleet import RoutedFleet
from effuse.router.metrics import RouterMetrics
from effuse.router.policy import WorkerLife, is_alone
from effuse.router.request import Request

LOG: Final = logging.getLogger(__name__)
Key = TypeVar("Key")
Value = TypeVar("Value")

MOST_SHARED: Final = 2
"""Engines that may die of a request beside others; from then on it runs alone."""

OUTSIDE_COUNTS: Final = 0.5
"""What an engine that was killed or hung counts, of one that died by itself, while that happens to
engines that the request is not in."""

HELD_S: Final = 600.0
"""How long deaths are held against a request, from the last one on."""

REFUSED_S: Final = 600.0
"""How long a request that engines died of is refused."""

MOST_KEPT: Final = 1024
"""Requests that engines died running, requests that are refused, and engines that were killed or
hung; the oldest is forgotten."""


class Treatment(Enum):
    """How a request is run."""

    SHARED = "runs beside others"
    ALONE = "now runs alone"  # its next engine runs nothing else meanwhile
    REFUSED = "is refused"


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """An engine that died while a request ran in it."""

    life: WorkerLife
    role: Role
    num_tokens: int = 0  # of the answer, written by then
    was_alone: bool = False
    may_be_outside: bool = False  # it was killed or hung, and did not die by itself


def treatment(deaths: Sequence[EngineDeath], outside_counts: float = 1.0) -> Treatment:
    """The treatment of a request after the deaths of engines that it ran in, in that order, each
    one once; one that was killed or hung counts `outside_counts`."""
    total = alone = 0.0
    for death, weight in zip(deaths, _weights(deaths, outside_counts), strict=True):
        if total >= MOST_SHARED and death.was_alone:
            alone += weight
        total += weight
    if alone >= 1:
        return Treatment.REFUSED
    return Treatment.SHARED if total < MOST_SHARED else Treatment.ALONE


def _weights(deaths: Sequence[EngineDeath], outside_counts: float) -> list[float]:
    """What each death counts. One that may be from outside counts nothing if the request wrote more
    in another engine later."""
    found, furthest = list[float](), -1
    for death in reversed(deaths):
        is_over = death.may_be_outside and death.num_tokens < furthest
        found.append(0.0 if is_over else outside_counts if death.may_be_outside else 1.0)
        furthest = max(furthest, death.num_tokens)
    return found[::-1]


class Verdicts:
    """One router's account of requests by their digests. `now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        # The deaths under a request, and until when they are held against it.
        self._cases: OrderedDict[str, tuple[tuple[EngineDeath, ...], float]] = OrderedDict()
        self._refused_until: OrderedDict[str, float] = OrderedDict()
        self._outside_until: OrderedDict[WorkerLife, float] = OrderedDict()  # remembered until

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held against any request."""
        return not self._cases and not self._refused_until

    def kinds_alone(self, digest: str) -> frozenset[Kind]:
        """For which work the request is to run alone, none for most: always in the one that
        decodes, which may have to prefill for itself; in the one that prefills where such an engine
        died."""
        deaths = self._deaths(digest)
        if treatment(deaths, self._outside_counts(deaths)) is Treatment.SHARED:
            return frozenset()
        has_prefill = any(death.role != "decode" for death in deaths)
        return frozenset[Kind]({"decode", "prefill"} if has_prefill else {"decode"})

    def may_share(self, digest: str) -> bool:
        """Whether a request that is to run alone may run beside others once more, and only once,
        rather than wait long: its engines were killed or hung, and so were others at that time."""
        deaths = self._deaths(digest)
        counts = self._outside_counts(deaths)
        is_outside = counts < 1 and all(death.may_be_outside for death in deaths)
        return is_outside and sum(_weights(deaths, counts)) - MOST_SHARED < counts

    def refused_s(self, digest: str) -> float:
        return max(0.0, self._refused_until.get(digest, 0.0) - self._now())

    def refused(self) -> dict[str, float]:
        """All that are refused, with the seconds left. Forgets what is over."""
        now = self._now()
        self._forget(now)
        return {digest: at - now for digest, at in self._refused_until.items()}

    def add_death(self, digest: str, death: EngineDeath) -> Treatment:
        """An engine died while the request ran in it; returns the treatment from now on."""
        earlier = [one for one in self._deaths(digest) if one.life != death.life]
        deaths = (*earlier, death)
        _put(self._cases, digest, (deaths, self._now() + HELD_S))
        if death.may_be_outside:
            self.note_outside(death.life)
        found = treatment(deaths, self._outside_counts(deaths))
        if found is Treatment.REFUSED:
            self._refuse(digest, self._now() + REFUSED_S)
            self._clear_bystanders({one.life for one in deaths})
        return found

    def note_outside(self, life: WorkerLife) -> None:
        """An engine was ended from outside for certain, so that others may have been, too."""
        _put(self._outside_until, life, self._now() + HELD_S)

    def add_survival(self, digest: str, num_tokens: int) -> bool:
        """The request, alone, has written so many tokens. Whether that is more than it had when
        engines died, and so clears it."""
        if num_tokens <= max((one.num_tokens for one in self._deaths(digest)), default=-1):
            return False
        self.clear(digest)
        return True

    def clear(self, digest: str) -> None:
        """The request has been answered: whatever engines died of, it was something else."""
        self._cases.pop(digest, None)

    def merge(self, refused: Mapping[str, float]) -> None:
        """Takes over what another router refuses, for so many seconds."""
        now = self._now()
        for digest, left_s in refused.items():
            until = now + min(left_s, REFUSED_S)
            if digest not in self._refused_until or self._refused_until[digest] <= now:
                self._refuse(digest, until)

    def _deaths(self, digest: str) -> tuple[EngineDeath, ...]:
        deaths, until = self._cases.get(digest, ((), 0.0))
        return deaths if until > self._now() else ()

    def _outside_counts(self, deaths: Sequence[EngineDeath]) -> float:
        """Half, if engines were killed or hung that are not among these."""
        own, now = {death.life for death in deaths}, self._now()
        ended = reversed(self._outside_until.items())
        return OUTSIDE_COUNTS if any(at > now and life not in own for life, at in ended) else 1.0

    def _forget(self, now: float) -> None:
        """Drops what is over, so that later requests are not looked up in vain."""
        for digest in [one for one, (_, until) in self._cases.items() if until <= now]:
            del self._cases[digest]
        for digest in [one for one, until in self._refused_until.items() if until <= now]:
            del self._refused_until[digest]
        for life in [one for one, until in self._outside_until.items() if until <= now]:
            del self._outside_until[life]

    def _refuse(self, digest: str, until: float) -> None:
        self._cases.pop(digest, None)
        _put(self._refused_until, digest, until)

    def _clear_bystanders(self, lives: Collection[WorkerLife]) -> None:
        """What these died of is known now, and that it was nothing from outside."""
        for life in lives:
            self._outside_until.pop(life, None)
        for digest, (deaths, until) in list(self._cases.items()):
            left = tuple(one for one in deaths if one.life not in lives)
            if left:
                self._cases[digest] = left, until
            else:
                del self._cases[digest]


def _put(kept: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    """As the newest of at most `MOST_KEPT`."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > MOST_KEPT:
        kept.popitem(last=False)


class PoisonGuard:
    """Holds engine deaths against requests, and refuses those that engines die of."""

    def __init__(
        self, verdicts: Verdicts, fleet: RoutedFleet, metrics: RouterMetrics, store: Store
    ) -> None:
        self.verdicts = verdicts
        self._fleet = fleet
        self._metrics = metrics
        self._store = store

    def check(self, request: Request) -> None:
        """Raises `Poisonous` if engines died of this request, under any id."""
        if self.verdicts.is_empty:
            return
        left_s = math.ceil(self.verdicts.refused_s(request.digest))
        if not left_s:
            return
        self._metrics.poison.inc()
        why = (
            "engines died every time this request ran in them, the last one while it ran only this "
            f"request; such requests are refused for another {left_s} s"
        )
        raise failed(Poisonous, why, request, {"refused_for_s": str(left_s)})

    def kinds_alone(self, request: Request) -> Collection[Kind]:
        """The work for which a request runs without others; none for most."""
        return () if self.verdicts.is_empty else self.verdicts.kinds_alone(request.digest)

    def note_death(self, request: Request, failure: Failure) -> None:
        """Holds it against a request if an engine died that it ran in, and not from outside."""
        if not isinstance(failure.error, EngineLost):
            return
        worker = failure.worker
        if failure.error.is_outside:
            self.verdicts.note_outside(worker.life)
            return
        death = EngineDeath(
            worker.life,
            worker.role,
            num_tokens=len(request.answer.token_ids),
            was_alone=is_alone(worker, request.attempts.alone),
            may_be_outside=failure.error.may_be_outside,
        )
        treatment = self.verdicts.add_death(request.digest, death)
        if treatment is not Treatment.SHARED:
            name, digest = request.name, request.digest
            LOG.warning("engines died running request %s: %s %s", name, digest, treatment.value)

    def note_survival(self, request: Request) -> None:
        """The request has written tokens: others may join one that ran without them."""
        attempts, num_tokens = request.attempts, len(request.answer.token_ids)
        if attempts.alone and self.verdicts.add_survival(request.digest, num_tokens):
            LOG.info("request %s (%s) is cleared", request.name, request.digest)
            attempts.alone = ()
            self._fleet.release_workers(request.holder)

    def note_answer(self, request: Request) -> None:
        if not self.verdicts.is_empty:
            self.verdicts.clear(request.digest)

    async def share(self) -> None:
        try:
            shared = await self._store.share_refusals(self.verdicts.refused(), MOST_KEPT)
        except StoreUnavailable as error:
            LOG.debug("the list of refused requests is not shared: %s", error)
        else:
            self.verdicts.merge(shared)
