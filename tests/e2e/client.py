"""What an end-to-end test sends and reads: a thin client of the public stubs, no retries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc

from effuse.v1 import generation_pb2, generation_pb2_grpc, worker_pb2, worker_pb2_grpc

DEADLINE_S = 120.0
_T = TypeVar("_T")
_R = TypeVar("_R")


class Client:
    """One connection to a router."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)

    def generate(
        self, request: generation_pb2.GenerateRequest, timeout_s: float = DEADLINE_S
    ) -> generation_pb2.GenerateResponse:
        return self.stub.Generate(request, timeout=timeout_s)

    def stream(
        self, request: generation_pb2.GenerateRequest, timeout_s: float = DEADLINE_S
    ) -> Iterator[generation_pb2.GenerateStreamResponse]:
        return self.stub.GenerateStream(request, timeout=timeout_s)

    def close(self) -> None:
        self.channel.close()


@contextlib.contextmanager
def connect(address: str) -> Iterator[Client]:
    client = Client(address)
    try:
        yield client
    finally:
        client.close()


def all_at_once(
    work: Callable[[_T], _R], items: Sequence[_T], threads: int | None = None
) -> list[_R]:
    """Runs `work` on all items at the same time; results in the order of the items."""
    with ThreadPoolExecutor(threads or len(items)) as pool:
        return list(pool.map(work, items))


def load_of(address: str) -> worker_pb2.GetLoadResponse:
    """What a worker says of itself."""
    with grpc.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        load: worker_pb2.GetLoadResponse = stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=10)
        return load
