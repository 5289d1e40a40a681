"""The generated stubs on an asyncio channel, with asyncio's types of calls.

The generator writes the asyncio types only into the stub files; at run time one class serves both.
This file only has the casts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar, cast

import grpc.aio

from effuse.v1 import generation_pb2_grpc as generation
from effuse.v1 import model_pb2_grpc as model
from effuse.v1 import monitor_pb2_grpc as monitor
from effuse.v1 import proof_pb2_grpc as proof
from effuse.v1 import worker_pb2_grpc as worker

T = TypeVar("T")
Stub = Callable[[grpc.aio.Channel], T]

generation_stub: Final = cast(
    "Stub[generation.GenerationServiceAsyncStub]", generation.GenerationServiceStub
)
model_stub: Final = cast("Stub[model.ModelServiceAsyncStub]", model.ModelServiceStub)
monitor_stub: Final = cast("Stub[monitor.MonitorServiceAsyncStub]", monitor.MonitorServiceStub)
prefill_stub: Final = cast("Stub[worker.PrefillServiceAsyncStub]", worker.PrefillServiceStub)
decode_stub: Final = cast("Stub[worker.DecodeServiceAsyncStub]", worker.DecodeServiceStub)
worker_stub: Final = cast("Stub[worker.WorkerServiceAsyncStub]", worker.WorkerServiceStub)
proof_stub: Final = cast("Stub[proof.ProofServiceAsyncStub]", proof.ProofServiceStub)
