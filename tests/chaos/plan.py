"""Which faults happen, in which order, drawn from a seed; plain data.

Not here: when the fleet may bear the next one (`injector.py`).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from fault_proxy import Harm


class Kind(Enum):
    """A fault of a process, or of the calls to a worker."""

    ENGINE_KILLED = "engine killed"
    OTHERS_KILLED = "engines of all others of its kind killed at once"
    ENGINE_PAUSED = "engine paused"
    FRONT_KILLED = "front killed"
    FRONT_PAUSED = "front paused"
    WORKER_DRAINED = "worker told to end"
    ROUTER_KILLED = "router killed"
    LINK_CUT = "link cut"
    LINK_TRUNCATED = "link truncated"
    LINK_SLOWED = "link slowed"
    LINK_DELAYED = "link delayed"
    REDIS_KILLED = "Redis killed"  # and of each replacement, as long as it lasts
    REDIS_PAUSED = "Redis paused"
    REDIS_EMPTIED = "Redis emptied"
    REDIS_ROLLED_BACK = "Redis rolled back"
    NETWORK_CUT = "network cut"
    NETWORK_SLOWED = "network slowed"


OF_WORKERS = frozenset({Kind.ENGINE_KILLED, Kind.OTHERS_KILLED, Kind.FRONT_KILLED})
KILLS = OF_WORKERS | {Kind.ROUTER_KILLED, Kind.REDIS_KILLED}
PAUSES = frozenset({Kind.ENGINE_PAUSED, Kind.FRONT_PAUSED, Kind.REDIS_PAUSED})
OF_REDIS = frozenset(
    {Kind.REDIS_KILLED, Kind.REDIS_PAUSED, Kind.REDIS_EMPTIED, Kind.REDIS_ROLLED_BACK}
)
OF_LINKS: dict[Kind, Harm] = {
    Kind.LINK_CUT: Harm.CUT,
    Kind.LINK_TRUNCATED: Harm.TRUNCATED,
    Kind.LINK_SLOWED: Harm.SLOWED,
    Kind.LINK_DELAYED: Harm.DELAYED,
}
OF_NETWORKS = frozenset({Kind.NETWORK_CUT, Kind.NETWORK_SLOWED})  # `network.py`
LASTING = PAUSES | OF_LINKS.keys() | {Kind.REDIS_KILLED, Kind.REDIS_ROLLED_BACK}
LONGEST_PAUSE_S = 8.0  # longer than a lease, and than an engine may be silent
LONGEST_HARM_S = 3.0  # on a link: about as long as a silent connection is kept
MEAN_LULL_S = 0.5


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It comes `lull_s` after the fleet can bear it; some last for `hold_s`."""

    kind: Kind
    target: str  # a worker, a router, or "redis"; of OTHERS_KILLED the one that is left
    lull_s: float
    hold_s: float = 0.0

    @property
    def role(self) -> str:
        """prefill, decode, router or redis."""
        return self.target.partition("-")[0]


@dataclass(frozen=True, slots=True)
class Targets:
    """The names of a fleet's processes."""

    prefill: Sequence[str]
    decode: Sequence[str]
    routers: Sequence[str]

    @property
    def workers(self) -> list[str]:
        """Of either kind."""
        return [*self.prefill, *self.decode]


def targets_of(prefill: int, decode: int) -> Targets:
    """Of a fleet of so many workers and two routers, as `effuse up` names them."""
    return Targets(
        prefill=[f"prefill-{number}" for number in range(prefill)],
        decode=[f"decode-{number}" for number in range(decode)],
        routers=("router-0", "router-1"),
    )


def draw_plan(
    seed: int,
    kills: int,
    targets: Targets,
    *,
    only: Collection[Kind] = (),
    hold_s: float | None = None,
) -> list[Fault]:
    """Faults with `kills` kills among them, the last one a kill. They are dealt from decks, each of
    which has every kind, and a kill of every engine. With `only` there are only these kinds, as
    many of them. Lasting faults take `hold_s` seconds, or a random time.
    """
    chance = random.Random(f"{seed} faults")
    plan: list[Fault] = []
    left = kills
    while left:
        for kind, target in _deck(chance, targets):
            if only and kind not in only:
                continue
            lasts_s = chance.uniform(0.2, _longest_s(kind)) if kind in LASTING else 0.0
            if lasts_s and hold_s is not None:
                lasts_s = hold_s
            plan.append(Fault(kind, target, chance.expovariate(1 / MEAN_LULL_S), lasts_s))
            left -= kind in (only or KILLS)
            if not left:
                break
    return plan


def _longest_s(kind: Kind) -> float:
    return LONGEST_HARM_S if kind in OF_LINKS else LONGEST_PAUSE_S


def _deck(chance: random.Random, targets: Targets) -> Iterator[tuple[Kind, str]]:
    cards = [(Kind.ENGINE_KILLED, name) for name in targets.workers]
    of_each = (targets.prefill, targets.decode)
    cards += [(Kind.FRONT_KILLED, chance.choice(names)) for names in of_each]
    cards.append((Kind.OTHERS_KILLED, chance.choice(targets.decode)))
    cards.append((Kind.ROUTER_KILLED, chance.choice(targets.routers)))
    of_workers = (Kind.WORKER_DRAINED, Kind.ENGINE_PAUSED, Kind.FRONT_PAUSED, *OF_LINKS)
    cards += [(kind, chance.choice(targets.workers)) for kind in of_workers]
    cards += [(kind, "redis") for kind in Kind if kind in OF_REDIS]
    chance.shuffle(cards)
    return iter(cards)
