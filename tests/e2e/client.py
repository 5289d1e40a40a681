"""Requests and reads of end-to-end tests: a thin client of the public stubs, no retries."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc
from slowness import patient

from effuse.protos.channels import TOKEN_KEY
from effuse.protos.fleet_secret import FleetSecret
from effuse.v1 import generation_pb2, generation_pb2_grpc, worker_pb2, worker_pb2_grpc

DEADLINE_S = patient(120.0)
_T = TypeVar("_T")
_R = TypeVar("_R")


class Client:
    """One connection to a router; shared by all clients of an address unless it is `alone`."""

    def __init__(self, address: str, *, alone: bool = False) -> None:
        options = [("grpc.use_local_subchannel_pool", int(alone))]
        self.channel = grpc.insecure_channel(address, options)
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)

    def generate(
        self, request: generation_pb2.GenerateRequest, timeout_s: float = DEADLINE_S
    ) -> generation_pb2.GenerateResponse:
        return self.stub.Generate(request, timeout=timeout_s)

    def stream(
        self, request: generation_pb2.GenerateRequest, timeout_s: float = DEADLINE_S
    ) -> Iterator[generation_pb2.GenerateStreamResponse]:
        return self.stub.GenerateStream(
            generation_pb2.GenerateStreamRequest(request=request), timeout=timeout_s
        )

    def look_up(self, name: str) -> generation_pb2.GetRequestResponse:
        """State of a request; nothing is set if the router has not seen it yet."""
        asked = generation_pb2.GetRequestRequest(request_id=name)
        try:
            return self.stub.GetRequest(asked, timeout=30)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return generation_pb2.GetRequestResponse()

    def attempt_of(self, name: str) -> int:
        """The newest attempt at a request; 0 where the router has not seen it yet."""
        return self.look_up(name).attempt

    def close(self) -> None:
        self.channel.close()


@contextlib.contextmanager
def connect(address: str, *, alone: bool = False) -> Iterator[Client]:
    client = Client(address, alone=alone)
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


def wait_until(done: Callable[[], bool], complaint: str, within_s: float = 60.0) -> None:
    """Returns once the condition holds, for silent changes in another process. `within_s` is for
    quiet cores: a slow machine has longer.
    """
    deadline = time.monotonic() + patient(within_s)
    while not done():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)


def load_of(address: str, secret: FleetSecret | None = None) -> worker_pb2.GetLoadResponse:
    """A worker's own report, with or without its fleet's secret."""
    token = () if secret is None else ((TOKEN_KEY, secret.token(address)),)
    with grpc.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        load: worker_pb2.GetLoadResponse = stub.GetLoad(
            worker_pb2.GetLoadRequest(), timeout=30, metadata=token
        )
        return load
