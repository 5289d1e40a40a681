"""A small model of the router: the real requests, view and policy, and attempts as calls back.

It never gives up: whatever fails, a request is tried again, until its client has the answer or
does not want it any more. So each must be answered once faults are over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import cast

from effuse.config.decoding import DecodeSettings, Sampling, Stopping
from effuse.kvtransfer.messages import AttemptId
from effuse.placement.fleet import Snapshot, merge
from effuse.placement.records import WorkerRecord
from effuse.router.detokenizer import AnswerText
from effuse.router.policy import (
    AttemptNeeds,
    Candidate,
    Condition,
    InFlight,
    Placement,
    PrefillMode,
    place,
)
from effuse.router.request import Event, Request, State
from effuse.router.validation import Asked
from effuse.v1.worker_pb2 import BlockState as SentBlock
from effuse.worker.messages import (
    BlockState,
    Committed,
    CoreEvent,
    Finished,
    PromptPushed,
    Reserved,
    Resume,
    StartDecode,
    StartPrefill,
    Verified,
)

from .clock import Clock, Violation
from .fleet import MODEL, ROUTER, Fleet, Writer
from .network import Call
from .pages import TOKENS, tag
from .worker import Lost

POLL_S = 0.5
AVOID_S = 0.6  # for so long a worker that has failed is suspected


@dataclass(frozen=True, slots=True)
class Question:
    """What a client asks."""

    number: int
    prompt_len: int
    max_tokens: int
    settings: DecodeSettings

    def prompt(self) -> tuple[int, ...]:
        """Its token ids."""
        return tuple(tag(self.number, position) for position in range(self.prompt_len))

    def answer(self) -> list[int]:
        """The only right one."""
        end = self.prompt_len + self.max_tokens
        return [tag(self.number, position) for position in range(self.prompt_len, end)]


class Router:
    """All requests, and the fleet as one sees it from here."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.clock: Clock = fleet.clock
        self.requests: list[Routed] = []
        self.num_lost = 0  # attempts, those left out whose pages came late
        self._snapshot = Snapshot({}, False)
        self._avoided: dict[str, float] = {}  # worker: until when
        self._in_flight: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._poll()

    @property
    def is_done(self) -> bool:
        """Every request has ended."""
        return all(routed.request.is_ended for routed in self.requests)

    def ask(self, question: Question) -> Routed:
        """A client comes."""
        routed = Routed(self, question)
        self.requests.append(routed)
        routed.place()
        return routed

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
        now = self.clock.now
        answer = self.fleet.registry.workers()
        if answer is None:
            before = self._snapshot
            self._snapshot = Snapshot(before.sightings, False, 0, before.heard_at)
        else:
            self._snapshot = merge(self._snapshot, answer, now, now)
        self._check_view()
        self.clock.after(POLL_S, self._poll)

    def _check_view(self) -> None:
        """Whoever was well and heard all the time is in the view, once it was."""
        alive = {record.worker_id for record in self._snapshot.alive(self.clock.now)}
        self._seen |= alive
        for worker_id in self._seen - self.fleet.troubled:
            if worker_id not in alive:
                raise Violation(f"{worker_id} is taken for dead, and is well")


class Routed:
    """One request on its way."""

    def __init__(self, router: Router, question: Question) -> None:
        self.question = question
        self.request = Request(
            id=f"r{question.number}",
            asked=cast(Asked, None),
            text=cast(AnswerText, None),
            arrived=router.clock.now,
            limit_s=1e9,
            deadline=1e9,
        )
        self._router = router
        self._clock = router.clock
        self._attempt: Attempt | None = None

    def place(self) -> None:
        """Begins an attempt, or waits for workers."""
        if self.request.is_ended:
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
        self._clock.note(f"{self.request.id} attempt {number}: {self.request.story[-1].note}")
        self._attempt.start()

    def cancel(self) -> None:
        """The client wants no answer any more."""
        if not self.request.is_ended:
            self._clock.note(f"{self.request.id} is cancelled")
            self.request.apply_event(Event.CANCELLED, self._clock.now)
            if self._attempt is not None:
                self._attempt.end()

    def lose(self, why: str) -> None:
        """An attempt has failed; another one follows."""
        self._clock.note(f"{self.request.id} lost an attempt: {why}")
        self.request.apply_event(Event.LOST, self._clock.now, why[:40])
        self._clock.after(self._clock.draw.uniform(0.01, 0.2), self.place)

    def take(self, event: CoreEvent) -> None:
        """What the decode worker of the present attempt says."""
        request, now = self.request, self._clock.now
        match event:
            case Reserved():
                request.apply_event(Event.RESERVED, now)
            case Verified():
                request.apply_event(Event.VERIFIED, now)
            case Committed():
                request.apply_event(Event.COMMITTED, now)
                if event.token_offset != len(request.token_ids):
                    text = f"{request.id}: {len(request.token_ids)} tokens, then {event}"
                    raise Violation(text)
                frontier = cast(tuple[SentBlock, ...], event.frontier)
                request.accept_tokens(event.token_offset, event.token_ids, frontier)
            case Finished():
                if request.token_ids != self.question.answer():
                    raise Violation(f"{request.id} was answered with {request.token_ids}")
                request.apply_event(Event.FINISHED, now)
                self._clock.note(f"{request.id} is answered")

    def resumption(self) -> Resume | None:
        """Where another attempt goes on."""
        if not self.request.token_ids:
            return None
        frontier = cast(tuple[BlockState, ...], tuple(self.request.frontier))
        return Resume(committed_token_ids=tuple(self.request.token_ids), frontier=frontier)


