"""Runs in which clients cancel at moments that may be those of any event: whatever state a request
and its handoffs are in then, nothing of them is left at the end.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

from .run import Run

MOMENTS = 6  # of a run, at which one client cancels if any waits
FIRST, LAST = 80, 480  # events; earlier there are no requests, later few runs go on

States = Counter[Enum]
"""States of cancelled requests and of their handoffs at either end, with the number of cancels that
met them.
"""


class Cancelled(Run):
    """One run with cancels."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.num_cancels = 0
        self.met: States = Counter()
        for moment in self.clock.draw.sample(range(FIRST, LAST), MOMENTS):
            self.clock.between(moment, self._cancel)

    def _cancel(self) -> None:
        waiting = self.clients.waiting()
        if not waiting:
            return
        self.num_cancels += 1
        question = self.clock.draw.choice(waiting)
        requests = [one for router in self.clients.routers for one in router.requests]
        self.met.update(one.request.answer.state for one in requests if one.is_of(question))
        for engine in self.fleet.engines.values():
            states = engine.transfers().items() if engine.is_alive else ()
            self.met.update(state for name, state in states if name.startswith(f"{question.id}-"))
        self.clients.leave(question)


def cancel(count: int, first_seed: int = 0) -> States:
    """So many cancels at least; the states that they met. Raises Broken."""
    met: States = Counter()
    seed = first_seed
    while count > 0:
        run = Cancelled(seed)
        run.go()
        met += run.met
        count -= run.num_cancels
        seed += 1
    return met
