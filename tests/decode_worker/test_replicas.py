"""Which replica gets a message, and one forward for the steps of all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from decoding.engines import make_request

from effuse.decode_worker.replicas import JointForward, ReplicatedEngine
from effuse.kvtransfer.messages import AttemptId
from effuse.placement.records import Load
from effuse.worker.messages import Abort, StartDecode, StartRehearsal, WriterGone


class Engine:
    """Records the messages that it gets."""

    def __init__(self, waiting: int = 0, blocks_left: int = 0) -> None:
        self.messages: list[Any] = []
        self.known: set[str] = set()
        self.groups: set[str] = set()
        self.now = Load(waiting=waiting, blocks_left=blocks_left, running=1, total_pages=8)

    def handle(self, message: Any) -> None:
        self.messages.append(message)

    def knows(self, transfer_id: str, group: str = "") -> bool:
        return transfer_id in self.known or group in self.groups

    def load(self) -> Load:
        return self.now


@pytest.fixture
def engines() -> list[Engine]:
    return [Engine(blocks_left=7), Engine(blocks_left=3), Engine(waiting=1)]


@pytest.fixture
def core(engines: list[Engine]) -> ReplicatedEngine:
    return ReplicatedEngine(engines, JointForward(None))  # type: ignore[arg-type]


def attempt(name: str) -> AttemptId:
    return AttemptId(f"request-{name}", 1, f"transfer-{name}")


def request(name: str, group: str = "") -> StartDecode:
    return make_request(name, [1, 2, 3], group=group)


def test_a_request_goes_to_the_idlest_replica(
    core: ReplicatedEngine, engines: list[Engine]
) -> None:
    core.handle(request("a"))
    assert [len(engine.messages) for engine in engines] == [0, 1, 0]


def test_siblings_share_a_replica(core: ReplicatedEngine, engines: list[Engine]) -> None:
    engines[2].groups.add("call-1")
    core.handle(request("a", "call-1"))
    core.handle(request("b", "call-2"))
    assert [len(engine.messages) for engine in engines] == [0, 1, 1]


def test_what_follows_goes_where_the_attempt_is(
    core: ReplicatedEngine, engines: list[Engine]
) -> None:
    engines[2].known.add("transfer-a")
    for message in (
        request("a"),  # a second start, or one after its abort, which that replica refuses
        Abort(attempt=attempt("a")),
        WriterGone(transfer_id="transfer-a", has_drained=True),
    ):
        core.handle(message)
    assert len(engines[2].messages) == 3


def test_one_replica_answers_for_an_unknown_attempt(
    core: ReplicatedEngine, engines: list[Engine]
) -> None:
    core.handle(Abort(attempt=attempt("never seen")))
    assert [len(engine.messages) for engine in engines] == [1, 0, 0]


def test_rehearsals_of_each_writer_reach_every_replica_in_turn(
    core: ReplicatedEngine, engines: list[Engine]
) -> None:
    for number in range(6):
        for writer in ("v", "w") if number % 3 else ("w", "v"):
            name = f"{writer}-{number}"
            core.handle(StartRehearsal(attempt=attempt(name), writer=writer, most_pages=1))
    for engine in engines:
        assert Counter(message.writer for message in engine.messages) == {"v": 2, "w": 2}


def test_loads_add_up(core: ReplicatedEngine) -> None:
    load = core.load()
    assert (load.waiting, load.blocks_left, load.running, load.total_pages) == (1, 10, 3, 24)
