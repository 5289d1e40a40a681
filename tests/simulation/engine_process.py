"""An engine's process: the real engine and the real exchange, with a thread each.

Both take turns when they are woken. A process may be paused or stuck in a call, and may die.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from auditing import audit

from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.executor import Executor
from effuse.decode_worker.intake import Boundary, Intake
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.kvtransfer.connector import Command, ConnectorEvent
from effuse.kvtransfer.ends import HandoffReceiver, HandoffSender
from effuse.kvtransfer.handoff import ReceiverState, SenderState
from effuse.kvtransfer.layout import Identity, PageMemory
from effuse.kvtransfer.messages import Shard
from effuse.kvtransfer.push import shard_of
from effuse.kvtransfer.thread import Exchange
from effuse.kvtransfer.transport import Pace, Received
from effuse.kvtransfer.units import UnitCache, unit_tokens_of
from effuse.models.config import ModelConfig
from effuse.placement.records import Role
from effuse.prefill_worker.engine import PrefillEngine
from effuse.prefill_worker.executor import PromptExecutor
from effuse.worker.attempts import attempt_of
from effuse.worker.config import PrefillConfig
from effuse.worker.messages import (
    AbortDone,
    CoreEvent,
    EngineCore,
    Failed,
    Finished,
    PromptPushed,
    ToEngine,
    Verified,
)

from .clock import Action, Clock, Violation
from .pages import (
    BLOCK,
    LAYOUT,
    PAGE,
    TOKENS,
    AnswerModel,
    KnownPool,
    PromptModel,
    TaggedDigester,
    TaggedMemory,
    fingerprint_of,
)
from .transport import Fabric, SimTransport

LEASE_S, RESERVATION_S, MOST_S = 2.0, 1.5, 20.0
LOOK_S = {Pace.HOT: 0.002, Pace.MOVING: 0.1, Pace.BEGUN: 0.2, Pace.EXPECTING: 0.3}
LOOK_S[Pace.COMPUTING] = LOOK_S[Pace.MOVING]
BUSY_S = 0.3  # between two looks of an engine that waits for something
ENDS = (Failed, Finished, PromptPushed)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The capacity of this run's engines."""

    model: ModelConfig
    prefill_pages: int
    decode_pages: int
    budget: int  # tokens of a forward


class SimConnector:
    """A Connector whose thread is the process's other turn."""

    name = SimTransport.name

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self.requests: deque[Action] = deque()
        self.events: list[ConnectorEvent] = []

    def start(self) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """The process's matter."""

    def describe(self) -> tuple[Shard, ...]:
        return (shard_of(LAYOUT, self._process.transport.address()),)

    def send(self, command: Command) -> None:
        exchange, at = self._process.exchange, self._process.clock.now
        self.requests.append(lambda: exchange.execute(command, at))
        self._process.wake_connector()

    def poll(self) -> list[ConnectorEvent]:
        events, self.events = self.events, []
        return events

    def fileno(self) -> int:
        return -1


@dataclass(slots=True)
class _Turn:
    """A thread's next turn: a wake moves it forward, never back."""

    process: EngineProcess
    take: Action
    due_at: float = math.inf

    def within(self, seconds: float) -> None:
        """Has it come in so many seconds at the latest."""
        clock = self.process.clock
        at = clock.now + seconds
        if at < self.due_at:
            self.due_at = at
            clock.after(seconds, lambda: self._come(at))

    def _come(self, at: float) -> None:
        if at == self.due_at:
            self.process.when_awake(self._begin)

    def _begin(self) -> None:
        self.due_at = math.inf
        self.take()


