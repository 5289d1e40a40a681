"""The cost of a router by the number of workers: CPU per request, idle CPU, and memory by streams.

The router and Redis are real processes. Workers are fakes that hold leases and answer calls, half
of them for prefill and half for decode. Each has a port of its own. The numbers of workers take
turns, and the figures are medians of the turns.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.router_scale --workers 8 1000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc.aio
import msgspec
import psutil
import redis_server
from e2e.client import wait_until
from router.fake_model import BLOCK_SIZE, worker_record

from effuse.placement.records import Capacity, Link, Load, Role, WorkerRecord
from effuse.placement.store import Store, StoreUnavailable
from effuse.v1 import generation_pb2, generation_pb2_grpc, worker_pb2_grpc
from effuse.v1 import worker_pb2 as pb

FLEET = "scale"
LEASE_S = 10.0
RENEW_S = 0.5
HANDOFF_S = 0.02
TOKENS = 16
SEATS = 64
PROCESSES = 4
CONNECTIONS = 16
PROMPT = tuple(range(40, 104))
MOST_LATE_S = 60.0


class Fakes(worker_pb2_grpc.PrefillServiceServicer, worker_pb2_grpc.DecodeServiceServicer):
    """All workers of a fleet. After its first block an answer waits for `hold_s` seconds."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s

    async def Prefill(
        self,
        request_iterator: AsyncIterator[pb.PrefillRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[pb.PrefillResponse]:
        await anext(request_iterator)
        yield pb.PrefillResponse(computed=pb.PrefillComputed(compute_s=0.01))
        await anext(request_iterator)
        yield pb.PrefillResponse(pushed=pb.PrefillPushed(pages=1, bytes=64, push_s=0.001))

    async def Decode(
        self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.DecodeResponse]:
        reservation = pb.Reservation(
            attempt=request.attempt, incarnation="1", connector="zmq", lease_s=30
        )
        yield pb.DecodeResponse(reservation=reservation)
        await asyncio.sleep(HANDOFF_S)
        yield pb.DecodeResponse(verified=pb.PrefillVerified(bytes=64, pages=1, handoff_s=0.01))
        for offset in range(0, request.max_tokens, BLOCK_SIZE):
            if offset == BLOCK_SIZE and self._hold_s:
                await asyncio.sleep(self._hold_s)
            ids = [100 + at for at in range(BLOCK_SIZE)]
            commit = pb.DecodeCommit(token_offset=offset, token_ids=ids, forward_passes=1)
            yield pb.DecodeResponse(commit=commit)
        yield pb.DecodeResponse(
            finished=pb.DecodeFinished(num_tokens=request.max_tokens, forward_passes=1)
        )

    async def Rehearse(
        self, request: pb.RehearseRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.RehearseResponse]:
        raise NotImplementedError
        yield pb.RehearseResponse()


def records_of(ports: Sequence[int], num_links: int, first: int = 0) -> list[WorkerRecord]:
    """Records of workers at these ports, numbered from `first`. Each that prefills knows so many
    links."""
    found = []
    decoders = [f"decode-{number // 2}" for number in range(first, first + len(ports), 2)]
    for number, port in enumerate(ports, first):
        role: Role = "decode" if number % 2 else "prefill"
        record = worker_record(
            f"{role}-{number // 2}",
            role,
            address=f"127.0.0.1:{port}",
            load=Load(total_pages=4096, free_pages=4096),
        )
        mine = [decoders[(number // 2 + step) % len(decoders)] for step in range(num_links)]
        links = (
            tuple(Link(name, "1", "cuda_ipc", 1e11) for name in mine) if role == "prefill" else ()
        )
        capacity = Capacity(
            total_pages=4096, page_size=16, max_num_seqs=SEATS, max_num_batched_tokens=512
        )
        found.append(cast(WorkerRecord, _with(record, capacity=capacity, links=links)))
    return found


def _with(record: WorkerRecord, **changes: object) -> object:
    return msgspec.structs.replace(record, **changes)


def serve_fakes(redis_url: str, first: int, number: int, hold_s: float, num_links: int) -> None:
    """Serves so many workers and renews their leases until the process is killed."""
    asyncio.run(_serve_fakes(redis_url, first, number, hold_s, num_links))


async def _serve_fakes(
    redis_url: str, first: int, number: int, hold_s: float, num_links: int
) -> None:
    server = grpc.aio.server(
        options=[
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
    )
    fakes = Fakes(hold_s)
    worker_pb2_grpc.add_PrefillServiceServicer_to_server(fakes, server)
    worker_pb2_grpc.add_DecodeServiceServicer_to_server(fakes, server)
    ports = [server.add_insecure_port("127.0.0.1:0") for _ in range(number)]
    await server.start()
    records = records_of(ports, min(num_links, number // 2), first)
    taken = set[str]()
    async with Store(redis_url, FLEET, timeout_s=5.0) as store:
        while True:
            began = time.monotonic()
            for at, record in enumerate(records):
                # Steps differ each time, as those of workers do.
                load = Load(total_pages=4096, free_pages=4096, steps=int(1e3 * began))
                changed = cast(WorkerRecord, _with(record, load=load))
                with contextlib.suppress(StoreUnavailable):
                    await store.announce(changed, LEASE_S, "1", takes=record.worker_id not in taken)
                    taken.add(record.worker_id)
                pause_s = began + RENEW_S * (at + 1) / len(records) - time.monotonic()
                if pause_s > 0.002:
                    await asyncio.sleep(pause_s)


@dataclass
class Scaled:
    """A router with so many fake workers."""

    workers: int
    address: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """Seconds of CPU that the router has used."""
        times = self.process.cpu_times()
        return times.user + times.system

    def resident_mb(self) -> float:
        """Its resident memory."""
        return self.process.memory_info().rss / 1e6


@contextlib.contextmanager
def scaled(workers: int, hold_s: float, num_links: int) -> Iterator[Scaled]:
    """Starts Redis, workers and a router, and returns once the router knows all workers."""
    spawn = multiprocessing.get_context("spawn")
    with (
        redis_server.running() as redis,
        tempfile.TemporaryDirectory() as home,
    ):
        url = redis.connection_url
        ready = Path(home) / "ready.json"
        each = workers // PROCESSES
        fakes = [
            spawn.Process(target=serve_fakes, args=(url, at * each, each, hold_s, num_links))
            for at in range(PROCESSES)
        ]
        for one in fakes:
            one.start()
        router = subprocess.Popen(
            [
                sys.executable, "-m", "effuse.router", "--redis-url", url, "--fleet", FLEET,
                "--port", "0", "--ready-file", str(ready), "--max-concurrent-requests", "20000",
                "--log-level", "warning",
            ],
            env=os.environ | {"PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        try:
            wait_until(lambda: _knows(ready, workers), "the router does not know all workers", 120)
            facts = json.loads(ready.read_text())
            yield Scaled(workers, facts["address"], psutil.Process(router.pid))
        finally:
            router.kill()
            router.wait(30.0)
            for one in fakes:
                one.kill()
                one.join()


def _knows(ready: Path, workers: int) -> bool:
    if not ready.exists():
        return False
    facts = json.loads(ready.read_text())
    return int(facts.get("prefill", 0)) + int(facts.get("decode", 0)) == workers


class Clients:
    """Connections to a router, used in turns."""

    def __init__(self, address: str, connections: int) -> None:
        self._channels = [
            grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
            for _ in range(connections)
        ]
        self._stubs = [
            cast(
                "generation_pb2_grpc.GenerationServiceAsyncStub",
                generation_pb2_grpc.GenerationServiceStub(channel),
            )
            for channel in self._channels
        ]

    async def close(self) -> None:
        """Closes them."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def ask(self, number: int) -> None:
        """One unary request."""
        await self._stubs[number % len(self._stubs)].Generate(request(), timeout=MOST_LATE_S)

    async def stream(self, number: int, began: asyncio.Semaphore, max_tokens: int = TOKENS) -> int:
        """One stream; releases `began` with its first block, which is the whole answer if that has
        no more tokens. Returns its number of tokens."""
        tokens = 0
        stub = self._stubs[number % len(self._stubs)]
        asked = generation_pb2.GenerateStreamRequest(request=request(max_tokens))
        async for event in stub.GenerateStream(asked, timeout=10 * MOST_LATE_S):
            if event.HasField("commit"):
                if not tokens:
                    began.release()
                tokens += len(event.commit.token_ids)
        return tokens


def request(max_tokens: int = TOKENS) -> generation_pb2.GenerateRequest:
    """A request of a few tokens."""
    return generation_pb2.GenerateRequest(
        prompt_token_ids=generation_pb2.TokenIds(ids=PROMPT),
        stopping=generation_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


async def load(fleet: Scaled, rate: float, seconds: float) -> float:
    """Sends requests at an even rate and returns the router's CPU seconds per request."""
    clients = Clients(fleet.address, CONNECTIONS)
    for _ in range(8 * fleet.workers // (2 * CONNECTIONS)):  # channels to all workers are open then
        await asyncio.gather(*(clients.ask(number) for number in range(CONNECTIONS)))
    before, began, calls = fleet.cpu_s(), time.monotonic(), []
    for number in range(int(rate * seconds)):
        pause_s = began + number / rate - time.monotonic()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        calls.append(asyncio.create_task(clients.ask(number)))
    await asyncio.gather(*calls)
    used_s = fleet.cpu_s() - before
    await clients.close()
    return used_s / len(calls)


async def hold_streams(fleet: Scaled, number: int, *, is_new: bool) -> tuple[float, float]:
    """Opens so many streams; returns the router's memory in MB before, and with a block of each.

    `is_new`: on connections on which no call has ended. gRPC gives a call as much memory as the
    last ones of its connection used in the end. To the calls of a new connection it gives too
    little, and adds pieces to it."""
    clients = Clients(fleet.address, CONNECTIONS)
    before = fleet.resident_mb()
    began = asyncio.Semaphore(0)
    for _ in range(0 if is_new else 8 * fleet.workers // (2 * CONNECTIONS)):
        await asyncio.gather(*(clients.stream(at, began, BLOCK_SIZE) for at in range(CONNECTIONS)))
    began = asyncio.Semaphore(0)
    streams = []
    for at in range(number):
        streams.append(asyncio.create_task(clients.stream(at, began)))
        if at % 100 == 99:
            for _ in range(100):
                await began.acquire()
    held = fleet.resident_mb()
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await clients.close()
    return before, held


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the figures as lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 1000])
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--links", type=int, default=0, help="links of each prefill worker")
    parser.add_argument(
        "--streams", type=int, default=0, help="open streams, of a fleet with seats"
    )
    parser.add_argument(
        "--new-connections",
        action="store_true",
        help="open streams on connections without an ended call",
    )
    args = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        fleets = [stack.enter_context(scaled(n, 0.0, args.links)) for n in args.workers]
        costs: dict[int, list[float]] = {}
        idle: dict[int, list[float]] = {}
        for _ in range(args.turns):
            for fleet in fleets:
                before, began = fleet.cpu_s(), time.monotonic()
                time.sleep(5.0)
                took_s = time.monotonic() - began
                idle.setdefault(fleet.workers, []).append((fleet.cpu_s() - before) / took_s)
                cost = asyncio.run(load(fleet, args.rate, args.seconds))
                costs.setdefault(fleet.workers, []).append(cost)
        for fleet in fleets:
            cost, still = (statistics.median(one[fleet.workers]) for one in (costs, idle))
            found = {
                "workers": fleet.workers, "cpu_ms_per_request": round(1e3 * cost, 3),
                "idle_cpu_share": round(still, 4), "idle_by_turn": idle[fleet.workers],
                "cpu_ms_less_idle": round(1e3 * (cost - still / args.rate), 3),
                "resident_mb": round(fleet.resident_mb(), 1),
            }  # fmt: skip
            print(json.dumps(found), flush=True)
    if args.streams:
        workers = 8 * -(-args.streams // (4 * SEATS))
        with scaled(workers, 600.0, args.links) as fleet:
            held = hold_streams(fleet, args.streams, is_new=args.new_connections)
            before_mb, held_mb = asyncio.run(held)
            print(json.dumps({"streams": args.streams, "mb_before": before_mb, "mb": held_mb}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
