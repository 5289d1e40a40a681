"""A small model of the router: the real requests, view and policy, and attempts as calls back.

It never gives up: whatever fails, a request is tried again, until its client has the answer or
does not want it any more, or it dies. So each must be answered once faults are over.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

from effuse.config.decoding import Sampling
from effuse.placement.leases import Snapshot, merge
from effuse.placement.store import Store
from effuse.placement.writer import PlacementWriter
from effuse.protos.errors import AlreadyRunning, Unavailable
from effuse.router.policy import (
    AttemptNeeds,
    Candidate,
    Condition,
    InFlight,
    Placement,
    PrefillMode,
    place,
)
from effuse.router.request import AnswerState, Request
from effuse.router.request_states import Event
from effuse.router.shared_request import SharedRequest, Sharing
from effuse.router.tokenizer import AnswerText
from effuse.router.validation import Asked
from effuse.v1 import generation_pb2 as pb
from effuse.v1.worker_pb2 import BlockState as SentBlock
from effuse.worker.messages import (
    BlockState,
    Committed,
    CoreEvent,
    Finished,
    Reserved,
    Resume,
    Verified,
)

from .attempt import Attempt
from .claims import ClaimStore
from .clients import Asker, Clients, Question
from .clock import Clock, Violation
from .fleet import MODEL
from .network import LATENCY_S

POLL_S = 0.5
AVOID_S = 0.6  # for so long a worker that has failed is suspected


class Router:
    """One life of a router: its requests, and its view of the fleet. router/shared_request.py and
    placement/writer.py decide the owner of a request.
    """

    def __init__(self, clients: Clients, host: str) -> None:
        fleet = clients.fleet
        self.fleet = fleet
        self.clock: Clock = fleet.clock
        self.host = host
        self.id = fleet.next_name(f"{host}.")
        self.is_alive = True
        self.requests: list[Routed] = []
        self.num_lost = 0  # attempts, without those whose pages came late
        self.store = ClaimStore(clients.claims, host)
        self.placements = PlacementWriter(cast(Store, self.store), now=self.clock)
        self.sharing = Sharing(
            router_id=self.id,
            store=cast(Store, self.store),
            placements=self.placements,
            address_of=lambda router_id: "",
            keep_answers_s=300.0,
        )
        self._clients = clients
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self.placements.run())]
        self._snapshot = Snapshot({}, False)
        self._avoided: dict[str, float] = {}  # worker: until when
        self._in_flight: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._poll()

    @property
    def is_done(self) -> bool:
        """Every request has ended."""
        return all(routed.request.answer.is_ended for routed in self.requests)

    def serve(self, asker: Asker) -> None:
        """A client comes."""
        if any(one.is_of(asker.question) for one in self.requests):
            self.refuse(asker)
            return
        routed = Routed(self, asker)
        self.requests.append(routed)
        self._tasks.append(self._loop.create_task(self._claim(routed)))

    async def _claim(self, routed: Routed) -> None:
        try:
            kept = await routed.shared.claim()
        except (AlreadyRunning, Unavailable):
            kept = None
            self.requests.remove(routed)
            self.refuse(routed.asker)
        else:
            if kept is not None:
                self.requests.remove(routed)
                self.tell(routed.asker, kept.model, list(kept.token_ids))
            elif not routed.request.answer.is_ended:
                seed = routed.request.asked.sampling.seed
                self._clients.begin_run(routed.request.id, self, seed)
                routed.place()
                return
        routed.shared.end(None)

    def tell(self, asker: Asker, run: str, token_ids: list[int]) -> None:
        """The answer is on its way to a client."""
        seconds = self.clock.draw.uniform(*LATENCY_S)
        self.clock.after(seconds, lambda: asker.hear(self, run, token_ids))

    def refuse(self, asker: Asker) -> None:
        """A client learns that there is no answer here."""
        self.clock.after(self.clock.draw.uniform(*LATENCY_S), lambda: asker.lose(self))

    def cancel(self, request_id: str) -> None:
        """Its clients are gone."""
        for routed in self.requests:
            if routed.request.id == request_id:
                routed.cancel()

    def die(self) -> None:
        """Ends, like in a crash: it sends nothing more, and its connections end."""
        self.clock.note(f"{self.id} dies")
        self.is_alive = False
        for task in self._tasks:
            task.cancel()
        for routed in self.requests:
            if not routed.request.answer.is_ended:
                routed.break_off()
                self.refuse(routed.asker)
        self.requests = [routed for routed in self.requests if routed.request.answer.is_ended]

    def successor(self) -> Router:
        """The next life, which knows nothing."""
        return Router(self._clients, self.host)

    def choose(self, mode: PrefillMode) -> Placement | None:
        """The policy's choice among live workers; None where there is none."""
        now = self.clock.now
        candidates = [
            Candidate(
                record,
                InFlight(requests=self._in_flight[record.worker_id]),
                Condition.READY if record.state == "ready" else Condition.STARTING,
                is_suspect=self._avoided.get(record.worker_id, 0.0) > now,
            )
            for record in self._snapshot.alive(now)
        ]
        return place(candidates, AttemptNeeds(model=MODEL, mode=mode))

    def avoid(self, worker_id: str) -> None:
        """A worker has failed an attempt."""
        self._avoided[worker_id] = self.clock.now + AVOID_S

    def count(self, workers: Iterable[str], step: int) -> None:
        """Attempts begin or end on these."""
        for worker_id in workers:
            self._in_flight[worker_id] += step

    def _poll(self) -> None:
        if not self.is_alive:
            return
        self.store.renew(self.id)
        now = self.clock.now
        answer = self.fleet.registry.workers(self.host)
        if answer is None:
            before = self._snapshot
            self._snapshot = Snapshot(before.sightings, False, before.polled_at)
        else:
            self._snapshot = merge(self._snapshot, answer, now, now)
        self._check_view()
        self.clock.after(POLL_S, self._poll)

    def _check_view(self) -> None:
        """Workers that were always well and connected are in the view, once they were."""
        alive = {record.worker_id for record in self._snapshot.alive(self.clock.now)}
        self._seen |= alive
        for worker_id in self._seen - self.fleet.troubled:
            if worker_id not in alive:
                raise Violation(f"{worker_id} is taken for dead, and is well")


