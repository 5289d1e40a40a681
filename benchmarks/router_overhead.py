"""The cost of the router: time on a unary request, memory, and a fleet's time to be ready.

Short requests go through the router, through a proxy that only opens a request's two calls, and
directly to the workers, by turns. The figure is the time that the router adds over the time that
the proxy adds, each the median of the turns' differences. A turn takes 60 ms, so a machine that
becomes slower affects all three. Workers know the prompt, because forwards of fresh ones vary by
more than a hop takes. Health checks, each after a direct request, show the cost of a
call for which the router does nothing.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, Literal, cast

import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from effuse.benchmarks import bare_proxy
from effuse.benchmarks.direct import CONFIDENCE_THRESHOLD, DEADLINE_S, DirectClient
from effuse.benchmarks.report import Figure
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.cli.ports import free_port
from effuse.v1 import generation_pb2, generation_pb2_grpc

REQUESTS = 600
WARM_UP = 40
HEALTH_CHECKS = 60
MAX_TOKENS = 1
PROMPT = tuple(range(600, 632))
MOST_ADDED = 3.0  # times as much as the bare proxy
HTTP_PAIRS = 1000
HTTP_TOKENS = 8
MOST_HTTP = 1.25  # times as much as a call for which the router does nothing
MOST_READY_S = 20.0
MOST_RSS_MB = 200.0


def measure() -> tuple[list[Figure], list[str]]:
    """The figures of one fleet of one prefill and one decode worker."""
    flags, http_port = ("--device", "cpu"), free_port()
    config = FleetConfig(
        connector="zmq", worker_flags=flags, has_secret=False,
        router_flags=("--http-port", str(http_port)),
    )  # fmt: skip
    with Fleet(config) as fleet:
        workers = fleet.address_of("prefill-0"), fleet.address_of("decode-0")
        with bare_proxy.running(*workers) as proxy:
            times = asyncio.run(_alternate(fleet.address, proxy, workers))
        by_grpc, by_http = asyncio.run(_alternate_http(fleet.address, http_port))
        router = psutil.Process(fleet.processes["router"].pid)
        rss_mb = router.memory_info().rss / 1e6
        ready_s = fleet.ready_s
    added_ms, bare_ms = (statistics.median(times.added_ms(way)) for way in ("router", "proxy"))
    http_ms = 1e3 * (statistics.median(by_http) - statistics.median(by_grpc))
    check = 1e3 * statistics.median(times.checks)
    figures = [
        Figure(
            name="added by the router to a unary request, over a bare proxy's",
            value=added_ms / bare_ms,
            limit=MOST_ADDED,
            unit="times",
            bound="at most",
            against=f"a proxy that only opens the two calls, which adds {bare_ms:.2f} ms",
        ),
        Figure(
            name="unary request over HTTP, median less that over gRPC, over a health check's",
            value=http_ms / check,
            limit=MOST_HTTP,
            unit="times",
            bound="at most",
            against=f"a health check of the router over gRPC, which takes {check:.2f} ms",
        ),
        Figure(
            name="fleet of 1 prefill and 1 decode ready",
            value=ready_s,
            limit=MOST_READY_S,
            unit="s",
            bound="at most",
            against="from the first process started to the router knowing all workers",
        ),
        Figure(
            name="router's resident memory",
            value=rss_mb,
            limit=MOST_RSS_MB,
            unit="MB",
            bound="at most",
            against=f"after {REQUESTS + WARM_UP} requests over gRPC, {2 * HTTP_PAIRS} in pairs",
        ),
    ]
    http = (
        f"HTTP adds {http_ms:.2f} ms to a request of {HTTP_TOKENS} tokens, median of {HTTP_PAIRS} "
        "pairs in turns on connections that last"
    )
    return figures, [f"{times.note()}; {http}"]


@dataclass(slots=True)
class _Times:
    """Seconds of each turn, after those that warm up."""

    workers: list[float] = field(default_factory=list)
    router: list[float] = field(default_factory=list)
    proxy: list[float] = field(default_factory=list)
    checks: list[float] = field(default_factory=list)

    def added_ms(self, way: Literal["router", "proxy"]) -> list[float]:
        """Milliseconds that a hop adds to the direct request of the same turn."""
        hops = self.router if way == "router" else self.proxy
        return [1e3 * (hop - direct) for hop, direct in zip(hops, self.workers, strict=True)]

    def note(self) -> str:
        """The medians behind the router's figure, and the spread of its share."""
        low, added, high = statistics.quantiles(self.added_ms("router"), n=4)
        through, without = (1e3 * statistics.median(one) for one in (self.router, self.workers))
        return (
            f"router: median of {REQUESTS} requests {through:.2f} ms through it, {without:.2f} ms "
            f"without; it adds {added:.2f} ms, in the middle half of turns {low:.2f} to {high:.2f}"
        )


