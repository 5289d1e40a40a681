"""One run: a fleet, its requests and its faults, from one seed; and the conditions at its end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

from effuse.config.decoding import DecodeSettings
from effuse.kvtransfer import push
from effuse.router.request_states import State

from .clients import Clients, Question
from .clock import Clock, Violation
from .engine_process import Sizes
from .faults import Faults
from .fleet import ROUTERS, Fleet
from .loop import VirtualLoop
from .mishaps import Mishaps
from .network import Network
from .pages import BLOCK, model_of
from .router import Router
from .transport import Fabric

HORIZON_S = 60.0  # virtual; by then all is over, or something never ends


@dataclass(frozen=True, slots=True)
class Outcome:
    """Properties of a run."""

    seed: int
    faults: Counter[str]
    states: Counter[State]  # of requests
    num_events: int
    num_attempts_lost: int
    seconds: float  # virtual


class Broken(AssertionError):
    """A run with a forbidden event; the text has the command to see it again."""


class Run:
    """One fleet, from its start until nothing is left to happen."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.clock = Clock(seed)
        draw = self.clock.draw
        self.network = Network(self.clock)
        self.mishaps = self._mishaps()
        is_two_sided = draw.random() < 0.35
        fabric = Fabric(
            self.clock,
            self.network,
            self.mishaps,
            is_two_sided,
            lands_by_itself=draw.random() < 0.3,
            leaves_within_s=draw.choice((0.004, 0.004, 0.15)),
            arrives_within_s=draw.choice((0.0, 0.0, 0.4)),
        )
        # Whether no push takes as long as its lease.
        self.is_swift = fabric.leaves_within_s + fabric.arrives_within_s < 0.1
        sizes = Sizes(
            model=model_of(draw.choice(("sdar", "sdar", "llada"))),
            prefill_pages=draw.choice((4, 8)),
            decode_pages=draw.choice((5, 8, 12)),
            budget=draw.choice((12, 16)),
        )
        self.least_bytes = draw.choice((1, 1 << 20))  # whether groups of layers leave one by one
        self.fleet = Fleet(fabric, sizes)
        for index in range(draw.choice((1, 1, 2))):
            self.fleet.add(f"prefill{index}", "prefill")
        for index in range(draw.choice((1, 2, 2, 3))):
            self.fleet.add(f"decode{index}", "decode")
        self.clients = Clients(self.fleet)
        self.faults = Faults(self.fleet, self.clients, self.clock)
        self.num_routers = draw.choice((1, 2))
        self._ask(draw.randint(2, 5))
        self.faults.plan(draw.choice((0, 1, 1, 2, 2, 3, 5)))

    def go(self) -> Outcome:
        """Runs to the end; raises Broken after a violation."""
        try:
            with (
                VirtualLoop(self.clock).running(),
                patch.object(push, "LEAST_BYTES", self.least_bytes),
            ):
                for host in ROUTERS[: self.num_routers]:
                    self.clients.routers.append(Router(self.clients, host))
                self.clock.run(HORIZON_S, self._is_over)
                self._check_end()
        except (Exception, Violation) as error:
            again = f"PYTHONPATH=src:tests python -P -m simulation --seed {self.seed}"
            raise Broken(f"{type(error).__name__}: {error}\n{again}") from error
        return Outcome(
            self.seed,
            self.faults.counts,
            Counter(
                State.CANCELLED if asker.has_left else State.FINISHED
                for asker in self.clients.askers
            ),
            self.clock.num_events,
            sum(router.num_lost for router in self.clients.routers),
            self.clock.now,
        )

    def _mishaps(self) -> Mishaps:
        draw, mishaps = self.clock.draw, Mishaps(self.clock)
        match draw.randrange(12):
            case 0:
                mishaps.damaged = 0.1
            case 1:
                mishaps.confused = 0.1
            case 2:
                mishaps.failed = 0.05
            case 3:
                mishaps.mixed_up = 0.3
            case 4 | 5:
                mishaps.deadly = 0.1
        return mishaps

    def _ask(self, count: int) -> None:
        draw = self.clock.draw
        for number in range(1, count + 1):
            question = Question(
                number,
                prompt_len=draw.randint(1, 11),
                max_tokens=draw.randint(1, 8),
                settings=DecodeSettings(
                    algorithm=draw.choice(("d2f", "block_diffusion")),
                    window=draw.choice((1, 2)),
                    confidence_threshold=draw.choice((0.3, 0.9)),
                    denoising_steps=draw.randint(1, BLOCK),
                ),
            )
            arrives = draw.choice((0.6, draw.uniform(0.6, 3.0)))
            self.clock.after(arrives, partial(self._begin, question))
        self.num_asked, self.num_begun = count, 0

    def _begin(self, question: Question) -> None:
        self.num_begun += 1
        self.clients.ask(question)

    def _is_over(self) -> bool:
        if self.num_begun < self.num_asked or not self.clients.are_served:
            return False
        if not all(router.is_done for router in self.clients.routers):
            return False
        if self.clients.running_keys():
            return False
        return all(front.is_alive and front.is_idle for front in self.fleet.fronts.values())

    def _check_end(self) -> None:
        for asker in self.clients.askers:
            if not asker.is_over:
                raise Violation(f"{asker.question.id} was asked for and is never answered")
        for router in self.clients.routers:
            for routed in router.requests:
                if not routed.request.answer.is_ended:
                    story = routed.request.answer.history()
                    raise Violation(f"{routed.request.id} never ends: {story}")
        if keys := self.clients.running_keys():
            raise Violation(f"Redis still has {keys} as running")
        for front in self.fleet.fronts.values():
            if not front.is_alive or not front.is_idle:
                raise Violation(f"{front.worker_id} never comes to rest: {list(front.attempts)}")
            assert front.engine is not None
            front.engine.check_empty()
        is_untroubled = not self.faults.counts and not self.mishaps.are_any and self.is_swift
        if is_untroubled and any(router.num_lost for router in self.clients.routers):
            raise Violation("an attempt was lost although nothing went wrong")


def run_all(seeds: Iterable[int]) -> list[Outcome]:
    """Runs one after the other; raises Broken."""
    return [run(seed) for seed in seeds]


def run(seed: int) -> Outcome:
    """Runs a seed in silence; raises Broken."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        return Run(seed).go()
    finally:
        logging.disable(before)