class Routed:
    """One request on its way."""

    def __init__(self, router: Router, asker: Asker) -> None:
        self.asker = asker
        self.question = asker.question
        self.request = Request(
            id=self.question.id,
            asked=Unseeded().seeded(router.clock.draw.getrandbits(64)),
            arrived=router.clock.now,
            limit_s=1e9,
            deadline=1e9,
            answer=AnswerState(text=cast(AnswerText, SimpleNamespace(num_tokens=0))),
            asked_digest="what is asked",
            is_repeated=asker.num_tries > 1,
        )
        self.shared = SharedRequest(router.sharing, self.request, self.send)
        self._router = router
        self._clock = router.clock
        self._attempt: Attempt | None = None

    def is_of(self, question: Question) -> bool:
        """Whether the question is asked here and not over."""
        return self.question is question and not self.request.answer.is_ended

    def place(self) -> None:
        """Begins an attempt, or waits for workers."""
        if self.request.answer.is_ended or not self._router.is_alive:
            return
        router, draw = self._router, self._clock.draw
        placement = router.choose("local" if draw.random() < 0.1 else "auto")
        if placement is None:
            self._clock.after(0.25, self.place)
            return
        decode, prefill = placement.decode, placement.prefill
        number = self.request.begin_attempt(
            prefill.worker_id if prefill else "", decode.worker_id, self._clock.now
        )
        self._attempt = Attempt(router, self, number, prefill, decode)
        self.shared.begin_attempt(placement, self._attempt.id.transfer_id)
        self._clock.note(
            f"{self.request.id} attempt {number}: {self.request.answer.moments[-1].note}"
        )
        self._attempt.start()

    def cancel(self) -> None:
        """The client wants no answer any more."""
        if not self.request.answer.is_ended:
            self.request.answer.apply_event(Event.CANCELLED, self._clock.now)
            self.shared.end(None)
            if self._attempt is not None:
                self._attempt.end()

    def break_off(self) -> None:
        """Its router has died."""
        if self._attempt is not None:
            self._attempt.break_off()

    async def send(self, event: pb.GenerateStreamResponse) -> None:
        """Final tokens are sent at the end, all together."""

    def lose(self, why: str) -> None:
        """An attempt has failed; another one follows."""
        self._clock.note(f"{self.request.id} lost an attempt: {why}")
        self.request.answer.apply_event(Event.LOST, self._clock.now, why[:40])
        self._clock.after(self._clock.draw.uniform(0.01, 0.2), self.place)

    def take(self, event: CoreEvent) -> None:
        """Events of the current attempt's decode worker."""
        request, now = self.request, self._clock.now
        match event:
            case Reserved():
                request.answer.apply_event(Event.RESERVED, now)
            case Verified():
                request.answer.apply_event(Event.VERIFIED, now)
            case Committed():
                request.answer.apply_event(Event.COMMITTED, now)
                if event.token_offset != len(request.answer.token_ids):
                    text = f"{request.id}: {len(request.answer.token_ids)} tokens, then {event}"
                    raise Violation(text)
                frontier = cast(tuple[SentBlock, ...], event.frontier)
                request.answer.accept_tokens(event.token_offset, event.token_ids, frontier)
                commit = pb.BlockCommit(token_ids=event.token_ids)
                _at_once(self.shared.send(pb.GenerateStreamResponse(commit=commit)))
            case Finished():
                if request.answer.token_ids != self.question.answer():
                    raise Violation(f"{request.id} was answered with {request.answer.token_ids}")
                request.answer.apply_event(Event.FINISHED, now)
                last = pb.Finished(model=self._router.id)
                self.shared.end(pb.GenerateStreamResponse(finished=last))
                self._router.tell(self.asker, self._router.id, list(request.answer.token_ids))

    def resumption(self) -> Resume | None:
        """The place of another attempt."""
        if not self.request.answer.token_ids:
            return None
        frontier = cast(tuple[BlockState, ...], tuple(self.request.answer.frontier))
        return Resume(committed_token_ids=tuple(self.request.answer.token_ids), frontier=frontier)


def _at_once(work: Awaitable[None]) -> None:
    """Runs what waits for nothing."""
    try:
        next(work.__await__())
    except StopIteration:
        return
    raise AssertionError("it waits")


@dataclass(frozen=True, slots=True)
class Unseeded:
    """As much as claims look at of router/validation.py's Asked, of clients without a seed."""

    model: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(name=MODEL))
    sampling: Sampling = field(default_factory=Sampling)

    def seeded(self, fresh: int) -> Asked:
        """With this seed."""
        return cast(Asked, replace(self, sampling=Sampling(seed=fresh)))
