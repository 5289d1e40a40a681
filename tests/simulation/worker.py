"""A model of workers' fronts: admission, relayed events, ends of attempts, leases, new engines.

It follows decode_worker/server.py, prefill_worker/server.py, worker/shell.py, worker/front.py,
worker/peer.py and worker/supervisor.py, whose waits are callbacks here. Engines, watchdog and
leases are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from effuse.kvtransfer.messages import AttemptId, Reservation
from effuse.placement.leases import TTL_S, Lease, LeaseEvent, LeaseState, advance
from effuse.placement.records import Role
from effuse.worker.attempts import attempt_of
from effuse.worker.messages import (
    Abort,
    AbortDone,
    CoreEvent,
    Failed,
    Finished,
    Heartbeat,
    PromptPushed,
    PushTo,
    Reserved,
    StartDecode,
    StartPrefill,
    ToEngine,
    Verified,
    WriterGone,
)
from effuse.worker.watchdog import Limits, Progress, look, observe, verdict

from .clock import Action
from .engine_process import EngineProcess
from .fleet import Fleet, Writer, record_of
from .network import Call

TICK_S = 0.5
HANG = Limits(startup_s=10.0, serving_s=1.6)
ASK_S, FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 0.1, 1.0  # of a writer that is to let go
LOST_AFTER_S = 6.0  # long after its connections have ended
HasDrained = Callable[[bool, str], None]


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker's answer that is an error."""

    text: str
    is_retryable: bool = True
    is_unreserved: bool = False


Told = Callable[[CoreEvent | Lost], None]


@dataclass(slots=True, eq=False)
class Running:
    """An attempt, from its admission until nothing of it is left here."""

    attempt: AttemptId
    incarnation: str
    call: Call
    told: Told
    writer: Writer | None = None
    is_relayed: bool = False
    is_verified: bool = False
    is_reserved: bool = False
    is_ending: bool = False
    is_let_go: bool = False  # by the engine
    is_closed: bool = False
    engine_ended: bool = False
    aborts: list[HasDrained] = field(default_factory=list)  # to be answered at its end
    unsent: list[CoreEvent | Lost] = field(default_factory=list)


