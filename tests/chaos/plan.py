"""Which faults happen, in which order, drawn from a seed; plain data.

Not here: when the fleet may bear the next one (`injector.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What is done to a process."""

    ENGINE_KILLED = "engine killed"
    ENGINE_PAUSED = "engine paused"
    FRONT_KILLED = "front killed"
    FRONT_PAUSED = "front paused"
    WORKER_DRAINED = "worker told to end"
    REDIS_KILLED = "Redis killed"
    REDIS_PAUSED = "Redis paused"
    REDIS_EMPTIED = "Redis emptied"


KILLS = frozenset({Kind.ENGINE_KILLED, Kind.FRONT_KILLED, Kind.REDIS_KILLED})
PAUSES = frozenset({Kind.ENGINE_PAUSED, Kind.FRONT_PAUSED, Kind.REDIS_PAUSED})
OF_REDIS = frozenset({Kind.REDIS_KILLED, Kind.REDIS_PAUSED, Kind.REDIS_EMPTIED})
LONGEST_PAUSE_S = 8.0  # longer than a lease, and than an engine may be silent
MEAN_LULL_S = 0.5


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It comes `lull_s` after the fleet can bear it, and a pause lasts `hold_s`."""

    kind: Kind
    target: str  # a worker, or "redis"
    lull_s: float
    hold_s: float = 0.0

    @property
    def role(self) -> str:
        """prefill, decode or redis."""
        return self.target.partition("-")[0]


def draw_plan(seed: int, kills: int, prefill: Sequence[str], decode: Sequence[str]) -> list[Fault]:
    """Faults with `kills` kills among them, the last one a kill. They are dealt from decks, each of
    which has every kind, and a kill of every engine."""
    chance = random.Random(f"{seed} faults")
    plan: list[Fault] = []
    left = kills
    while left:
        for kind, target in _deck(chance, prefill, decode):
            hold_s = chance.uniform(0.2, LONGEST_PAUSE_S) if kind in PAUSES else 0.0
            plan.append(Fault(kind, target, chance.expovariate(1 / MEAN_LULL_S), hold_s))
            left -= kind in KILLS
            if not left:
                break
    return plan


def _deck(
    chance: random.Random, prefill: Sequence[str], decode: Sequence[str]
) -> Iterator[tuple[Kind, str]]:
    workers = [*prefill, *decode]
    cards = [(Kind.ENGINE_KILLED, name) for name in workers]
    cards += [(Kind.FRONT_KILLED, chance.choice(names)) for names in (prefill, decode)]
    cards.append((Kind.WORKER_DRAINED, chance.choice(workers)))
    cards += [(kind, chance.choice(workers)) for kind in (Kind.ENGINE_PAUSED, Kind.FRONT_PAUSED)]
    cards += [(kind, "redis") for kind in Kind if kind in OF_REDIS]
    chance.shuffle(cards)
    return iter(cards)
