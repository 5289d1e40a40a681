"""Several answers to one request, by real processes: one handoff, and none lost with its worker."""

from __future__ import annotations

import queue
import threading
import urllib.request
from collections.abc import Sequence

from e2e.client import Client, all_at_once, connect, load_of, wait_until
from e2e.processes import engine_of
from e2e.tiny import TINY, tiny_fleet
from e2e.workload import Job
from prometheus_client.parser import text_string_to_metric_families

from effuse.cli.fleet import Fleet
from effuse.v1 import generation_pb2 as pb

N = 4
REQUESTS = 3
TRIES = 5  # at a kill that comes before the answers are over
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
    """Requests whose events are read as they come; `begun` has each that wrote something."""

    def __init__(self, client: Client, attempt: int) -> None:
        self._client = client
        self._attempt = attempt
        self.begun: queue.SimpleQueue[int] = queue.SimpleQueue()

    def name(self, number: int) -> str:
        return f"disturbed-{self._attempt}-{number}"

    def read(self, number: int) -> list[list[int]]:
        told: list[list[int]] = [[] for _ in range(N)]
        ended = []
        for event in self._client.stream(message(number, name=self.name(number))):
            told[event.answer_index] += event.commit.token_ids
            assert event.answer_index not in ended, "nothing follows an end"
            if event.HasField("finished"):
                ended.append(event.answer_index)
            elif event.HasField("commit"):
                self.begun.put(number)
        assert sorted(ended) == list(range(N))
        return told


def test_answers_share_one_handoff_and_outlive_their_worker() -> None:
    with (
        tiny_fleet("dream", connector="nixl", decode=2) as fleet,
        connect(fleet.address) as client,
    ):
        undisturbed = all_at_once(lambda at: client.generate(message(at)), range(REQUESTS))
        _one_handoff_each(fleet, undisturbed)
        for number, answer in enumerate(undisturbed):
            assert len({tuple(one) for one in tokens(answer)}) == N, "each draws for itself"
            assert tokens(client.generate(message(number, n=1))) == tokens(answer)[:1]
        for attempt in range(TRIES):
            streams = Streams(client, attempt)
            victim = threading.Thread(target=_kill, args=(fleet, client, streams))
            victim.start()
            disturbed = all_at_once(streams.read, range(REQUESTS))
            victim.join()
            assert disturbed == [tokens(answer) for answer in undisturbed]
            for name in DECODE:
                wait_until(lambda name=name: _is_empty(fleet, name), "pages are left")  # type: ignore[misc]
            if _losses(fleet):
                return
        raise AssertionError("no request lost a worker")


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


def _kill(fleet: Fleet, client: Client, streams: Streams) -> None:
    """The decode engine that writes what comes first."""
    found = client.look_up(streams.name(streams.begun.get(timeout=60)))
    engine_of(fleet.processes[found.decode_worker].pid).kill()


def _losses(fleet: Fleet) -> float:
    """Attempts that the router has lost, by its own count."""
    url = f"http://{fleet.metrics()['router']}/metrics"
    with urllib.request.urlopen(url, timeout=30) as page:
        families = text_string_to_metric_families(page.read().decode())
    samples = [sample for family in families for sample in family.samples]
    return sum(one.value for one in samples if one.name == "effuse_worker_losses_total")


def _is_empty(fleet: Fleet, name: str) -> bool:
    load = load_of(fleet.address_of(name))
    return bool(load.worker.incarnation) and load.free_pages == load.total_pages > 0