class Front:
    """One life of a worker's front, and the engines that it has one after the other."""

    def __init__(self, fleet: Fleet, worker_id: str, role: Role) -> None:
        self.worker_id = worker_id
        self.role = role
        self.host = worker_id
        self.is_alive = True
        self.engine: EngineProcess | None = None  # while it is ready
        self.attempts: dict[str, Running] = {}
        self._fleet = fleet
        self._clock = fleet.clock
        self._last_incarnation = ""
        self._process = fleet.next_name(f"{worker_id}.process")
        self._buried: set[str] = set()
        self._calls: list[Call] = []
        self._paused_until = 0.0
        self._asleep: list[Action] = []
        self._lease = Lease()
        self._progress = Progress.begin(self._clock.now)
        self._start_engine()
        self._clock.after(0.0, lambda: self.when_awake(self._tick))

    # Its life.

    @property
    def incarnation(self) -> str:
        """Id of the engine's life; empty while none is ready."""
        return "" if self.engine is None else self.engine.incarnation

    @property
    def is_idle(self) -> bool:
        """Nothing runs or is still ending here, and all pages are free. A handoff may have none, of
        a prompt that is shorter than a block."""
        if self.engine is None:
            return False
        load = self.engine.core.load()
        is_free = load.free_pages == load.total_pages and not self.engine.transfers()
        return is_free and not self.attempts

    def when_awake(self, action: Action) -> None:
        """Runs an action of its own, once it can."""
        if self._clock.now < self._paused_until:
            self._asleep.append(action)
        elif self.is_alive:
            action()

    def pause(self, seconds: float) -> None:
        """Stands still for so long."""
        self._paused_until = max(self._paused_until, self._clock.now + seconds)
        self._clock.after(seconds, self._resume)

    def die(self) -> None:
        """The front ends; the kernel then ends its engine. Another one takes its place."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._clock.note(f"{self.worker_id} dies")
        draw = self._clock.draw
        if self.engine is not None:
            self._clock.after(draw.choice((0.0, 0.3)), self.engine.die)
        for call in self._calls:
            call.break_off()
        self._clock.after(draw.uniform(0.3, 1.5), lambda: self._fleet.replace(self))

    def lose_engine(self, why: str) -> None:
        """The engine has ended: its attempts get that error, and another one is started."""
        engine, self.engine = self.engine, None
        if engine is None or not self.is_alive:
            return
        self._clock.note(f"{engine.incarnation} is lost: {why}")
        engine.die()
        for running in list(self.attempts.values()):
            running.engine_ended = True
            self._tell(running, Lost("the engine was lost"))
            self._leave(running)
        self._clock.after(self._clock.draw.uniform(0.1, 1.0), self._start_engine)

    def _start_engine(self) -> None:
        if self.is_alive:
            self.engine = self._fleet.make_engine(self.host, self.role, self._hear)
            self._last_incarnation = self.engine.incarnation
            self._progress = Progress(
                began_at=self._clock.now,
                looked_at=self._clock.now,
                beat_at=self._clock.now,
                moved_at=self._clock.now,
                is_ready=True,
                phase="serving",
            )

    def _resume(self) -> None:
        if self._clock.now >= self._paused_until:
            asleep, self._asleep = self._asleep, []
            for action in asleep:
                self.when_awake(action)

    def _tick(self) -> None:
        """Watches the engine and renews the lease."""
        self._clock.after(TICK_S, lambda: self.when_awake(self._tick))
        now, engine = self._clock.now, self.engine
        if engine is not None:
            self._progress, _ = look(self._progress, now, TICK_S)
            if not engine.is_alive:
                self.lose_engine("it has crashed")
            else:
                self._watch(engine, now)
        if self._lease.wait_s(now) <= 0:
            self._announce()

    def _watch(self, engine: EngineProcess, now: float) -> None:
        if not engine.is_paused:
            beat = Heartbeat(loops=self._progress.loops + 1, load=engine.core.load())
            self._progress = observe(self._progress, beat, now)
        if why := verdict(self._progress, now, HANG):
            self.lose_engine(why)

    def _announce(self) -> None:
        takes = self._lease.state is LeaseState.ABSENT
        record = record_of(
            self._fleet.sizes,
            self.worker_id,
            self.role,
            self._last_incarnation,
            is_ready=self.engine is not None,
        )
        told = self._fleet.registry.announce(record, self._process, TTL_S, takes=takes)
        event = LeaseEvent.UNREACHABLE if told is None else LeaseEvent(told)
        self._lease = advance(self._lease, event, self._clock.now)
        if self._lease.is_over:
            self.die()

    # Its calls.

    def accept(self, call: Call) -> bool:
        """Whether a connection is accepted; it breaks when this life ends."""
        if self.is_alive:
            self._calls.append(call)
        return self.is_alive

    def start(
        self,
        message: StartPrefill | StartDecode,
        incarnation: str,
        writer: Writer | None,
        call: Call,
        told: Told,
    ) -> None:
        """A call of a router comes in."""
        attempt, engine = message.attempt, self.engine
        transfer_id = attempt.transfer_id
        why = None
        if engine is None:
            why = Lost("the engine is starting")
        elif engine.incarnation != incarnation:
            why = Lost("this is another incarnation")
        elif transfer_id in self._buried or transfer_id in self.attempts:
            why = Lost("the transfer has already ended here, or runs")
        if why is not None or engine is None:
            call.answer(lambda: told(why or Lost("")))
            return
        running = Running(attempt, incarnation, call, told, writer)
        self.attempts[transfer_id] = running
        call.on_caller_lost = lambda: self.when_awake(lambda: self._leave(running))
        engine.send(message)

    def reserve(self, reservation: Reservation) -> None:
        """The reservation of a prefill call comes in."""
        running = self.attempts.get(reservation.transfer_id)
        if running is not None and not running.is_ending:
            running.is_reserved = True
            self._send(running, PushTo(reservation=reservation))

    def abort(self, attempt: AttemptId, answer: HasDrained) -> None:
        """A caller wants an attempt to end, whether it has begun or not."""
        running = self.attempts.get(attempt.transfer_id)
        if running is None:
            self._buried.add(attempt.transfer_id)
            answer(True, self.incarnation)
            return
        running.aborts.append(answer)
        self._tell(running, Lost("the attempt was aborted"))
        self._leave(running)

    # Its engine's events.

    def _hear(self, incarnation: str, said: Sequence[CoreEvent]) -> None:
        def take() -> None:
            if self.incarnation == incarnation:
                for event in said:
                    self._take(event)

        self._clock.after(0.0005, lambda: self.when_awake(take))

    def _take(self, event: CoreEvent) -> None:
        running = self.attempts.get(attempt_of(event).transfer_id)
        if running is None:
            return
        if isinstance(event, AbortDone):
            self._let_go(running)
            return
        if running.is_ending:
            return
        if isinstance(event, Failed):
            is_unreserved = event.field == "reservation"
            self._tell(running, Lost(event.message, event.retryable, is_unreserved))
            self._leave(running)
            return
        running.is_relayed |= isinstance(event, Reserved)
        running.is_verified |= isinstance(event, Verified)
        self._tell(running, event)
        if isinstance(event, Finished | PromptPushed):
            self._close(running)

    def _tell(self, running: Running, event: CoreEvent | Lost) -> None:
        """Relays an event; the events of one step go in one message."""
        if running.is_ending:
            return
        running.unsent.append(event)
        if len(running.unsent) == 1:
            self._clock.after(0.0, lambda: self.when_awake(lambda: self._flush(running)))

    def _flush(self, running: Running) -> None:
        told, running.unsent = running.unsent, []

        def arrive() -> None:
            for event in told:
                running.told(event)

        running.call.answer(arrive)

    def _send(self, running: Running, message: ToEngine) -> None:
        if self.engine is not None and self.engine.incarnation == running.incarnation:
            self.engine.send(message)

    # How an attempt ends.

    def _leave(self, running: Running) -> None:
        """Ends what has not ended by itself."""
        if running.is_closed:
            return
        if not running.is_ending:
            running.is_ending = True
            self._send(running, Abort(attempt=running.attempt))
        if running.engine_ended:
            self._let_go(running)

    def _let_go(self, running: Running) -> None:
        """The engine has let go of it, or is gone."""
        if running.is_let_go:
            return
        running.is_let_go = True
        writer = running.writer
        if writer is None or running.is_verified:
            self._close(running)
        elif running.is_relayed and not running.engine_ended:
            give_up_at = self._clock.now + LOST_AFTER_S
            self._ask_writer(running, writer, give_up_at, FIRST_PAUSE_S)
        else:
            self._release(running, has_drained=True)

    def _ask_writer(
        self, running: Running, writer: Writer, give_up_at: float, pause_s: float
    ) -> None:
        """Asks until the writer answers, is proven dead, or was silent for too long."""
        is_over = False

        def answered(drained: bool, incarnation: str) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                is_same = incarnation == writer.incarnation
                self._release(running, has_drained=drained and is_same)

        def look_again() -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            if self._fleet.is_refused(self.host, writer) or self._clock.now >= give_up_at:
                self._release(running, has_drained=False)
                return
            longer_s = min(2 * pause_s, MOST_PAUSE_S)
            again = partial(self._ask_writer, running, writer, give_up_at, longer_s)
            self._clock.after(pause_s, lambda: self.when_awake(again))

        def answer(drained: bool, incarnation: str) -> None:
            self.when_awake(lambda: answered(drained, incarnation))

        self._fleet.abort(self.host, writer.host, running.attempt, answer)
        self._clock.after(ASK_S, lambda: self.when_awake(look_again))

    def _release(self, running: Running, *, has_drained: bool) -> None:
        gone = WriterGone(transfer_id=running.attempt.transfer_id, has_drained=has_drained)
        self._send(running, gone)
        self._close(running)

    def _close(self, running: Running) -> None:
        """Nothing of it is left here."""
        running.is_closed = running.is_ending = True
        running.call.close()
        self._buried.add(running.attempt.transfer_id)
        self.attempts.pop(running.attempt.transfer_id, None)
        for answer in running.aborts:
            answer(not running.engine_ended, running.incarnation)