async def _alternate(router: str, proxy: str, workers: tuple[str, str]) -> _Times:
    client, times = DirectClient(*workers), _Times()

    async def ask_workers() -> None:
        await client.generate(PROMPT, MAX_TOKENS)

    async with (
        grpc.aio.insecure_channel(router) as channel,
        grpc.aio.insecure_channel(proxy) as other,
    ):
        await client.connect()
        ways = (
            (times.workers, ask_workers),
            (times.router, asking(channel)),
            (times.proxy, asking(other)),
        )
        orders = list(permutations(ways))  # each way follows each other one as often
        for turn in range(WARM_UP + REQUESTS):
            for into, ask in orders[turn % len(orders)]:
                start = time.perf_counter()
                await ask()
                if turn >= WARM_UP:
                    into.append(time.perf_counter() - start)
        health = health_pb2_grpc.HealthStub(channel)
        for _ in range(HEALTH_CHECKS):
            await ask_workers()
            start = time.perf_counter()
            await health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
            times.checks.append(time.perf_counter() - start)
        await client.close()
    return times


def asking(channel: grpc.aio.Channel) -> Callable[[], Awaitable[object]]:
    """A function that sends the short request through this channel, and waits for its answer."""
    stub = cast(
        "generation_pb2_grpc.GenerationServiceAsyncStub",
        generation_pb2_grpc.GenerationServiceStub(channel),
    )
    request = generation_pb2.GenerateRequest(
        prompt_token_ids=generation_pb2.TokenIds(ids=PROMPT),
        stopping=generation_pb2.StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
        decoding=generation_pb2.DecodingParams(confidence_threshold=CONFIDENCE_THRESHOLD),
    )

    async def ask() -> None:
        await stub.Generate(request, timeout=DEADLINE_S)

    return ask


class _RawHttp:
    """One persistent HTTP/1.1 connection, without a client library."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def post(self, path: str, body: bytes) -> Any:
        """The JSON of a response."""
        head = f"POST {path} HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        (size,) = (line.split(b":")[1] for line in lines if line.startswith(b"content-length:"))
        return json.loads(await self._reader.readexactly(int(size)))

    def close(self) -> None:
        """Closes the connection."""
        self._writer.close()


async def _alternate_http(address: str, http_port: int) -> tuple[list[float], list[float]]:
    """Seconds of the same request over gRPC and over HTTP. Raises RuntimeError if their answers
    differ."""
    request = generation_pb2.GenerateRequest(
        prompt_token_ids=generation_pb2.TokenIds(ids=PROMPT),
        stopping=generation_pb2.StoppingParams(max_tokens=HTTP_TOKENS, ignore_eos=True),
        decoding=generation_pb2.DecodingParams(confidence_threshold=CONFIDENCE_THRESHOLD),
    )
    settings = {"ignore_eos": True, "confidence_threshold": CONFIDENCE_THRESHOLD}
    body = json.dumps({"prompt": PROMPT, "max_tokens": HTTP_TOKENS, **settings}).encode()
    raw = _RawHttp(*await asyncio.open_connection("127.0.0.1", http_port))
    times: dict[str, list[float]] = {"grpc": [], "http": []}
    texts: dict[str, str] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        stub = cast(
            "generation_pb2_grpc.GenerationServiceAsyncStub",
            generation_pb2_grpc.GenerationServiceStub(channel),
        )

        async def ask(kind: str) -> None:
            start = time.perf_counter()
            if kind == "grpc":
                texts[kind] = (await stub.Generate(request, timeout=DEADLINE_S)).text
            else:
                texts[kind] = (await raw.post("/v1/completions", body))["choices"][0]["text"]
            times[kind].append(time.perf_counter() - start)

        for pair in range(WARM_UP + HTTP_PAIRS):
            async with asyncio.timeout(DEADLINE_S):
                for kind in _in_turns(("grpc", "http"), pair):
                    await ask(kind)
            if texts["grpc"] != texts["http"]:
                raise RuntimeError(f"gRPC and HTTP answer differently: {texts}")
    raw.close()
    return times["grpc"][WARM_UP:], times["http"][WARM_UP:]


def _in_turns(kinds: Sequence[str], pair: int) -> Sequence[str]:
    return kinds if pair % 2 else kinds[::-1]
