"""The times that a request should keep, the classes of requests, and the rule of goodput.

The router, `effuse bench` and the benchmarks judge an answer by the same rule: its first block is
in time, and so is every gap between two blocks, as in DistServe (arXiv 2401.09670).
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, cast, get_args

from effuse.config.decoding import Bounds

Priority = Literal["low", "normal", "high"]
"""Which requests go first in a router's queue."""
PRIORITIES: Final[Sequence[str]] = get_args(Priority)
WITHIN: Final = Bounds(0.0, 3600.0, above_low=True)  # seconds
OBJECTIVES: Final[Mapping[str, Bounds]] = {"first_block_within": WITHIN, "gap_within": WITHIN}
"""Objectives of a request by the names of their settings."""
CLASS_FORM: Final = "1 to 64 characters of A-Z a-z 0-9 . _ -"
MOST_CLASSES: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FORM: Final = "NAME:first-block=S,gap=S,priority=low|normal|high"


class Kept(NamedTuple):
    """Which objectives a request kept; None stands for one that it did not have."""

    first_block: bool | None
    gap: bool | None

    @property
    def all(self) -> bool | None:
        """Whether it kept each of its objectives; None if it had none."""
        had = [one for one in self if one is not None]
        return all(had) if had else None


@dataclass(frozen=True, slots=True)
class Goals:
    """Objectives of one request in seconds; infinity means none."""

    first_block_s: float = math.inf  # from arrival
    gap_s: float = math.inf  # every gap between two blocks

    def or_else(self, others: "Goals") -> "Goals":
        """The same, with those of `others` in the place of those that it does not have."""
        pairs = ((self.first_block_s, others.first_block_s), (self.gap_s, others.gap_s))
        return Goals(*(other if math.isinf(own) else own for own, other in pairs))

    def kept(self, first_block_s: float, gaps_s: Iterable[float]) -> Kept:
        """Which objectives an answer with these times in seconds kept."""
        return Kept(
            None if math.isinf(self.first_block_s) else first_block_s <= self.first_block_s,
            None if math.isinf(self.gap_s) else max(gaps_s, default=0.0) <= self.gap_s,
        )

    def missed(self) -> Kept:
        """The same for a request that failed, which kept none of them."""
        return self.kept(math.inf, (math.inf,))


NO_GOALS: Final = Goals()


@dataclass(frozen=True, slots=True)
class RequestClass:
    """A class of requests: its objectives and its priority, unless a request sets its own."""

    goals: Goals = NO_GOALS
    priority: Priority = "normal"


def parse_classes(flag: str, texts: Sequence[str]) -> dict[str, RequestClass]:
    """Classes by name, from texts such as `chat:first-block=0.5,gap=0.1,priority=high`. Raises
    ValueError that names `flag` and the accepted form."""
    found: dict[str, RequestClass] = {}
    for text in texts:
        name, _, rest = text.partition(":")
        if not _NAME.fullmatch(name):
            raise ValueError(f"{flag}: expected a name of {CLASS_FORM}, got {name[:80]!a}")
        if name in found:
            raise ValueError(f"{flag}: expected different names, got {name!r} twice")
        found[name] = _parse_class(flag, text, rest)
    if len(found) > MOST_CLASSES:
        raise ValueError(f"{flag}: expected at most {MOST_CLASSES} classes, got {len(found)}")
    return found


def _parse_class(flag: str, text: str, settings: str) -> RequestClass:
    given: dict[str, str] = {}
    for one in filter(None, settings.split(",")):
        key, equals, value = one.partition("=")
        if not equals or key in given or key not in ("first-block", "gap", "priority"):
            raise ValueError(f"{flag}: expected {_FORM}, got {text[:200]!a}")
        given[key] = value
    priority = given.get("priority", "normal")
    if priority not in PRIORITIES:
        form = ", ".join(PRIORITIES)
        raise ValueError(f"{flag}: expected one of {form} as a priority, got {priority[:80]!a}")
    times = (_seconds(flag, given[key]) if key in given else math.inf
             for key in ("first-block", "gap"))  # fmt: skip
    return RequestClass(Goals(*times), cast(Priority, priority))


def _seconds(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if value not in WITHIN:
        raise ValueError(f"{flag}: expected {WITHIN.form}, as seconds, got {text[:80]!a}")
    return value
