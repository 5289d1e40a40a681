"""The engine's loop over a real socket: order, heartbeats, waking, and its end."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
import zmq

from effuse.config.decoding import DecodeSettings, DecodingDefaults
from effuse.kvtransfer.messages import AttemptId
from effuse.placement.records import Load, ModelInfo
from effuse.worker.config import WorkerConfig
from effuse.worker.engine_home import kept_open
from effuse.worker.engine_process import (
    Engine,
    EngineLoop,
    ForwardFailed,
    ForwardGuard,
    Outbox,
    _run,
    die_with,
    leave_imports,
)
from effuse.worker.messages import (
    Abort,
    AbortDone,
    CoreEvent,
    Failed,
    Heartbeat,
    PrefillDone,
    Ready,
    Shutdown,
    StartPrefill,
    ToEngine,
    ToFront,
)
from effuse.worker.watchdog import Pulse

MODEL = ModelInfo(
    name="tiny",
    architecture="sdar",
    block_size=4,
    max_model_len=64,
    vocab_size=16,
    mask_token_id=1,
    eos_token_ids=(2,),
    prompt_attention="causal_blocks",
    defaults=DecodingDefaults(settings=DecodeSettings(algorithm="d2f", denoising_steps=4)),
)
ONE = AttemptId("r", 1, "t1")
START = StartPrefill(attempt=ONE, prompt_token_ids=(1, 2))


@dataclass
class Core:
    """Answers a start when it is stepped, and an abort at once."""

    handled: list[ToEngine] = field(default_factory=list)
    out: list[CoreEvent] = field(default_factory=list)
    now_load: Load = field(default_factory=Load)
    steps: int = 0

    def handle(self, message: ToEngine) -> None:
        self.handled.append(message)
        if isinstance(message, Abort):
            self.out.append(AbortDone(attempt=message.attempt, was_running=True))

    def is_working(self) -> bool:
        return False

    def step(self) -> bool:
        self.steps += 1
        started = [m for m in self.handled if isinstance(m, StartPrefill)]
        for message in started:
            self.out.append(PrefillDone(attempt=message.attempt, queue_s=0.0, compute_s=0.0))
            self.handled.remove(message)
        return bool(started)

    def outbox(self) -> Sequence[CoreEvent]:
        out, self.out = self.out, []
        return out

    def load(self) -> Load:
        return self.now_load

    def close(self) -> None:
        pass


@dataclass
class Front:
    """The other end of the socket, and time that a test moves."""

    socket: zmq.Socket[bytes]
    theirs: zmq.Socket[bytes]
    loop: EngineLoop
    core: Core
    now: float = 0.0

    def say(self, *messages: ToEngine) -> None:
        for message in messages:
            self.socket.send(msgspec.msgpack.encode(message))

    def hear(self) -> list[ToFront]:
        heard: list[ToFront] = []
        while self.socket.poll(0):
            heard += msgspec.msgpack.decode(self.socket.recv(), type=list[ToFront])
        return heard


@pytest.fixture
def front() -> Iterator[Front]:
    context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://front")
    theirs.connect("inproc://front")
    core = Core()
    made: list[Front] = []
    loop = EngineLoop(core, theirs, Pulse(now=lambda: made[0].now))
    made.append(Front(ours, theirs, loop, core))
    yield made[0]
    context.destroy(linger=0)


def test_messages_are_handled_in_order_before_the_step_and_answers_are_sent(front: Front) -> None:
    abort = Abort(attempt=ONE)
    front.say(START, abort)
    assert front.loop.turn()
    assert front.core.handled == [abort]
    kinds = [type(message) for message in front.hear()]
    assert kinds == [Heartbeat, AbortDone, PrefillDone]


def test_shutdown_ends_the_loop_without_a_step(front: Front) -> None:
    front.say(Shutdown(), START)
    front.loop.run()
    assert (front.core.steps, front.core.handled) == (0, [])


def test_heartbeats_come_seldom_when_nothing_changes(front: Front) -> None:
    beats = []
    for turn in range(21):
        front.now = turn * 0.1
        front.say(START)
        front.loop.turn()
        beats += [m for m in front.hear() if isinstance(m, Heartbeat)]
    assert [beat.loops for beat in beats] == [1, 6, 11, 16, 21]


def test_a_changed_load_is_told_sooner(front: Front) -> None:
    front.say(START)
    front.loop.turn()
    front.hear()
    front.core.now_load = Load(running=1, runnable=1)
    for now, is_told in ((0.01, False), (0.06, True), (0.1, False)):
        front.now = now
        front.say(START)
        front.loop.turn()
        beats = [m for m in front.hear() if isinstance(m, Heartbeat)]
        assert bool(beats) is is_told


def test_the_load_after_an_end_is_told_before_the_end(front: Front) -> None:
    front.loop.turn()
    front.hear()
    front.core.now_load = Load(free_pages=8)
    front.say(Abort(attempt=ONE))
    front.loop.turn()
    beat, end = front.hear()
    assert isinstance(beat, Heartbeat)
    assert (beat.load.free_pages, type(end)) == (8, AbortDone)


def test_an_idle_engine_is_woken_by_its_connector(front: Front) -> None:
    wake = os.eventfd(1)
    loop = EngineLoop(front.core, front.theirs, Pulse(), wakes=(wake,), idle_ms=None)
    assert loop.turn()  # returns although nothing was sent and nothing will be
    os.close(wake)


def test_what_came_within_a_long_step_is_taken_at_the_next_turn_in_order_and_without_a_wait(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort, pulse = Abort(attempt=ONE), Pulse(now=lambda: front.now)
    loop = EngineLoop(front.core, front.theirs, pulse, idle_ms=None)
    with monkeypatch.context() as long_step:

        def step() -> bool:
            front.say(START, abort)
            pulse.mark()
            return False

        long_step.setattr(front.core, "step", step)
        assert loop.turn()
    assert not front.core.handled
    front.say(Shutdown())
    assert not loop.turn()
    assert front.core.handled == [START, abort]


def test_messages_that_come_while_one_is_handled_keep_their_order(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (Abort(attempt=AttemptId("r", 1, f"t{at}")) for at in range(3))
    pulse, original = Pulse(now=lambda: front.now), front.core.handle
    loop = EngineLoop(front.core, front.theirs, pulse, idle_ms=0)

    def handle(message: ToEngine) -> None:
        original(message)
        if message == first:
            front.say(second)
            pulse.mark()  # as a long wait does
            front.say(third)

    monkeypatch.setattr(front.core, "handle", handle)
    front.say(first)
    for _ in range(2):
        assert loop.turn()
    assert front.core.handled == [first, second, third]


def test_bytes_that_are_no_message_end_the_engine(front: Front) -> None:
    front.socket.send(b"\xc1 not a message")
    with pytest.raises(msgspec.DecodeError):
        front.loop.turn()


def test_a_process_whose_front_is_gone_does_not_begin() -> None:
    with pytest.raises(SystemExit, match="the parent process has ended"):
        die_with(os.getppid() + 1)


def test_what_an_engine_is_made_of_is_never_collected_again() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front, own = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    front.bind("inproc://engine")
    own.connect("inproc://engine")
    front.send(msgspec.msgpack.encode(Shutdown()))
    before = gc.get_freeze_count()
    made: list[list[object]] = []

    def build(config: WorkerConfig, incarnation: str, pulse: Pulse) -> Engine:
        made.extend([] for _ in range(1000))
        assert len(kept_open) == 1
        return Engine(Core(), Ready(model=MODEL, fingerprint=(), page_size=4, total_pages=8))

    try:
        assert _run(WorkerConfig(), "one", build, own) == 0
        assert gc.get_freeze_count() >= before + 1000
        assert not kept_open, "a rank that starts later would be given a closed descriptor"
    finally:
        gc.unfreeze()
        front.close()
        own.close()
        context.term()


def test_the_end_of_a_start_does_not_search_what_was_imported() -> None:
    """A cycle stands for it: a collection would free it."""
    found = weakref.finalize(_Cycle(), lambda: None)
    try:
        leave_imports()
        gc.collect()
        assert found.alive
    finally:
        gc.unfreeze()
    gc.collect()
    assert not found.alive


class _Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def fail() -> None:
    raise RuntimeError("secret: address 0xdeadbeef")


def fail_times(guard: ForwardGuard, count: int) -> None:
    for _ in range(count):
        with pytest.raises(ForwardFailed):
            guard.run(fail, 1)


def test_a_failure_is_logged_and_told_without_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ForwardFailed, match=r"^the model failed in this step$"):
        ForwardGuard().run(fail, 3)
    assert "a forward over 3 requests failed" in caplog.text and "0xdeadbeef" in caplog.text


def test_the_eighth_failure_in_a_row_is_raised_as_it_is() -> None:
    guard = ForwardGuard()
    fail_times(guard, 7)
    with pytest.raises(RuntimeError, match="secret"):
        guard.run(fail, 1)


def test_one_good_forward_forgives_those_before_it() -> None:
    guard = ForwardGuard()
    for _ in range(3):
        fail_times(guard, 7)
        assert guard.run(lambda: "fine", 1) == "fine"


def test_an_outbox_hands_over_what_was_said_once_and_in_order() -> None:
    outbox = Outbox()
    outbox.failed(ONE, "INTERNAL", "text", retryable=True)
    outbox.abort_done(ONE, was_running=False)
    failed = Failed(attempt=ONE, code="INTERNAL", message="text", retryable=True)
    assert list(outbox.drain()) == [failed, AbortDone(attempt=ONE, was_running=False)]
    assert not outbox.drain()
