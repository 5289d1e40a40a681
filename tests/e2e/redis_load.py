"""Redis' load by workers, routers and requests: calls, CPU and bytes of the server a second.

The server is a real process. Workers and routers are the loops by which real ones speak to it, in
a few processes without engines, clients and calls.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.redis_load --workers 10 1000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence

import redis
import redis_server
from e2e.router_scale import LEASE_S, records_of
from msgspec.structs import replace

from effuse.placement.leases import RENEW_S, FleetView
from effuse.placement.records import PlacedOn, PlacementRecord, RouterRecord, WorkerRecord
from effuse.placement.store import Store, StoreUnavailable
from effuse.placement.writer import RUNNING_S, PlacementWriter
from effuse.router.process import SHARE_S
from effuse.router.seats import OtherRouters

FLEET = "load"
HELD_S = 1.0
ANSWER = bytes(1000)
LATE_S = 5.0


def announce(url: str, first: int, number: int, num_links: int) -> None:
    """Renews the leases of so many workers, whose steps differ each time."""
    asyncio.run(_announce(url, records_of([1] * number, num_links, first)))


async def _announce(url: str, records: Sequence[WorkerRecord]) -> None:
    taken = set[str]()
    async with Store(url, FLEET, timeout_s=LATE_S) as store:
        while True:
            began = time.monotonic()
            for at, record in enumerate(records, 1):
                changed = replace(record, load=replace(record.load, steps=int(1e3 * began)))
                with contextlib.suppress(StoreUnavailable):
                    takes = record.worker_id not in taken
                    await store.announce(changed, LEASE_S, "1", takes=takes)
                    taken.add(record.worker_id)
                pause_s = began + RENEW_S * at / len(records) - time.monotonic()
                if pause_s > 0.002:
                    await asyncio.sleep(pause_s)


def route(url: str, numbers: Sequence[int], rate: float) -> None:
    """Routers that follow the fleet and the others, and place so many requests a second each."""

    async def go() -> None:
        async with asyncio.TaskGroup() as group:
            for number in numbers:
                group.create_task(_route(url, f"router-{number}", rate))

    asyncio.run(go())


async def _route(url: str, name: str, rate: float) -> None:
    async with Store(url, FLEET, timeout_s=LATE_S) as store, asyncio.TaskGroup() as group:
        writer, others = PlacementWriter(store), OtherRouters(store, name)
        group.create_task(FleetView(store).run())
        group.create_task(writer.run())
        group.create_task(_exchange(others, name))
        group.create_task(_share(store))
        began = time.monotonic()
        for at in range(sys.maxsize if rate else 0):
            await asyncio.sleep(max(0.0, began + at / rate - time.monotonic()))
            group.create_task(_request(store, writer, name, f"{name}-{at}"))


async def _exchange(others: OtherRouters, name: str) -> None:
    while True:
        await others.exchange(RouterRecord(router_id=name, address="127.0.0.1:1"))
        await asyncio.sleep(others.pause_s)


async def _share(store: Store) -> None:
    while True:
        with contextlib.suppress(StoreUnavailable):
            await store.share_refusals({}, 1)
        await asyncio.sleep(SHARE_S)


async def _request(store: Store, writer: PlacementWriter, router: str, name: str) -> None:
    """One whose client chose its id: it is claimed, placed, ended and kept."""
    worker = PlacedOn(worker_id="decode-0", incarnation="1")
    record = PlacementRecord(
        request_id=name, attempt=1, transfer_id=name, router_id=router, state="running",
        model="m", decode=worker, prefill=worker, asked="digest",
    )  # fmt: skip
    await store.claim(record, "digest", RUNNING_S)
    writer.put(record, is_claimed=True)
    await asyncio.sleep(HELD_S)
    writer.keep(name, "digest", ANSWER, 300.0)
    writer.put(replace(record, state="finished"), is_claimed=True)


def measure(workers: int, routers: int, rate: float, num_links: int, seconds: float) -> object:
    """Figures of the server a second, for one fleet. `commands` counts those of scripts, too."""
    spawn = multiprocessing.get_context("spawn")
    each = -(-workers // 4)
    with redis_server.running() as server, contextlib.ExitStack() as stack:
        url = server.connection_url
        parts = [range(routers)[at::2] for at in range(min(2, routers))]
        started = [
            spawn.Process(target=announce, args=(url, at, min(each, workers - at), num_links))
            for at in range(0, workers, each)
        ] + [spawn.Process(target=route, args=(url, part, rate / routers)) for part in parts]
        for process in started:
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
        with redis.Redis(port=server.port, socket_timeout=60) as client:
            while client.scard(f"effuse:{{{FLEET}}}:workers") < workers:
                time.sleep(0.5)
            time.sleep(4.0)
            before, began = _state(client), time.monotonic()
            time.sleep(seconds)
            took_s = time.monotonic() - began
            after = _state(client)
    figures = {name: round((after[name] - before[name]) / took_s, 3) for name in before}
    return {"workers": workers, "routers": routers, "rate": rate, "links": num_links} | figures


def _state(client: redis.Redis) -> dict[str, float]:
    stats, cpu = client.info("stats"), client.info("cpu")
    calls = {name: one["calls"] for name, one in client.info("commandstats").items()}
    return {
        "calls": sum(calls.get(f"cmdstat_{name}", 0) for name in ("eval", "evalsha")),
        "commands": stats["total_commands_processed"],
        "cpu_s": cpu["used_cpu_user"] + cpu["used_cpu_sys"],
        "in_mb": stats["total_net_input_bytes"] / 1e6,
        "out_mb": stats["total_net_output_bytes"] / 1e6,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the figures as lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0])
    parser.add_argument("--links", type=int, default=0, help="links of each prefill worker")
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args(argv)
    for workers in asked.workers:
        for routers in asked.routers:
            for rate in asked.rates:
                found = measure(workers, routers, rate, asked.links, asked.seconds)
                print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