class Attempt:
    """One attempt, with a call to each of its workers."""

    def __init__(
        self,
        router: Router,
        routed: Routed,
        number: int,
        prefill: WorkerRecord | None,
        decode: WorkerRecord,
    ) -> None:
        name = routed.request.id
        self.id = AttemptId(name, number, f"{name}-{number}")
        self._router = router
        self._fleet = router.fleet
        self._routed = routed
        self._prefill = prefill
        self._decode = decode
        self._calls: dict[str, Call] = {}
        self._workers: list[str] = []
        self._is_over = False
        self._is_pushed = False

    def start(self) -> None:
        """The prompt goes to its prefill worker first, decode is asked a moment later."""
        question, prefill, decode = self._routed.question, self._prefill, self._decode
        workers = [one.worker_id for one in (prefill, decode) if one is not None]
        self._router.count(workers, 1)
        self._workers = workers
        writer = None
        if prefill is not None:
            writer = Writer(prefill.worker_id, prefill.incarnation)
            if not self._routed.request.is_patient:
                self._send_prompt(prefill)
        message = StartDecode(
            attempt=self.id,
            prompt_token_ids=question.prompt(),
            stopping=Stopping(max_tokens=question.max_tokens, stop_token_ids=frozenset()),
            sampling=Sampling(),
            settings=question.settings,
            writer=None if writer is None else writer.incarnation,
            resume=self._routed.resumption(),
        )
        self._call(decode, message, writer)

    def _send_prompt(self, prefill: WorkerRecord) -> None:
        prompt = self._routed.question.prompt()
        if self._fleet.fabric.mishaps.mixes_up(self.id.transfer_id):
            prompt = tuple(token + TOKENS for token in prompt)
        self._call(prefill, StartPrefill(attempt=self.id, prompt_token_ids=prompt), None)

    def end(self) -> None:
        """Ends both calls, and has both workers end the attempt."""
        if self._is_over:
            return
        self._is_over = True
        self._router.count(self._workers, -1)
        for worker_id, call in self._calls.items():
            call.cancel()
            self._fleet.abort(ROUTER, worker_id, self.id, lambda drained, incarnation: None)

    def _call(
        self, worker: WorkerRecord, message: StartPrefill | StartDecode, writer: Writer | None
    ) -> None:
        host = worker.worker_id
        call = self._calls[host] = Call(self._fleet.network, ROUTER, host)

        def told(event: CoreEvent | Lost) -> None:
            if not self._is_over:
                self._take(worker, event)

        def arrive() -> None:
            front = self._fleet.fronts[host]
            if front.accept(call):
                front.when_awake(
                    partial(front.start, message, worker.incarnation, writer, call, told)
                )
            else:
                call.break_off()

        call.on_server_lost = lambda: told(Lost(f"{host} is gone"))
        call.ask(arrive)

    def _take(self, worker: WorkerRecord, event: CoreEvent | Lost) -> None:
        if isinstance(event, Lost):
            self._fail(worker, event)
            return
        if worker is self._prefill:
            self._is_pushed |= isinstance(event, PromptPushed)
            return
        self._routed.take(event)
        if isinstance(event, Reserved) and self._prefill is not None:
            self._pass_on(self._prefill, event)
        if self._routed.request.is_ended:
            self._is_over = True
            self._router.count(self._workers, -1)

    def _pass_on(self, prefill: WorkerRecord, reserved: Reserved) -> None:
        host = prefill.worker_id
        if host not in self._calls:
            self._send_prompt(prefill)

        def arrive() -> None:
            front = self._fleet.fronts[host]
            front.when_awake(lambda: front.reserve(reserved.reservation))

        self._calls[host].ask(arrive)

    def _fail(self, worker: WorkerRecord, lost: Lost) -> None:
        is_after_handoff = self._routed.request.state is State.DECODING
        if worker is self._prefill and (self._is_pushed or is_after_handoff):
            return  # how its call ends concerns nobody
        if not lost.is_retryable and not self._fleet.fabric.mishaps.are_any:
            raise Violation(f"{self.id} failed for good at {worker.worker_id}: {lost.text}")
        self.end()
        self._routed.request.is_patient |= lost.is_unreserved
        if not lost.is_unreserved:
            self._router.num_lost += 1
            self._router.avoid(worker.worker_id)
        self._routed.lose(f"{worker.worker_id}: {lost.text}")
