"""A search, nearest first, of every state that two handoffs over one page can come into."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

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
    start = World(is_two_sided=is_two_sided)
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    before: dict[World, list[World]] = {start: []}
    queue, num_steps, depth, is_whole = deque([(start, 0)]), 0, 0, True
    while queue:
        world, depth = queue.popleft()
        if depth == most_depth:
            is_whole = False
            continue
        for name, move in moves(world, trust):
            num_steps += 1
            try:
                after = move()
            except Violation as violation:
                raise Violation(f"{violation}: {_way(came_from, world)}, {name}") from None
            known = before.get(after)  # once, because hashing a world takes most of the time
            if known is None:
                known = before[after] = []
                came_from[after] = world, name
                queue.append((after, depth + 1))
            known.append(world)
    ends = [world for world in before if is_end(world)]
    if is_whole:
        _check_all_can_end(came_from, before, ends)
    return Found(len(before), num_steps, depth, len(ends))


def _check_all_can_end(
    came_from: dict[World, tuple[World, str] | None],
    before: dict[World, list[World]],
    ends: list[World],
) -> None:
    can_end, queue = set(ends), deque(ends)
    while queue:
        for world in before[queue.popleft()]:
            if world not in can_end:
                can_end.add(world)
                queue.append(world)
    for world in before:
        if world not in can_end:
            raise Violation(f"never ends: {_way(came_from, world)}")


def _way(came_from: dict[World, tuple[World, str] | None], world: World) -> str:
    names: list[str] = []
    step = came_from[world]
    while step is not None:
        world, name = step
        names.append(name)
        step = came_from[world]
    return ", ".join(reversed(names))
