"""The generated stubs over an asyncio channel, with the types that calls on one have.

The generator writes the asyncio types into the stub files only; at run time there is one class for
both. Not here: anything but the casts.
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
    """What clients call to generate."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    return cast("generation_pb2_grpc.GenerationServiceAsyncStub", stub)


def model_stub(channel: grpc.aio.Channel) -> model_pb2_grpc.ModelServiceAsyncStub:
    """What clients call to list models."""
    return cast("model_pb2_grpc.ModelServiceAsyncStub", model_pb2_grpc.ModelServiceStub(channel))


def monitor_stub(channel: grpc.aio.Channel) -> monitor_pb2_grpc.MonitorServiceAsyncStub:
    """What clients call to watch."""
    stub = monitor_pb2_grpc.MonitorServiceStub(channel)
    return cast("monitor_pb2_grpc.MonitorServiceAsyncStub", stub)


def prefill_stub(channel: grpc.aio.Channel) -> worker_pb2_grpc.PrefillServiceAsyncStub:
    """What the router calls on a prefill worker."""
    stub = worker_pb2_grpc.PrefillServiceStub(channel)
    return cast("worker_pb2_grpc.PrefillServiceAsyncStub", stub)


def decode_stub(channel: grpc.aio.Channel) -> worker_pb2_grpc.DecodeServiceAsyncStub:
    """What the router calls on a decode worker."""
    stub = worker_pb2_grpc.DecodeServiceStub(channel)
    return cast("worker_pb2_grpc.DecodeServiceAsyncStub", stub)


def worker_stub(channel: grpc.aio.Channel) -> worker_pb2_grpc.WorkerServiceAsyncStub:
    """What the router, and a decode worker's front, call on any worker."""
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    return cast("worker_pb2_grpc.WorkerServiceAsyncStub", stub)


def proof_stub(channel: grpc.aio.Channel) -> proof_pb2_grpc.ProofServiceAsyncStub:
    """What a process of the fleet asks of another one before it sends anything."""
    return cast("proof_pb2_grpc.ProofServiceAsyncStub", proof_pb2_grpc.ProofServiceStub(channel))
