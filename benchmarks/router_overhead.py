"""What the router costs: time on a unary request, memory, and a fleet's time to be ready.

The same short request goes through the router and straight to the workers in turns; the figure is
the difference of the medians.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import cast

import grpc.aio
import psutil

from effuse.benchmarks.direct import CONFIDENCE_THRESHOLD, DEADLINE_S, DirectClient
from effuse.benchmarks.report import Figure
from effuse.cli.fleet import Fleet, FleetConfig
from effuse.v1 import generation_pb2, generation_pb2_grpc

REQUESTS = 300
WARM_UP = 40
MAX_TOKENS = 1
PROMPT = tuple(range(600, 632))
MOST_ADDED_MS = 1.5
MOST_READY_S = 20.0
MOST_RSS_MB = 200.0


def measure() -> tuple[list[Figure], list[str]]:
    """The figures of one fleet of one prefill and one decode worker."""
    with Fleet(FleetConfig(prefill=1, decode=1, connector="zmq")) as fleet:
        direct, routed = asyncio.run(_alternate(fleet))
        router = psutil.Process(fleet.processes["router"].pid)
        rss_mb = router.memory_info().rss / 1e6
        ready_s = fleet.ready_s
    added_ms = 1e3 * (statistics.median(routed) - statistics.median(direct))
    figures = [
        Figure(
            name="added by the router to a unary request, median",
            value=added_ms,
            limit=MOST_ADDED_MS,
            unit="ms",
            bound="at most",
            against="the same request sent to the workers by the client itself",
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
        f"it, {1e3 * statistics.median(direct):.2f} ms without"
    )
    return figures, [note]


async def _alternate(fleet: Fleet) -> tuple[list[float], list[float]]:
    client = DirectClient(fleet.address_of("prefill-0"), fleet.address_of("decode-0"))
    request = generation_pb2.GenerateRequest(
        prompt_token_ids=generation_pb2.TokenIds(ids=PROMPT),
        stopping=generation_pb2.StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
        decoding=generation_pb2.DecodingParams(confidence_threshold=CONFIDENCE_THRESHOLD),
    )
    direct, routed = [], []
    async with grpc.aio.insecure_channel(fleet.address) as channel:
        stub = cast(
            "generation_pb2_grpc.GenerationServiceAsyncStub",
            generation_pb2_grpc.GenerationServiceStub(channel),
        )
        await client.connect()
        for _ in range(WARM_UP + REQUESTS):
            start = time.perf_counter()
            await client.generate(PROMPT, MAX_TOKENS)
            middle = time.perf_counter()
            await stub.Generate(request, timeout=DEADLINE_S)
            routed.append(time.perf_counter() - middle)
            direct.append(middle - start)
        await client.close()
    return direct[WARM_UP:], routed[WARM_UP:]
