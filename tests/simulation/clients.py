"""Clients that call one of several routers, and another one under the same id until they have the
answer: when their router has died, or reports that another one runs it. Some call two together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from effuse.config.decoding import DecodeSettings

from .claims import Claims
from .clock import Clock, Violation
from .fleet import REDIS, Fleet
from .pages import tag

if TYPE_CHECKING:
    from .router import Router

AGAIN_S = 0.1, 0.6  # after which a client asks again


@dataclass(frozen=True, slots=True)
class Question:
    """A client's request."""

    number: int
    prompt_len: int
    max_tokens: int
    settings: DecodeSettings

    @property
    def id(self) -> str:
        """Its request id."""
        return f"r{self.number}"

    def prompt(self) -> tuple[int, ...]:
        """Its token ids."""
        return tuple(tag(self.number, position) for position in range(self.prompt_len))

    def answer(self) -> list[int]:
        """The only right one."""
        end = self.prompt_len + self.max_tokens
        return [tag(self.number, position) for position in range(self.prompt_len, end)]


@dataclass(slots=True)
class Clients:
    """All of them, with the routers that they ask."""

    fleet: Fleet
    routers: list[Router] = field(default_factory=list)
    claims: Claims = field(init=False)
    askers: list[Asker] = field(default_factory=list)
    # The last run of each request id, and its seed.
    runs: dict[str, tuple[Router, int]] = field(default_factory=dict)
    num_routers_lost: int = 0

    def __post_init__(self) -> None:
        self.claims = Claims(self.fleet.registry)

    @property
    def clock(self) -> Clock:
        """The run's."""
        return self.fleet.clock

    @property
    def are_served(self) -> bool:
        """Every client that stayed has an answer."""
        return all(asker.is_over for asker in self.askers)

    def running_keys(self) -> list[str]:
        """Placements in Redis of requests that a living router runs."""
        alive = {router.id for router in self.routers}
        return [
            name
            for name, held in self.claims.placements.items()
            if held.record.state == "running" and held.record.router_id in alive
        ]

    def ask(self, question: Question) -> None:
        """A client sends a request, and perhaps another one the same under the same id."""
        draw = self.clock.draw
        self._ask(question)
        if len(self.routers) > 1 and draw.random() < 0.3:
            self.clock.after(draw.uniform(0.0, 1.0), lambda: self._ask(question))

    def _ask(self, question: Question) -> None:
        if any(one.has_left for one in self.askers if one.question is question):
            return
        self.askers.append(Asker(self, question, self.clock.draw.randrange(len(self.routers))))
        self.askers[-1].ask()

    def waiting(self) -> list[Question]:
        """Requests without an answer."""
        return [asker.question for asker in self.askers if not asker.is_over]

    def leave(self, question: Question) -> None:
        """All clients that wait for this answer cancel."""
        self.clock.note(f"{question.id} is cancelled")
        for asker in self.askers:
            asker.has_left |= asker.question is question and not asker.is_over
        for router in self.routers:
            router.cancel(question.id)

    def lose_router(self) -> None:
        """A router dies, and another one comes in its place."""
        index = self.clock.draw.randrange(len(self.routers))
        router = self.routers[index]
        if not router.is_alive:
            return
        self.num_routers_lost += 1
        router.die()

        def replace() -> None:
            self.routers[index] = router.successor()

        self.clock.after(self.clock.draw.uniform(0.2, 2.0), replace)

    def begin_run(self, request_id: str, router: Router, seed: int) -> None:
        """Raises Violation if a living router runs it, or has answered it, and if it is run again
        with another seed.
        """
        before, self.runs[request_id] = self.runs.get(request_id), (router, seed)
        if before is None or not self._can_tell:
            return
        other, its_seed = before
        if other.is_alive:
            raise Violation(f"{request_id} runs at {router.id}, and ran at {other.id}, which lives")
        if seed != its_seed:
            raise Violation(f"{request_id} is run anew with another seed")

    def check(self, served: Asker) -> None:
        """Raises Violation if two runs answered two calls without a router's death."""
        runs = {one.run for one in self.askers if one.question is served.question and one.run}
        if len(runs) > 1 and self._can_tell and not self.num_routers_lost:
            raise Violation(f"{served.question.id} was answered by {sorted(runs)}")

    @property
    def _can_tell(self) -> bool:
        """Whether routers knew of each other all the time."""
        return REDIS not in self.fleet.troubled


@dataclass(eq=False, slots=True)
class Asker:
    """One caller, which waits for one router at a time."""

    clients: Clients
    question: Question
    index: int  # of the router that is asked next
    num_tries: int = 0
    run: str = ""  # that answered
    has_left: bool = False
    _router: Router | None = None

    @property
    def is_over(self) -> bool:
        """It has its answer, or wants none."""
        return self.has_left or bool(self.run)

    def ask(self) -> None:
        """Calls the next router in turn; a missing one refuses the connection."""
        if self.is_over:
            return
        self.num_tries += 1
        self._router = self.clients.routers[self.index]
        if self._router.is_alive:
            self._router.serve(self)
        else:
            self.lose(self._router)

    def hear(self, router: Router, run: str, token_ids: list[int]) -> None:
        """An answer; of a router that was given up it does not come through."""
        if router is not self._router or self.is_over:
            return
        if token_ids != self.question.answer():
            raise Violation(f"{self.question.id} was answered with {token_ids}")
        self.run = run
        self.clients.clock.note(f"{self.question.id} is answered by {run}")
        self.clients.check(self)

    def lose(self, router: Router) -> None:
        """No answer comes from this router: it has died, or it has refused. Another one is next."""
        if router is not self._router:
            return
        self._router = None
        self.index = (self.index + 1) % len(self.clients.routers)
        self.clients.clock.after(self.clients.clock.draw.uniform(*AGAIN_S), self.ask)
