"""A search, nearest first, of every state that two handoffs over one page can come into."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from effuse.kvtransfer.handoff import SenderState
from effuse.kvtransfer.pool import PageState

from .clock import Violation
from .handoffs import OVER, Handoff, Trust, World, has_let_go, moves


@dataclass(frozen=True, slots=True)
class Found:
    """The states that a search has seen."""

    states: int
    steps: int
    depth: int  # of the state that is farthest from the start
    ends: int  # states in which all is over


@dataclass(slots=True, eq=False)
class _Seen:
    """A state, the shortest way to it, and the states from which one step leads to it."""

    world: World
    came_from: _Seen | None = None
    step: str = ""
    before: list[_Seen] = field(default_factory=list)
    can_end: bool = False


def is_end(world: World) -> bool:
    """All is over: the page is free and nothing of either handoff is left."""

    def is_over(one: Handoff) -> bool:
        return one.receiver in OVER and (not one.is_alive or one.sender is SenderState.ENDED)

    is_quiet = is_over(world.first) and is_over(world.second)
    return is_quiet and world.page is PageState.FREE


def search(
    trust: Trust = has_let_go, most_depth: int = 1000, *, is_two_sided: bool = False
) -> Found:
    """Looks at all states within a depth, nearest first. Raises Violation, with the way there, for
    one that breaks a table or an invariant and, where the depth leaves none out, for one from which
    no end can be reached."""
    start = _Seen(World(is_two_sided=is_two_sided))
    seen = {start.world: start}
    queue, num_steps, depth, is_whole = deque([(start, 0)]), 0, 0, True
    while queue:
        at, depth = queue.popleft()
        if depth == most_depth:
            is_whole = False
            continue
        for name, move in moves(at.world, trust):
            num_steps += 1
            try:
                after = move()
            except Violation as violation:
                raise Violation(f"{violation}: {_way(at)}, {name}") from None
            known = seen.get(after)  # once, because hashing a world takes most of the time
            if known is None:
                known = seen[after] = _Seen(after, at, name)
                queue.append((known, depth + 1))
            known.before.append(at)
    ends = [one for one in seen.values() if is_end(one.world)]
    if is_whole:
        _check_all_can_end(seen.values(), ends)
    return Found(len(seen), num_steps, depth, len(ends))


def _check_all_can_end(seen: Iterable[_Seen], ends: list[_Seen]) -> None:
    queue = deque(ends)
    while queue:
        one = queue.popleft()
        if not one.can_end:
            one.can_end = True
            queue.extend(one.before)
    for one in seen:
        if not one.can_end:
            raise Violation(f"never ends: {_way(one)}")


def _way(seen: _Seen) -> str:
    names: list[str] = []
    while seen.came_from is not None:
        names.append(seen.step)
        seen = seen.came_from
    return ", ".join(reversed(names))