class EngineProcess:
    """One life of an engine."""

    def __init__(
        self,
        fabric: Fabric,
        host: str,
        incarnation: str,
        role: Role,
        sizes: Sizes,
        tell: Callable[[str, Sequence[CoreEvent]], None],
    ) -> None:
        self.clock: Clock = fabric.clock
        self.host = host
        self.incarnation = incarnation
        self.is_alive = True
        self._tell = tell
        self._inbox: deque[ToEngine] = deque()
        self._paused_until = self._stuck_until = 0.0
        self._asleep: list[Action] = []
        self._is_looking = False  # received messages that the connector has not handled yet
        self._engine_turn = _Turn(self, self._turn_engine)
        self._connector_turn = _Turn(self, self._turn_connector)
        self._ended: set[str] = set()  # transfers about which no more events may be sent
        self._mishaps = fabric.mishaps
        num_pages = sizes.prefill_pages if role == "prefill" else sizes.decode_pages
        self.pool = KnownPool(num_pages)
        self.memory = TaggedMemory(self.pool)
        self.connector = SimConnector(self)
        self.transport = SimTransport(fabric, self.memory, self)
        own = Identity(incarnation, fingerprint_of(sizes.model), LAYOUT)
        digester = TaggedDigester(self.memory, self.clock)
        self.exchange = Exchange(self.transport, digester, own, self._emit, self.clock)
        self._handoffs: HandoffSender | HandoffReceiver
        make = self._prefill_engine if role == "prefill" else self._decode_engine
        self.core: EngineCore = make(sizes)

    # Its life.

    @property
    def is_paused(self) -> bool:
        """Whether it stands still now."""
        return self.clock.now < self._paused_until

    def send(self, message: ToEngine) -> None:
        """The front sends a message, which arrives if the process lives."""
        self._inbox.append(message)
        self.wake_engine()

    def pause(self, seconds: float) -> None:
        """Stands still for so long."""
        self._paused_until = max(self._paused_until, self.clock.now + seconds)
        self.clock.after(seconds, self._resume)

    def stick(self, seconds: float) -> None:
        """Its connector does not come back from a call for so long."""
        self._stuck_until = max(self._stuck_until, self.clock.now + seconds)

    def check_empty(self) -> None:
        """Raises AuditError or Violation if anything of a request is left."""
        audit(self.core)
        assert (load := self.core.load()).free_pages == load.total_pages, load
        left = {*self.transfers(), *self.exchange._pushes._transfers}
        if left or len(self.exchange._receptions):
            raise Violation(f"{self.incarnation} holds {sorted(left) or 'expected transfers'}")

    def transfers(self) -> dict[str, ReceiverState | SenderState]:
        """Its handoffs, and the state of each."""
        return {name: one.machine.state for name, one in self._handoffs._handoffs.items()}

    def die(self) -> None:
        """Ends, and its memory with it."""
        if self.is_alive:
            self.is_alive = False
            self.transport.close()

    def when_awake(self, action: Action) -> None:
        """Runs an action of its own, once it can."""
        if self.is_paused:
            self._asleep.append(action)
        elif self.is_alive:
            action()

    def wake_engine(self, seconds: float = 0.0005) -> None:
        """Has the engine take a turn within so long."""
        self._engine_turn.within(seconds)

    def wake_connector(self, seconds: float = 0.0005) -> None:
        """Has the connector take a turn within so long."""
        if not self._is_looking:
            self._connector_turn.within(seconds)

    def _resume(self) -> None:
        if not self.is_paused:
            asleep, self._asleep = self._asleep, []
            for action in asleep:
                self.when_awake(action)

    # Its threads.

    def _turn_engine(self) -> None:
        core, is_told = self.core, bool(self._inbox)
        while self._inbox:
            core.handle(self._inbox.popleft())
        worked = core.step()
        said = core.outbox()
        if worked or is_told:
            audit(core)
        if said:
            self._check(said)
            self._tell(self.incarnation, said)
        load = core.load()
        if worked:
            self.wake_engine(self.clock.draw.uniform(0.001, 0.01))
        elif core.is_working() or load.running or load.waiting:
            self.wake_engine(BUSY_S)

    def _turn_connector(self) -> None:
        if self.clock.now < self._stuck_until:
            self.wake_connector(self._stuck_until - self.clock.now)
            return
        heard = self.exchange.receive()
        # The engine's thread runs on meanwhile, and more may come.
        if self.clock.draw.random() < 0.2:
            self._is_looking = True
            self.clock.after(0.003, lambda: self.when_awake(lambda: self._go_on(heard)))
        else:
            self._go_on(heard)

    def _go_on(self, heard: list[Received]) -> None:
        self._is_looking = False
        requests = self.connector.requests
        while requests:
            requests.popleft()()
        if self.exchange.turn(heard):
            self.wake_connector(LOOK_S[Pace.HOT])
            return
        self.exchange.wait(-1)
        seconds = LOOK_S.get(self.transport.pace)
        if seconds is not None:
            self.wake_connector(seconds)

    def _emit(self, event: ConnectorEvent) -> None:
        self.clock.note(f"{self.incarnation} connector: {event_text(event)}")
        self.connector.events.append(event)
        self.wake_engine()

    def _check(self, said: Sequence[CoreEvent]) -> None:
        """An engine's promises to its front, and forbidden events."""
        for event in said:
            self.clock.note(f"{self.incarnation} says {event_text(event)}")
            transfer_id = attempt_of(event).transfer_id
            if transfer_id in self._ended and not isinstance(event, AbortDone):
                raise Violation(f"{event_text(event)} of an attempt that had ended")
            if isinstance(event, ENDS):
                self._ended.add(transfer_id)
            if isinstance(event, Verified):
                self._mishaps.check_verified(transfer_id)

    # How it is made.

    def _prefill_engine(self, sizes: Sizes) -> EngineCore:
        model = PromptModel(
            self.memory,
            self.clock,
            lambda: self.is_alive,
            self._wake_both,
            self._mishaps.fails,
        )
        sender = HandoffSender(self.connector, reservation_s=RESERVATION_S, now=self.clock)
        self._handoffs = sender
        memory = cast(PageMemory, self.memory)
        shifts = sizes.model.shift_logits
        return PrefillEngine(
            PromptExecutor(model, memory, sender, needs_boundary=shifts, mark=model.mark),
            PrefillConfig(
                max_num_batched_tokens=sizes.budget,
                max_num_seqs=4,
                max_model_len=TOKENS,
                page_size=PAGE,
                max_request_s=MOST_S,
            ),
            sizes.model,
            self.pool,
            self._cache(sizes),
            sender,
            fingerprint_of(sizes.model),
            now=self.clock,
        )

    def _decode_engine(self, sizes: Sizes) -> EngineCore:
        limits = DecodeLimits(
            max_num_batched_tokens=sizes.budget,
            max_num_seqs=4,
            max_model_len=TOKENS,
            num_pages=self.pool.num_pages,
            page_size=PAGE,
            block_size=BLOCK,
        )
        identity = Identity(self.incarnation, fingerprint_of(sizes.model), LAYOUT)
        self._handoffs = HandoffReceiver(self.pool, self.connector, identity, LEASE_S)
        return DecodeEngine(
            Executor(AnswerModel(self.memory, self._mishaps.fails), self.memory.copy_page),
            self.pool,
            self._cache(sizes),
            Intake(sizes.model, limits),
            self._handoffs,
            Boundary(None, torch.float32, torch.device("cpu")),
            now=self.clock,
            max_request_s=MOST_S,
        )

    def _cache(self, sizes: Sizes) -> UnitCache:
        is_causal = sizes.model.prompt_attention == "causal_blocks"
        return UnitCache(
            self.pool, page_size=PAGE, unit_size=unit_tokens_of(PAGE, BLOCK), is_causal=is_causal
        )

    def _wake_both(self) -> None:
        self.wake_engine()
        self.wake_connector()


def event_text(event: object) -> str:
    """An event in a few words, for the trace."""
    name = type(event).__name__
    attempt = getattr(event, "attempt", None) or getattr(event, "reservation", None)
    transfer_id = getattr(event, "transfer_id", "") or getattr(attempt, "transfer_id", "")
    cause = getattr(event, "cause", None)  # its message may hold digests, which no seed decides
    why = cause.value if cause else getattr(event, "message", "") or getattr(event, "token_ids", "")
    return f"{name} {transfer_id} {why}".rstrip()
