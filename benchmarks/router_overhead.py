"""The cost of the router: time on a unary request, memory, and a fleet's time to be ready.

The same short request goes through the router and directly to the workers, in pairs whose order
alternates; the figure is the median of the pairs' differences. A pair takes 40 ms, so a machine
that becomes slower affects both. Work left by one request, such as reading a status or writing a
placement, hits both kinds equally often. Health checks, each after a direct request, show the cost
of a call for which the router does nothing.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any, cast

import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from effuse.benchmarks.direct import CONFIDENCE_THRESHOLD, DEADLINE_S, DirectClient
from effuse.benchmarks.report import Figure
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.cli.ports import free_port
from effuse.v1 import generation_pb2, generation_pb2_grpc

REQUESTS = 300
WARM_UP = 40
HEALTH_CHECKS = 60
MAX_TOKENS = 1
PROMPT = tuple(range(600, 632))
MOST_ADDED_MS = 1.5
HTTP_PAIRS = 1000
HTTP_TOKENS = 8
MOST_HTTP_MS = 1.0
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
        direct, routed, hops = asyncio.run(_alternate(fleet))
        by_grpc, by_http = asyncio.run(_alternate_http(fleet.address, http_port))
        router = psutil.Process(fleet.processes["router"].pid)
        rss_mb = router.memory_info().rss / 1e6
        ready_s = fleet.ready_s
    added_ms = 1e3 * statistics.median(r - d for d, r in zip(direct, routed, strict=True))
    figures = [
        Figure(
            name="added by the router to a unary request, median of pairs",
            value=added_ms,
            limit=MOST_ADDED_MS,
            unit="ms",
            bound="at most",
            against="the same request sent to the workers by the client itself",
        ),
        Figure(
            name="unary request over HTTP, median less that over gRPC",
            value=1e3 * (statistics.median(by_http) - statistics.median(by_grpc)),
            limit=MOST_HTTP_MS,
            unit="ms",
            bound="at most",
            against=f"{HTTP_PAIRS} pairs in turns on connections that last, {HTTP_TOKENS} tokens",
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
            against=f"after {2 * (REQUESTS + WARM_UP)} requests",
        ),
    ]
    note = (
        f"router: median of {REQUESTS} requests {1e3 * statistics.median(routed):.2f} ms through "
        f"it, {1e3 * statistics.median(direct):.2f} ms without; the middle half of the pairs "
        f"differs by {_quartiles_ms(direct, routed)}; a health check of the router takes "
        f"{1e3 * statistics.median(hops):.2f} ms"
    )
    return figures, [note]


async def _alternate(fleet: Fleet) -> tuple[list[float], list[float], list[float]]:
    client = DirectClient(fleet.address_of("prefill-0"), fleet.address_of("decode-0"))
    request = generation_pb2.GenerateRequest(
        prompt_token_ids=generation_pb2.TokenIds(ids=PROMPT),
        stopping=generation_pb2.StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
        decoding=generation_pb2.DecodingParams(confidence_threshold=CONFIDENCE_THRESHOLD),
    )
    direct: list[float] = []
    routed: list[float] = []
    hops: list[float] = []
    async with grpc.aio.insecure_channel(fleet.address) as channel:
        stub = cast(
            "generation_pb2_grpc.GenerationServiceAsyncStub",
            generation_pb2_grpc.GenerationServiceStub(channel),
        )
        health = health_pb2_grpc.HealthStub(channel)
        await client.connect()

        async def ask_workers() -> None:
            start = time.perf_counter()
            await client.generate(PROMPT, MAX_TOKENS)
            direct.append(time.perf_counter() - start)

        async def ask_router() -> None:
            start = time.perf_counter()
            await stub.Generate(request, timeout=DEADLINE_S)
            routed.append(time.perf_counter() - start)

        async def ask_nothing() -> None:
            start = time.perf_counter()
            await health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
            hops.append(time.perf_counter() - start)

        for pair in range(WARM_UP + REQUESTS):
            for ask in (ask_workers, ask_router) if pair % 2 else (ask_router, ask_workers):
                await ask()
        for _ in range(HEALTH_CHECKS):
            await client.generate(PROMPT, MAX_TOKENS)
            await ask_nothing()
        await client.close()
    return direct[WARM_UP:], routed[WARM_UP:], hops


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


def _quartiles_ms(direct: list[float], routed: list[float]) -> str:
    differences = [1e3 * (r - d) for d, r in zip(direct, routed, strict=True)]
    low, _, high = statistics.quantiles(differences, n=4)
    return f"{low:.2f} to {high:.2f} ms"
