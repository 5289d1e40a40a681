"""Every metric in the dashboard moves: by requests, a cancelled one, a refused one, and one whose
decode worker loses its engine.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from e2e.processes import engine_of
from e2e.tiny import tiny_fleet
from k8s.monitoring import dashboard_queries, names_in
from prometheus_client.parser import text_string_to_metric_families
from slowness import patient

from effuse.cli.fleet import Fleet
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc

Samples = dict[tuple[str, ...], float]
DEADLINE_S = patient(120.0)


def scrape(fleet: Fleet) -> Samples:
    """Every sample of every process, by its name, labels and process."""
    found: Samples = {}
    for process, address in fleet.metrics().items():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as page:
            text = page.read().decode()
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                labels = [f"{name}={value}" for name, value in sorted(one.labels.items())]
                found[one.name, process, *labels] = one.value
    return found


def request(max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=range(20)),
        stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def until(fleet: Fleet, is_so: Callable[[Samples], bool]) -> Iterator[Samples]:
    """The served metrics, once they satisfy the condition."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        samples = scrape(fleet)
        yield samples
        if is_so(samples):
            return
    raise TimeoutError("it is never so")


def streamed(max_tokens: int) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(request=request(max_tokens))


def one_waits(samples: Samples) -> bool:
    return any(samples[one] for one in samples if one[0] == "effuse_num_requests_waiting")


def nobody_decodes(samples: Samples) -> bool:
    ready = {"effuse_workers", "state=ready", "worker_role=decode"}
    return not any(samples[one] for one in samples if ready <= set(one))


def looks(fleet: Fleet, stub: generation_pb2_grpc.GenerationServiceStub) -> Iterator[Samples]:
    """The served metrics before, during and after events."""
    yield scrape(fleet)
    cancelled = stub.GenerateStream(
        pb.GenerateStreamRequest(request=request(160)), timeout=DEADLINE_S
    )
    with ThreadPoolExecutor(3) as clients:
        # More than there are pages and seats for, so that one is preempted and others wait.
        calls = [clients.submit(stub.Generate, request(160), timeout=DEADLINE_S) for _ in range(3)]
        next(cancelled)
        yield from until(fleet, one_waits)
        cancelled.cancel()
        for call in calls:
            call.result()
    yield scrape(fleet)
    try:
        stub.Generate(pb.GenerateRequest(prompt=""), timeout=DEADLINE_S)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    survivor = stub.GenerateStream(
        pb.GenerateStreamRequest(request=request(160)), timeout=DEADLINE_S
    )
    next(survivor)
    engine_of(fleet.processes["decode-0"].pid).kill()
    yield from until(fleet, nobody_decodes)
    assert [event.WhichOneof("event") for event in survivor][-1] == "finished"
    yield scrape(fleet)


def test_every_metric_of_the_dashboard_moves() -> None:
    # One answer takes 12 pages, and two have a seat.
    flags = ("--num-pages", "13", "--max-num-seqs", "2")
    with (
        tiny_fleet("sdar", connector="zmq", decode_flags=flags) as fleet,
        grpc.insecure_channel(fleet.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        first, *later = looks(fleet, stub)
        missing = names_in(dashboard_queries()) - moved(first, later)
        deadline = time.monotonic() + DEADLINE_S
        # A link is measured when there are no requests, and an answer may end before it is
        # cancelled.
        while missing and time.monotonic() < deadline:
            cancelled = stub.GenerateStream(streamed(160), timeout=DEADLINE_S)
            next(cancelled)
            cancelled.cancel()
            missing -= moved(first, [scrape(fleet)])
    assert sorted(missing) == []


def moved(first: Samples, later: Iterable[Samples]) -> set[str]:
    """Names of changed values."""
    return {
        sample[0]
        for samples in later
        for sample, value in samples.items()
        if value != first.get(sample)
    }
