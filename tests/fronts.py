"""A worker's front in this process with an engine that has no model, and requests for it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc.aio
import pytest
from eventually import eventually
from slowness import patient

from effuse.protos import rpc
from effuse.protos.channels import OPEN, decode_stub, prefill_stub, worker_stub
from effuse.protos.errors import EffuseError, from_rpc_error
from effuse.v1 import worker_pb2 as pb
from effuse.v1 import worker_pb2_grpc as pb_grpc
from effuse.worker.config import WorkerConfig
from effuse.worker.front import Front, Role

SETTINGS = pb.DecodeSettings(
    algorithm="d2f",
    window=2,
    confidence_threshold=0.9,
    block_add_threshold=0.1,
    full_activation_threshold=0.95,
    score="confidence",
    remasking="low_confidence_dynamic",
    denoising_steps=2,
)
"""Of a decode request that a worker takes."""

FAKE_ENGINE = "fake_engine"
PROMPT = (5, 6, 7)
NOBODY = 20011  # no process listens there, and no kernel hands it out
DecodeCall: TypeAlias = "grpc.aio.UnaryStreamCall[pb.DecodeRequest, pb.DecodeResponse]"


def use_fake_engine(role: Role) -> Role:
    """The role with an engine process that has no model; it must be `importable`."""
    return dataclasses.replace(role, engine_module=FAKE_ENGINE)


@contextmanager
def importable() -> Iterator[None]:
    """Lets processes that are started meanwhile import what lies beside this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield


@dataclass
class Running:
    """A front that serves, and a channel to it."""

    front: Front
    channel: grpc.aio.Channel
    stop: asyncio.Event
    done: asyncio.Task[None]
    ready_file: Path

    @property
    def incarnation(self) -> str:
        return self.front.shell.incarnation

    @property
    def decode(self) -> pb_grpc.DecodeServiceAsyncStub:
        return decode_stub(self.channel)

    @property
    def prefill(self) -> pb_grpc.PrefillServiceAsyncStub:
        return prefill_stub(self.channel)

    @property
    def worker(self) -> pb_grpc.WorkerServiceAsyncStub:
        return worker_stub(self.channel)

    async def load(self) -> pb.GetLoadResponse:
        return await self.worker.GetLoad(pb.GetLoadRequest(), timeout=30)

    async def until_free(self) -> None:
        """Returns when nothing runs and every page is free."""

        async def is_free() -> bool:
            load = await self.load()
            idle = not (load.running or load.waiting or load.quarantined_pages)
            return idle and load.total_pages == load.free_pages > 0

        await eventually(is_free)

    async def until_new_life(self, old: str) -> None:
        """Returns when an engine of another incarnation is ready."""
        await eventually(lambda: self.incarnation not in ("", old))


@asynccontextmanager
async def running(
    role: Role, config: WorkerConfig, tmp_path: Path, limit_s: float = 60.0
) -> AsyncIterator[Running]:
    """A front that is ready; at the end it drains and must leave nothing."""
    ready_file = tmp_path / "ready.json"
    config = dataclasses.replace(config, ready_file=ready_file)
    stop = asyncio.Event()
    with importable():
        async with asyncio.timeout(patient(limit_s)), asyncio.TaskGroup() as tasks:
            front = Front(config, use_fake_engine(role), tasks)
            done = tasks.create_task(front.run(stop))
            try:
                await eventually(ready_file.exists)
                address = json.loads(ready_file.read_text())["address"]
                async with OPEN.connect(address, keepalive=None) as channel:
                    yield Running(front, channel, stop, done, ready_file)
            finally:
                stop.set()
                await asyncio.wait({done})


class PrefillPeer(pb_grpc.WorkerServiceServicer):
    """A prefill worker that is asked to let go of attempts."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.AbortResponse:
        self.asked.append(request.attempt.transfer_id)
        await self.may_answer.wait()
        return pb.AbortResponse(incarnation="prefill-life", was_running=True, drained=True)

    async def GetLoad(
        self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.GetLoadResponse:
        raise NotImplementedError

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.DrainResponse:
        raise NotImplementedError

    async def Undrain(
        self, request: pb.UndrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.UndrainResponse:
        raise NotImplementedError

    async def SetRole(
        self, request: pb.SetRoleRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.SetRoleResponse:
        raise NotImplementedError


@asynccontextmanager
async def prefill_peer() -> AsyncIterator[tuple[PrefillPeer, str]]:
    peer, server = PrefillPeer(), rpc.RpcServer(rpc.FLEET_LIMITS)
    pb_grpc.add_WorkerServiceServicer_to_server(peer, server.server)
    port = await server.start("127.0.0.1:0", ["effuse.v1.WorkerService"])
    try:
        yield peer, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def event_of(
    call: grpc.aio.UnaryStreamCall[pb.DecodeRequest, pb.DecodeResponse],
) -> pb.DecodeResponse:
    """The next event of a decode, which must not have ended."""
    event = await call.read()
    assert isinstance(event, pb.DecodeResponse)
    return event


async def events_of(
    call: grpc.aio.UnaryStreamCall[pb.DecodeRequest, pb.DecodeResponse],
) -> list[pb.DecodeResponse]:
    """All events of a decode to its good end, however many came in one message."""
    return [event async for response in call for event in (response, *response.then)]


async def failure_of(
    call: grpc.aio.UnaryStreamCall[pb.DecodeRequest, pb.DecodeResponse],
) -> EffuseError:
    """Reads a decode to its end and returns the error that this must be."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    return from_rpc_error(caught.value, "the worker")


def attempt(name: str, number: int = 1) -> pb.AttemptId:
    return pb.AttemptId(
        request_id=f"request-{name}", attempt=number, transfer_id=f"{name}-{number}"
    )


def decode_request(name: str, incarnation: str, first_token: int = 5) -> pb.DecodeRequest:
    """A request of 3 tokens that the worker prefills itself; the first token controls what
    happens.
    """
    return pb.DecodeRequest(
        attempt=attempt(name),
        incarnation=incarnation,
        prompt_token_ids=[first_token, *PROMPT[1:]],
        max_tokens=3,
        stop_token_ids=[1],
        sampling=pb.DecodeSampling(top_p=1.0),
        settings=SETTINGS,
        local=pb.LocalPrefill(),
    )


def prefill_start(name: str, incarnation: str, first_token: int = 5) -> pb.PrefillRequest:
    return pb.PrefillRequest(
        start=pb.PrefillStart(
            attempt=attempt(name),
            prompt_token_ids=[first_token, *PROMPT[1:]],
            incarnation=incarnation,
        )
    )


def reservation(name: str) -> pb.PrefillRequest:
    """Two pages of a decode worker without a writer."""
    return pb.PrefillRequest(
        reservation=pb.Reservation(
            attempt=attempt(name),
            incarnation="decode-life",
            connector="zmq",
            shards=[
                pb.ReceivingShard(
                    endpoint="tcp://127.0.0.1:1", end_head=1, end_group=1, page_bytes=32
                )
            ],
            num_pool_pages=8,
            pages=[pb.PageRef(page_id=3, generation=1), pb.PageRef(page_id=4, generation=9)],
            fingerprint=[pb.FingerprintField(name="weights", value="w")],
            lease_s=30.0,
        )
    )
