"""gRPC surfaces: a router in this process, whole fleets of processes, and their inputs.

Both are real servers with all their interceptors, called over sockets.
"""

from __future__ import annotations

import asyncio
import functools
import random
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from bad_input.clients import client_cases, good
from bad_input.gateways import gateway_cases
from bad_input.requests import Facts
from bad_input.workers import DECODE, decode_request, worker_cases
from e2e.client import load_of
from e2e.processes import open_files, pids, resident_bytes
from e2e.tiny import TINY, tiny_checkpoint
from fuzz.drawing import Draw, drawn_bytes
from fuzz.surface import MOST_GROWTH_BYTES, Face, RanLate
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from router.fake_model import BLOCK_SIZE, MASK, MAX_MODEL_LEN, PAD, VOCAB_SIZE
from router.fakes import FakeFleet, fake_fleet

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.compat import kserve_pb2, vllm_engine_pb2
from effuse.router.router import Router
from effuse.v1 import generation_pb2, model_pb2, monitor_pb2, worker_pb2

DEADLINE_S: Final = 120.0
MOST_READ: Final = 3  # answers of a stream, before it is given up
OURS: Final = frozenset({"UNKNOWN", "INTERNAL", "DATA_LOSS"})
"""Ends that bad input may never have."""

WRITTEN_IN_VAIN: Final = "Internal error from Core"
"""The error of gRPC's own client for a message that it sends after the server has ended a call."""

PUBLIC: Final[Sequence[ServiceDescriptor]] = (
    *generation_pb2.DESCRIPTOR.services_by_name.values(),
    *model_pb2.DESCRIPTOR.services_by_name.values(),
    *monitor_pb2.DESCRIPTOR.services_by_name.values(),
    *vllm_engine_pb2.DESCRIPTOR.services_by_name.values(),
    *kserve_pb2.DESCRIPTOR.services_by_name.values(),
    *health_pb2.DESCRIPTOR.services_by_name.values(),
    *reflection_pb2.DESCRIPTOR.services_by_name.values(),
)
INNER: Final = worker_pb2.DESCRIPTOR.services_by_name


class Misbehaved(AssertionError):
    """A call ended as none may, or not at all."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method, and good or nearly good messages for it."""

    path: str
    kind: type[Message]
    goods: Sequence[Message]
    streams: bool  # requests
    is_endless: bool

    def draw(self, draw: Draw) -> list[bytes]:
        """The messages of one call."""
        count = draw.choice((0, 1, 1, 2, 3)) if self.streams else 1
        number = draw.randrange(2**40)
        goods = [_renamed(draw.choice(self.goods), number) for _ in range(count) if self.goods]
        return [drawn_bytes(draw, self.kind, goods[at : at + 1]) for at in range(count)]


def _renamed(good: Message, number: int) -> Message:
    """The same for a new attempt, because ids of attempts are never used twice."""
    made = type(good)()
    made.CopyFrom(good)
    for field, value in made.ListFields():
        if field.name == "attempt" and isinstance(value, worker_pb2.AttemptId):
            value.request_id = value.transfer_id = f"fuzz-{number}"
        elif isinstance(value, worker_pb2.PrefillStart | worker_pb2.Reservation):
            getattr(made, field.name).CopyFrom(_renamed(value, number))
    return made


def methods_of(
    services: Sequence[ServiceDescriptor], goods: Mapping[str, Sequence[Message]]
) -> list[Method]:
    """Every method of these services."""
    return [
        Method(
            path := f"/{service.full_name}/{method.name}",
            message_factory.GetMessageClass(method.input_type),
            goods.get(path, ()),
            method.client_streaming,
            method.name in ("Watch", "WatchRequests"),
        )
        for service in services
        for method in service.methods
    ]


def goods_for_clients(facts: Facts) -> dict[str, list[Message]]:
    """By method: messages that are good, or wrong in a single field."""
    found: dict[str, list[Message]] = {}
    for _, case in (*client_cases(facts), *gateway_cases(facts)):
        found.setdefault(case.method, []).extend(
            one for one in case.sent if isinstance(one, Message) and one.ByteSize() < 2000
        )
    found["/effuse.v1.GenerationService/Generate"] += [good()] * 20
    return found


async def call(channel: grpc.aio.Channel, method: Method, sent: list[bytes]) -> str:
    """Calls and reads; the name of the status, or `read` where the rest was left unread."""
    of_bytes: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
    of_bytes = channel.stream_stream(method.path)
    made = of_bytes(iter(sent), timeout=DEADLINE_S)
    try:
        for _ in range(1 if method.is_endless else MOST_READ):
            if await made.read() is grpc.aio.EOF:
                break
        else:
            made.cancel()
            return "read"
        code = await made.code()
    except grpc.aio.AioRpcError as error:
        code = error.code()
    if len(sent) > 1 and await made.details() == WRITTEN_IN_VAIN:
        return "ended early"
    told = f"{method.path} {code.name} {await made.details()}: {_shown(sent)}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise RanLate(told, functools.partial(_call_again, channel, method, sent))
    if code.name in OURS:
        raise Misbehaved(told)
    return code.name


async def _call_again(channel: grpc.aio.Channel, method: Method, sent: list[bytes]) -> None:
    """The same bytes, and the same for a new attempt, because a worker refuses an attempt that it
    had.
    """
    number = secrets.randbits(40)
    for each in (sent, [_of_new_attempt(one, method.kind, number) for one in sent]):
        await call(channel, method, each)


def _of_new_attempt(sent: bytes, kind: type[Message], number: int) -> bytes:
    try:
        return _renamed(kind.FromString(sent), number).SerializeToString()
    except DecodeError:
        return sent


