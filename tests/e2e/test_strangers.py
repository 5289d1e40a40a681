"""Strangers on the same machine: they cannot call a worker, and no prompt is sent to them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
import redis
from e2e.processes import tree
from e2e.tiny import tiny_checkpoint
from grpc_health.v1 import health_pb2, health_pb2_grpc

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.placement.records import WorkerRecord, decode_worker
from effuse.placement.store import Store
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc, worker_pb2, worker_pb2_grpc

REQUESTS = 4
SECRET_IDS = (201, 202, 203)
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = FleetConfig(
        model=tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "sdar", "sdar"),
        worker_flags=("--device", "cpu", "--num-pages", "64", "--max-model-len", "256"),
    )
    with Fleet(config) as running:
        yield running


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_stray_process_cannot_call_a_worker(fleet: Fleet, name: str) -> None:
    with grpc.insecure_channel(fleet.address_of(name)) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        decode = worker_pb2_grpc.DecodeServiceStub(channel)
        prefill = worker_pb2_grpc.PrefillServiceStub(channel)
        calls = (
            lambda: worker.Drain(worker_pb2.DrainRequest(), timeout=20),
            lambda: worker.GetLoad(worker_pb2.GetLoadRequest(), timeout=20),
            lambda: list(decode.Decode(worker_pb2.DecodeRequest(), timeout=20)),
            lambda: list(prefill.Prefill(iter([]), timeout=20)),
        )
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert fleet.processes[name].returncode is None


class Stranger(grpc.GenericRpcHandler):
    """Listens at an address of its own, takes every call, and keeps all that it is sent."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bytes]] = []

    def service(
        self, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        def take(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            for request in requests:
                self.heard.append((str(details.method), request))
                yield b""

        return grpc.stream_stream_rpc_method_handler(take)


def test_a_forged_record_draws_no_prompt(fleet: Fleet) -> None:
    """In Redis stands a decode worker that looks idle, and a prefill worker, both a stranger's."""
    stranger = Stranger()
    server = grpc.server(ThreadPoolExecutor(8), handlers=[stranger])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        records = asyncio.run(_forge(fleet, f"127.0.0.1:{port}"))
        assert {record.role for record in records} == {"prefill", "decode"}
        fleet.wait_for_workers(2, 1, 30.0)  # no link to the stranger's decode worker is ever warm
        request = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=SECRET_IDS), stopping=pb.StoppingParams(max_tokens=8)
        )
        with grpc.insecure_channel(fleet.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            answers = [stub.Generate(request, timeout=60) for _ in range(REQUESTS)]
    finally:
        server.stop(0)
    assert all(answer.usage.completion_tokens for answer in answers)
    assert stranger.heard, "nobody has looked at the forged records"
    assert {method for method, _ in stranger.heard} == {"/effuse.v1.ProofService/Prove"}


async def _forge(fleet: Fleet, address: str) -> list[WorkerRecord]:
    """Announces a stranger for every worker, with a lease that outlives the test."""
    async with Store(
        fleet.redis_url, fleet.name, access=fleet.home.redis_access, timeout_s=30.0
    ) as store:
        real = [decode_worker(value) for value, _ in await store.workers()]
        forged = [
            msgspec.structs.replace(one, worker_id=f"forged-{one.role}", address=address)
            for one in real
        ]
        for record in forged:
            await store.announce(record, 300.0, "forger", takes=True)
    return forged


def test_a_stray_process_cannot_ask_redis(fleet: Fleet) -> None:
    """And with its password a client can do only what a process of the fleet must do."""
    with redis.Redis.from_url(fleet.redis_url, socket_timeout=30) as stray:
        for call in (stray.ping, stray.dbsize, lambda: stray.set("effuse:x", 1)):
            with pytest.raises(redis.AuthenticationError):
                call()
    known = fleet.home.redis_access.arguments(fleet.redis_url)
    with redis.Redis.from_url(fleet.redis_url, socket_timeout=30, **known) as member:
        assert member.ping()
        ask: Any = member.execute_command
        for words in (("CONFIG", "GET", "*"), ("SHUTDOWN", "NOSAVE")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                ask(*words)


def test_no_secret_stands_on_a_command_line_or_in_a_log(fleet: Fleet) -> None:
    shown = "\n".join(
        [path.read_text() for path in fleet.log_dir.glob("*.log")]
        + [" ".join(one.cmdline()) for p in fleet.processes.values() for one in tree(p.pid)]
    )
    home = fleet.log_dir
    secrets = [(home / "fleet.secret").read_text(), (home / "redis.credentials").read_text()]
    assert "--redis-credentials" in shown
    for secret in secrets:
        assert secret.strip().rpartition(":")[2] not in shown
