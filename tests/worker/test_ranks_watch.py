"""The thread that watches a group's ranks: their answers, and how seldom it looks at them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from slowness import patient

from effuse.worker import ranks, watchdog
from effuse.worker.config import WorkerConfig
from effuse.worker.rank_messages import ENCODER, Advanced, Taken, answers_path
from effuse.worker.watchdog import GroupBroken


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Reasons for which groups broke, whose ranks sleep and read no commands."""
    found = list[tuple[str, str]]()
    monkeypatch.setattr(ranks, "spawn", lambda _: subprocess.Popen(("sleep", "600")))
    monkeypatch.setattr(ranks, "_QUIT_S", 0.1)
    yield found
    assert [ending for _, ending in found] == ["died"]


def sleeping(broken: list[tuple[str, str]]) -> ranks.Ranks:
    config = WorkerConfig(tensor_parallel_size=3)
    return ranks.Ranks(config, "decode", "life-1", lambda *why: broken.append(why))


def check_ended(made: ranks.Ranks, why: str) -> None:
    with pytest.raises(GroupBroken, match=why):
        made.wait_for("present", patient(10.0))
    processes = [one.process for one in made._others.values()]
    ends = [one.wait(patient(10.0)) for one in processes if one is not None]
    assert ends == [-signal.SIGKILL] * 2


PAGES_MOVED = msgspec.msgpack.encode({"type": "PagesMoved", "number": "1", "digests": b""})
NESTED = b"\x82\xa4type\xa8Computed\xa1a" + b"\x91" * 30_000


@pytest.mark.parametrize(
    ("frames", "named"),
    [
        ([b"\x01", b"none that a rank sends"], "rank 1 sent an invalid message"),
        ([b"\x02", PAGES_MOVED], "rank 2 sent an invalid message"),
        ([b"\x02", NESTED], "rank 2 sent an invalid message"),
        ([b"\x01"], "rank 1 sent an invalid message: 1 frames"),
        (
            [b"\x01", ENCODER.encode(Taken(0, 0)), b""],
            "rank 1 sent an invalid message: 3 frames",
        ),
        (
            [b"\x03", ENCODER.encode(Taken(0, 0))],
            "rank 3 sent an invalid message: .* has ranks 1 to 2",
        ),
        ([b"", ENCODER.encode(Taken(0, 0))], "rank 0 sent an invalid message: .* has ranks 1 to 2"),
    ],
)
def test_a_malformed_answer_ends_the_group_and_names_its_rank(
    broken: list[tuple[str, str]], frames: list[bytes], named: str
) -> None:
    made = sleeping(broken)
    with contextlib.closing(made), zmq.Context() as context, context.socket(zmq.PUSH) as other:
        other.connect(answers_path(made.home))
        other.send_multipart(frames)
        check_ended(made, named)


def test_answers_bring_no_looks_for_frozen_ranks(
    broken: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look reads a file for each rank."""
    looks, look = list[int](), watchdog.Stopped.look

    def note(stopped: watchdog.Stopped, pid: int, now: float) -> float:
        looks.append(pid)
        return look(stopped, pid, now)

    monkeypatch.setattr(watchdog.Stopped, "look", note)
    made, num_answers = sleeping(broken), 200
    with contextlib.closing(made), zmq.Context() as context, context.socket(zmq.PUSH) as other:
        other.connect(answers_path(made.home))
        began = time.monotonic()
        for number in range(num_answers):
            other.send_multipart([b"\x01", ENCODER.encode(Advanced(number))])
            made._await(lambda: made._num_signs > number, 10, "no answer came")  # noqa: B023
        allowed = (time.monotonic() - began) / 0.25 + 2
        assert 1 <= looks.count(looks[0]) <= allowed < num_answers
        other.send_multipart([b"none"])
        check_ended(made, "an invalid message")


def test_no_group_outlives_its_watch(
    broken: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr(ranks.Ranks, "_look_for_frozen", fail)
    with contextlib.closing(sleeping(broken)) as made:
        check_ended(made, "the watch of the ranks has failed: planted")