def _shown(sent: list[bytes]) -> str:
    return " ".join(one[:400].hex() for one in sent)


def held_by(router: Router) -> Mapping[str, int]:
    """What requests and watchers of a router in this process hold."""
    return {
        "requests": router.requests.num_running,
        "seats": router.admission.num_running,
        "queue": router.admission.num_waiting,
        "watchers": router.monitor.num_watchers,
    }


@dataclass
class InnerRouter:
    """A router in this process, in front of fake workers."""

    fleet: FakeFleet
    methods: Sequence[Method]

    async def feed(self, draw: random.Random) -> str:
        method = draw.choice(self.methods)
        outcome = await call(self.fleet.channel, method, method.draw(draw))
        for worker in self.fleet.workers:  # they keep their messages
            for kept in (getattr(worker, "requests", []), getattr(worker, "prompts", [])):
                kept.clear()
        return outcome

    def held(self) -> Mapping[str, int]:
        return held_by(self.fleet.router)


class RouterSurface:
    """Every public method, of a router whose workers are fakes."""

    name, weight, at_once = "router", 260, 24

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Face]:
        facts = Facts(
            vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN,
            mask=MASK, pad=PAD,
        )  # fmt: skip
        async with fake_fleet() as fleet:
            for worker in fleet.decode:
                worker.others = [worker.answer] * 63  # whatever `n` is drawn
            yield InnerRouter(fleet, methods_of(PUBLIC, goods_for_clients(facts)))


@dataclass
class Processes:
    """A fleet of processes, one of which is fed."""

    fleet: Fleet
    channels: Mapping[str, grpc.aio.Channel]
    methods: Mapping[str, Sequence[Method]]  # by process
    before: Mapping[str, set[int]]
    files: int
    resident: int

    async def feed(self, draw: random.Random) -> str:
        name = draw.choice(sorted(self.methods))
        method = draw.choice(self.methods[name])
        outcome = await call(self.channels[name], method, method.draw(draw))
        if method.path.endswith("/Drain") and outcome == "OK":
            (undrain,) = (one for one in self.methods[name] if one.path.endswith("/Undrain"))
            await call(self.channels[name], undrain, [b""])
        return outcome

    def held(self) -> Mapping[str, int]:
        """Besides the processes: the workers' resources, and the kernel's for all of them."""
        fleet = self.fleet
        now = {name: pids(process.pid) for name, process in fleet.processes.items()}
        held = {"processes that are not as before": int(now != self.before)}
        for name in ("prefill-0", "decode-0"):
            load = load_of(fleet.address_of(name))
            held[f"pages of {name}"] = load.total_pages - load.free_pages
            held[f"requests of {name}"] = load.running + load.waiting
            held[f"drain of {name}"] = int(load.draining)
        told = sum(open_files(process.pid) for process in fleet.processes.values())
        grown = sum(resident_bytes(process.pid) for process in fleet.processes.values())
        held["files of processes, in hundreds"] = max(0, told - self.files) // 100
        held["memory of processes, in its bounds"] = int(
            grown - self.resident > len(now) * MOST_GROWTH_BYTES
        )
        return held


class FleetSurface:
    """The public methods of a router, and all of its workers' own, over sockets of processes."""

    at_once = 16

    def __init__(self, name: str, weight: int, targets: Sequence[str]) -> None:
        self.name, self.weight = name, weight
        self._targets = targets

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Face]:
        with tempfile.TemporaryDirectory(prefix="effuse-fuzz-") as home:
            fleet = Fleet(
                FleetConfig(
                    model=await asyncio.to_thread(tiny_checkpoint, Path(home) / "sdar", "sdar"),
                    worker_flags=(
                        *("--device", "cpu", "--num-pages", "256", "--hang-timeout-s", "30"),
                        *("--max-model-len", str(TINY.max_model_len)),
                    ),
                    has_secret=False,  # workers are asked, too
                )
            )
            await asyncio.to_thread(fleet.start)
            try:
                face = _face(fleet, self._targets)
                yield face
                for channel in face.channels.values():
                    await channel.close()
            finally:
                await asyncio.to_thread(fleet.stop)


FLEETS: Final = (
    FleetSurface("router process", 50, ["router"]),
    FleetSurface("worker processes", 140, ["decode-0", "prefill-0"]),
)


def _face(fleet: Fleet, targets: Sequence[str]) -> Processes:
    facts = Facts(
        vocab_size=TINY.vocab_size, block_size=TINY.block_size, max_model_len=TINY.max_model_len,
        mask=TINY.mask_token_id, pad=TINY.mask_token_id,
    )  # fmt: skip
    decode, prefill = (
        load_of(fleet.address_of(name)).worker.incarnation for name in ("decode-0", "prefill-0")
    )
    goods = goods_for_clients(facts)
    for _, case in worker_cases(facts, decode, prefill):
        small = [one for one in case.sent if isinstance(one, Message) and one.ByteSize() < 2000]
        goods.setdefault(case.method, []).extend(small)
    goods[DECODE] += [decode_request("good", decode)] * 20
    shared = INNER["WorkerService"]
    services = {
        "router": PUBLIC,
        "decode-0": (INNER["DecodeService"], shared),
        "prefill-0": (INNER["PrefillService"], shared),
    }
    running = fleet.processes.items()
    return Processes(
        fleet,
        {name: grpc.aio.insecure_channel(fleet.address_of(name)) for name in targets},
        {name: methods_of(services[name], goods) for name in targets},
        {name: pids(process.pid) for name, process in running},
        sum(open_files(process.pid) for _, process in running),
        sum(resident_bytes(process.pid) for _, process in running),
    )
