"""Which faults strike, and when: drawn from a seed. Those that last end by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from .clients import Clients
from .clock import Clock
from .fleet import REDIS, Fleet

UNTIL_S = 3.0  # when the last one may begin


@dataclass(slots=True)
class Faults:
    """Strikes a fleet; each fault is one method."""

    fleet: Fleet
    clients: Clients
    clock: Clock
    counts: Counter[str] = field(default_factory=Counter)

    def plan(self, count: int) -> None:
        """Has so many faults strike."""
        for _ in range(count):
            self.clock.after(self.clock.draw.uniform(0.0, UNTIL_S), self._strike)

    def _strike(self) -> None:
        fault = self.clock.draw.choice(FAULTS)
        name = fault.__name__
        self.counts[name] += 1
        self.clock.note(f"FAULT {name}")
        fault(self)

    def _worker(self) -> str:
        """Any worker; it is troubled from now on."""
        worker_id = self.clock.draw.choice(sorted(self.fleet.fronts))
        self.fleet.troubled.add(worker_id)
        return worker_id

    def _hosts(self) -> list[str]:
        """Of workers and routers."""
        return [*sorted(self.fleet.fronts), *(router.host for router in self.clients.routers)]

    def engine_dies(self) -> None:
        """A crash, which its front notices immediately."""
        front = self.fleet.fronts[self._worker()]
        if front.engine is not None:
            front.engine.die()
            front.when_awake(lambda: front.lose_engine("it has crashed"))

    def worker_dies(self) -> None:
        """A pod is gone; another one comes."""
        self.fleet.fronts[self._worker()].die()

    def engine_pauses(self) -> None:
        """An engine stands still, perhaps for longer than its front has patience."""
        front = self.fleet.fronts[self._worker()]
        if front.engine is not None:
            front.engine.pause(self.clock.draw.uniform(0.05, 3.0))

    def host_pauses(self) -> None:
        """A machine stands still."""
        front, seconds = self.fleet.fronts[self._worker()], self.clock.draw.uniform(0.05, 4.0)
        front.pause(seconds)
        if front.engine is not None:
            front.engine.pause(seconds)

    def connector_sticks(self) -> None:
        """A transfer call does not come back for a while."""
        front = self.fleet.fronts[self._worker()]
        if front.engine is not None:
            front.engine.stick(self.clock.draw.uniform(0.05, 2.5))

    def link_is_cut(self) -> None:
        """Two hosts do not reach each other."""
        draw = self.clock.draw
        one, other = draw.sample(self._hosts(), 2)
        self.fleet.network.cut(one, other, draw.uniform(0.05, 4.0))

    def link_is_slow(self) -> None:
        """Messages between two hosts arrive much later, long after their sender may have died."""
        draw = self.clock.draw
        one, other = draw.sample(self._hosts(), 2)
        self.fleet.network.slow(one, other, draw.uniform(0.1, 2.0), draw.uniform(0.1, 2.0))

    def connection_breaks(self) -> None:
        """One connection is reset."""
        self.fleet.network.break_one(self._worker())

    def worker_is_unheard(self) -> None:
        """A worker does not reach Redis, so that its lease runs out."""
        self.fleet.network.cut(self._worker(), REDIS, self.clock.draw.uniform(0.5, 5.0))

    def redis_is_gone(self) -> None:
        """Redis stands still, and may come back empty."""
        registry, draw = self.fleet.registry, self.clock.draw
        self.fleet.troubled.add(REDIS)
        registry.down_until = self.clock.now + draw.uniform(0.5, 5.0)
        if draw.random() < 0.5:
            registry.forget()
            self.clients.claims.forget()

    def router_dies(self) -> None:
        """A router is gone; another one comes."""
        self.clients.lose_router()

    def router_is_unheard(self) -> None:
        """A router does not reach Redis, so that its lease expires and others run its requests."""
        router = self.clock.draw.choice(self.clients.routers)
        self.fleet.troubled.add(REDIS)
        self.fleet.network.cut(router.host, REDIS, self.clock.draw.uniform(0.5, 5.0))

    def client_leaves(self) -> None:
        """A client cancels."""
        if waiting := self.clients.waiting():
            self.clients.leave(self.clock.draw.choice(waiting))


FAULTS: tuple[Callable[[Faults], None], ...] = (
    Faults.engine_dies,
    Faults.engine_dies,
    Faults.worker_dies,
    Faults.engine_pauses,
    Faults.host_pauses,
    Faults.connector_sticks,
    Faults.link_is_cut,
    Faults.link_is_cut,
    Faults.link_is_slow,
    Faults.connection_breaks,
    Faults.worker_is_unheard,
    Faults.redis_is_gone,
    Faults.router_dies,
    Faults.router_is_unheard,
    Faults.client_leaves,
    Faults.client_leaves,
)
