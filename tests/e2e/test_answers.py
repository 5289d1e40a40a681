"""Several answers to one request, by real processes: one handoff, and none lost with its worker."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from e2e.client import Client, all_at_once, connect, load_of, wait_until
from e2e.processes import engine_of
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import Job

from effuse.cli.fleet import Fleet
from effuse.v1 import generation_pb2 as pb

N = 4
REQUESTS = 3
DECODE = ("decode-0", "decode-1")


def job(number: int, length: int = 33) -> Job:
    """Two whole pages of a prompt and a token more; an answer that takes many steps."""
    return Job(
        prompt=tuple((7 * at + number) % 250 for at in range(length)),
        max_tokens=120,
        algorithm="d2f",
        confidence_threshold=0.99,
        denoising_steps=8,
        temperature=1.0,
        seed=number,
        ignore_eos=True,
    )


def message(number: int, n: int = N, name: str | None = None) -> pb.GenerateRequest:
    asked = job(number).message(name)
    asked.n = n
    return asked


def tokens(answer: pb.GenerateResponse) -> list[list[int]]:
    return [list(one.token_ids) for one in (answer, *answer.others)]


class Streams:
    """Requests whose events are read as they come; `begun` once each has several answers."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._writing = threading.Lock()
        self._begun: set[tuple[int, int]] = set()
        self.all_begun = threading.Event()

    def read(self, number: int) -> list[list[int]]:
        told: list[list[int]] = [[] for _ in range(N)]
        ended = []
        for event in self._client.stream(message(number, name=f"disturbed-{number}")):
            told[event.answer_index] += event.commit.token_ids
            assert event.answer_index not in ended, "nothing follows an end"
            if event.HasField("finished"):
                ended.append(event.answer_index)
            elif event.HasField("commit"):
                self._note(number, event.answer_index)
        assert sorted(ended) == list(range(N))
        return told

    def _note(self, number: int, index: int) -> None:
        with self._writing:
            self._begun.add((number, index))
            if len(self._begun) == N * REQUESTS:
                self.all_begun.set()


@pytest.mark.parametrize("connector", ["zmq", "nixl"])
def test_answers_share_one_handoff_and_outlive_their_worker(connector: str) -> None:
    with (
        tiny_fleet("dream", connector=connector, decode=2) as fleet,
        connect(fleet.address) as client,
    ):
        undisturbed = all_at_once(lambda at: client.generate(message(at)), range(REQUESTS))
        _one_handoff_each(fleet, undisturbed)
        for number, answer in enumerate(undisturbed):
            assert len({tuple(one) for one in tokens(answer)}) == N, "each draws for itself"
            assert tokens(client.generate(message(number, n=1))) == tokens(answer)[:1]
        streams = Streams(client)
        victim = threading.Thread(target=_kill, args=(fleet, streams))
        victim.start()
        disturbed = all_at_once(streams.read, range(REQUESTS))
        victim.join()
        assert disturbed == [tokens(answer) for answer in undisturbed]
        attempts = [client.attempt_of(f"disturbed-{number}") for number in range(REQUESTS)]
        assert max(attempts) > 1, "nobody lost a worker"
        for name in DECODE:
            wait_until(lambda name=name: _is_empty(fleet, name), "pages are left")  # type: ignore[misc]


def _one_handoff_each(fleet: Fleet, answers: Sequence[pb.GenerateResponse]) -> None:
    """Each prompt was pushed once, with the pages of one prompt."""
    pages = -(-len(job(0).prompt) // TINY.page_size)
    for answer in answers:
        assert answer.stats.kv_bytes == pages * TINY.page_bytes
        assert [one.stats.kv_bytes for one in answer.others] == [0] * (N - 1)
        assert {one.stats.decode_worker for one in answer.others} == {answer.stats.decode_worker}
    pushed = len(answers) * pages * TINY.page_bytes
    received = sum(load_of(fleet.address_of(name)).kv_bytes for name in DECODE)
    assert received == pushed
    wait_until(
        lambda: load_of(fleet.address_of("prefill-0")).kv_bytes == pushed, "pushed more than once"
    )


def _kill(fleet: Fleet, streams: Streams) -> None:
    """One of the decode engines, while it writes answers."""
    assert streams.all_begun.wait(60)
    engine_of(fleet.processes[DECODE[0]].pid).kill()


def _is_empty(fleet: Fleet, name: str) -> bool:
    load = load_of(fleet.address_of(name))
    return bool(load.worker.incarnation) and load.free_pages == load.total_pages > 0
