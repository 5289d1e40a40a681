"""The generated stubs on an asyncio channel, with asyncio's types of calls.

The generator writes the asyncio types only into the stub files; at run time one class serves both.
This file only has the casts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from effuse.v1 import (
    generation_pb2_grpc,
    model_pb2_grpc,
    monitor_pb2_grpc,
    proof_pb2_grpc,
    worker_pb2_grpc,
)

if TYPE_CHECKING:
    import grpc.aio


def generation_stub(channel: grpc.aio.Channel) -> generation_pb2_grpc.GenerationServiceAsyncStub:
    """The stub that clients use to generate."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    return cast("generation_pb2_grpc.GenerationServiceAsyncStub", stub)


def model_stub(channel: grpc.aio.Channel) -> model_pb2_grpc.ModelServiceAsyncStub:
    """The stub that clients use to list models."""
    return cast("model_pb2_grpc.ModelServiceAsyncStub", model_pb2_grpc.ModelServiceStub(channel))


def monitor_stub(channel: grpc.aio.Channel) -> monitor_pb2_grpc.MonitorServiceAsyncStub:
    """The stub that clients use to watch requests."""
    stub = monitor_pb2_grpc.MonitorServiceStub(channel)
    return cast("monitor_pb2_grpc.MonitorServiceAsyncStub", stub)


def prefill_stub(channel: grpc.aio.Channel) -> worker_pb2_grpc.PrefillServiceAsyncStub:
    """The router's stub for a prefill worker."""
    stub = worker_pb2_grpc.PrefillServiceStub(channel)
    return cast("worker_pb2_grpc.PrefillServiceAsyncStub", stub)


def decode_stub(channel: grpc.aio.Channel) -> worker_pb2_grpc.DecodeServiceAsyncStub:
    """The router's stub for a decode worker."""
    stub = worker_pb2_grpc.DecodeServiceStub(channel)
    return cast("worker_pb2_grpc.DecodeServiceAsyncStub", stub)


def worker_stub(channel: grpc.aio.Channel) -> worker_pb2_grpc.WorkerServiceAsyncStub:
    """The stub of the router, and of a decode worker's front, for any worker."""
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    return cast("worker_pb2_grpc.WorkerServiceAsyncStub", stub)


def proof_stub(channel: grpc.aio.Channel) -> proof_pb2_grpc.ProofServiceAsyncStub:
    """The stub by which a process of the fleet asks another one for its proof."""
    return cast("proof_pb2_grpc.ProofServiceAsyncStub", proof_pb2_grpc.ProofServiceStub(channel))
