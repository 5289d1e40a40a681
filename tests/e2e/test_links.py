"""Links between real workers: measured at the start, reported the same everywhere, refused when
slow.
"""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from e2e.client import connect
from e2e.processes import kill, restart
from e2e.routers import second_router
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from slowness import patient

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.placement.records import WorkerRecord, decode_worker
from effuse.placement.store import Store
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import model_pb2, model_pb2_grpc

WITHIN_S = patient(60.0)
PROMPT = "Tom has 3 boxes with 12 pens in each. He gives 7 pens away. How many pens are left?"


def listed(fleet: Fleet) -> dict[str, model_pb2.Worker]:
    """The workers in the router's list, by their ids."""
    with grpc.insecure_channel(fleet.address) as channel:
        models = model_pb2_grpc.ModelServiceStub(channel)
        answer = models.ListWorkers(model_pb2.ListWorkersRequest(), timeout=WITHIN_S)
    return {worker.worker_id: worker for worker in answer.workers}


def until(fleet: Fleet, is_so: Callable[[dict[str, model_pb2.Worker]], bool]) -> None:
    """Returns once the workers are so."""
    deadline = time.monotonic() + WITHIN_S
    while not is_so(found := listed(fleet)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def log_of(fleet: Fleet, name: str) -> str:
    return (fleet.log_dir / f"{name}.log").read_text()


def metrics_of(fleet: Fleet, name: str) -> list[Sample]:
    with urllib.request.urlopen(
        f"http://{fleet.metrics()[name]}/metrics", timeout=WITHIN_S
    ) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    return [sample for family in families for sample in family.samples]


def record_of(fleet: Fleet, name: str) -> WorkerRecord:
    async def read() -> WorkerRecord:
        async with Store(
            fleet.redis_url, fleet.name, access=fleet.home.redis_access, timeout_s=20.0
        ) as store:
            records = [decode_worker(value) for value, _ in await store.workers()]
        (found,) = [record for record in records if record.worker_id == name]
        return found

    return asyncio.run(read())


def test_log_metric_record_and_list_agree(tmp_path: Path) -> None:
    """With two workers of a kind. Slower links are below."""
    config = FleetConfig(prefill=1, decode=2, connector="nixl", log_dir=tmp_path)
    with Fleet(config) as fleet:
        check_agreement(fleet, {"cma", "posix", "sysv", "tcp", "xpmem", "knem"})
        until(fleet, lambda found: all(o.free_pages == o.total_pages for o in found.values()))
        assert not any(one.kv_bytes for one in listed(fleet).values()), "no prompt was handed over"
        check_what_comes_back(fleet)  # ZMQ connects anew by itself


def check_agreement(fleet: Fleet, transports: set[str], *, refused: bool = False) -> None:
    """Each place has every link, all of which are refused or none is."""
    pairs = [(name, peer) for name in fleet.names("prefill") for peer in fleet.names("decode")]
    until(fleet, lambda found: sum(len(one.links) for one in found.values()) == len(pairs))
    until(fleet, lambda _: all(re.search(f"to {peer}: .* GB/s", log_of(fleet, name))
          for name, peer in pairs))  # fmt: skip
    workers = listed(fleet)
    assert {name for name, one in workers.items() if one.links} == {*fleet.names("prefill")}
    for name, peer in pairs:
        (link,) = (link for link in workers[name].links if link.peer == peer)
        assert link.peer_incarnation == workers[peer].incarnation
        assert link.transport in transports
        assert link.gigabytes_per_second > 0
        assert link.refused == refused
        stored = record_of(fleet, name).link_to(record_of(fleet, peer))
        assert stored is not None
        assert stored.transport == link.transport
        # Each is measured again meanwhile, so their rates need not be the same.
        assert stored.gigabytes_per_second > 0
        told = rf"handoff {name} to {peer}: {re.escape(link.transport)}, [\d.e+-]+ GB/s"
        assert re.search(told, log_of(fleet, name))
        samples = [s for s in metrics_of(fleet, name) if s.labels.get("peer") == peer]
        (sample,) = [s for s in samples if s.name == "effuse_kv_link_bytes_per_second"]
        assert sample.value > 0
        assert sample.labels["transport"] == link.transport
        assert (sample.labels["role"], sample.labels["model_name"]) == ("prefill", "bundled")


def check_what_comes_back(fleet: Fleet) -> None:
    """A decode worker that dies costs nothing, and the one that comes back is measured again."""
    old = listed(fleet)["decode-0"].incarnation
    kill(fleet, "decode-0")
    restart(fleet, "decode-0")

    def is_measured_anew(found: dict[str, model_pb2.Worker]) -> bool:
        lives = {link.peer: link.peer_incarnation for link in found["prefill-0"].links}
        return lives.keys() == {*fleet.names("decode")} and lives["decode-0"] != old

    until(fleet, is_measured_anew)
    assert fleet.dead() == []
    with connect(fleet.address) as client:
        answer = client.generate(pb.GenerateRequest(prompt=PROMPT))
    assert answer.stats.prefill_worker in fleet.names("prefill")


SLOW = ("--min-handoff-gbps", "1000000")


def is_refused(found: dict[str, model_pb2.Worker]) -> bool:
    return any(link.refused for link in found["prefill-0"].links)


def test_a_link_below_the_limit_is_refused(tmp_path: Path) -> None:
    config = FleetConfig(connector="zmq", prefill_flags=SLOW, log_dir=tmp_path, has_secret=False)
    with Fleet(config) as fleet, connect(fleet.address) as client:
        until(fleet, is_refused)
        check_agreement(fleet, {"zmq over tcp"}, refused=True)
        refused = "REFUSED, because --min-handoff-gbps is 1000000"
        until(fleet, lambda _: refused in log_of(fleet, "prefill-0"))
        answer = client.generate(pb.GenerateRequest(prompt=PROMPT))
        assert answer.text
        assert (answer.stats.prefill_worker, answer.stats.kv_bytes) == ("", 0)
        _is_told_where_prefill_is_remote(fleet)
        assert listed(fleet)["prefill-0"].kv_bytes == 0


def _is_told_where_prefill_is_remote(fleet: Fleet) -> None:
    """The request is refused there, with link, rate and flag."""
    with (
        second_router(fleet, "--prefill", "remote") as remote,
        connect(remote.address) as client,
        pytest.raises(grpc.RpcError) as caught,
    ):
        client.generate(pb.GenerateRequest(prompt=PROMPT))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert re.fullmatch(
        r"the link from prefill-0 to decode-0 \(zmq over tcp\) moves \S+ GB/s, "
        r"but --min-handoff-gbps is 1000000",
        caught.value.details() or "",
    )
