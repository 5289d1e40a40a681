"""Prompts whose computing takes long: a forward of more than a lease, and several parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from checkpoints import write_tiny_checkpoint
from prefill_worker.rig import LEASE_S, Rig, attempt_of

from effuse.kvtransfer.messages import AttemptId
from effuse.worker.engine_process import EngineLoop
from effuse.worker.messages import (
    Abort,
    AbortDone,
    Failed,
    PrefillDone,
    PromptProgress,
    PromptPushed,
    PushTo,
    StartPrefill,
    ToEngine,
    ToFront,
)

PROMPT = tuple(3 + (7 * i) % 200 for i in range(22))
NUM_PAGES = 5


class Engine:
    """A loop over the rig's engine, each of whose layers takes most of a lease."""

    def __init__(self, rig: Rig, front: zmq.Socket[bytes], own: zmq.Socket[bytes]) -> None:
        self.rig = rig
        self._front = front
        self._loop = EngineLoop(rig.engine, own, rig.pulse, meanwhile=rig.engine.meanwhile)
        self.at_first_layer: list[Callable[[], None]] = []
        rig.on_layer = self._on_layer

    def _on_layer(self) -> None:
        while self.at_first_layer:
            self.at_first_layer.pop()()
        for _ in range(7):
            self.rig.time += 0.1 * LEASE_S
            self.rig.receiver.poll(self.rig.time)
        self.rig.pulse.mark()

    def say(self, *messages: ToEngine) -> None:
        for message in messages:
            self._front.send(msgspec.msgpack.encode(message))

    def start(self, name: str) -> AttemptId:
        self.say(StartPrefill(attempt=attempt_of(name), prompt_token_ids=PROMPT))
        return attempt_of(name)

    def push_to(self, attempt: AttemptId, num_pages: int = NUM_PAGES) -> None:
        self.say(PushTo(reservation=self.rig.reserve(attempt, num_pages)))

    def ends(self) -> list[ToFront]:
        """How attempts have ended after a while."""
        for _ in range(40):
            assert self._loop.turn()
        heard: list[ToFront] = []
        while self._front.poll(0):
            heard += msgspec.msgpack.decode(self._front.recv(), type=list[ToFront])
        return [one for one in heard if isinstance(one, Failed | PromptPushed | AbortDone)]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    path = write_tiny_checkpoint(tmp_path / "sdar", "sdar", seed=3)
    rig = Rig(path, budget=22)  # one prompt after the other
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front, own = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    front.bind("inproc://front")
    own.connect("inproc://front")
    yield Engine(rig, front, own)
    context.destroy(linger=0)
    rig.close()


def pushed(ends: list[ToFront]) -> list[str]:
    assert all(isinstance(end, PromptPushed) for end in ends), ends
    return [end.attempt.request_id for end in ends if isinstance(end, PromptPushed)]


def test_a_prompt_whose_forward_takes_several_leases_is_handed_over(engine: Engine) -> None:
    engine.push_to(engine.start("a"))
    assert pushed(engine.ends()) == ["request-a"]
    assert engine.rig.time - 1000.0 > LEASE_S


def test_so_is_one_whose_place_becomes_known_within_its_forward(engine: Engine) -> None:
    attempt = engine.start("a")
    engine.at_first_layer.append(lambda: engine.push_to(attempt))
    assert pushed(engine.ends()) == ["request-a"]


def test_so_are_those_that_wait_behind_it_or_come_meanwhile(engine: Engine) -> None:
    for name in "ab":
        engine.push_to(engine.start(name))
    engine.at_first_layer.append(lambda: engine.push_to(engine.start("c")))
    # The last one's KV is known by the time that it begins: no forward of its own delays it.
    assert pushed(engine.ends()) == ["request-a", "request-c", "request-b"]


def test_what_ends_an_attempt_waits_for_the_forward_and_keeps_its_order(engine: Engine) -> None:
    def come() -> None:
        engine.say(Abort(attempt=attempt))
        engine.push_to(attempt)
        engine.say(Abort(attempt=attempt_of("b")))
        engine.start("b")
        engine.push_to(engine.start("c"), num_pages=1)

    attempt = engine.start("a")
    engine.at_first_layer.append(come)
    unknown, refused, wrong, done = engine.ends()
    assert done == AbortDone(attempt=attempt, was_running=True)
    assert unknown == AbortDone(attempt=attempt_of("b"), was_running=False)
    assert isinstance(refused, Failed) and refused.code == "ABORTED"
    assert isinstance(wrong, Failed) and "needs 5 pages, 1 are reserved" in wrong.message


def test_each_part_but_the_last_is_reported_where_asked_for(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "sdar", "sdar", seed=3, block_size=4)
    rig = Rig(path, budget=8)
    prompt = tuple(range(20, 44))
    quiet = rig.start("a", prompt)
    rig.settle()
    rig.abort(quiet)
    rig.settle()
    assert not rig.take(PromptProgress)
    longer = (*prompt, *range(60, 84))
    rig.engine.handle(StartPrefill(attempt=attempt_of("b"), prompt_token_ids=longer, progress=True))
    rig.settle()
    assert [one.computed_tokens for one in rig.take(PromptProgress)] == [32, 40]
    assert len(rig.take(PrefillDone)) == 2
    rig.close()
