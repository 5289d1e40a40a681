"""A front over an engine without a model: health, a crash, a hang, drain, signals, its lease."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import urllib.request
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import fake_engine
import fronts
import grpc
import grpc.aio
import msgspec
import psutil
import pytest
import redis_server
from eventually import eventually
from fronts import decode_request, event_of, running
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopbacks import LOOPBACKS
from slowness import patient

from effuse.decode_worker.server import make_role
from effuse.placement import leases
from effuse.placement.leases import FleetView, Superseded
from effuse.placement.records import Load
from effuse.placement.store import Store
from effuse.protos.channels import OPEN
from effuse.protos.errors import (
    Draining,
    EffuseError,
    EngineLost,
    InvalidRequest,
    Refused,
    Unavailable,
    from_rpc_error,
)
from effuse.v1 import worker_pb2 as pb
from effuse.worker import front, supervisor
from effuse.worker.config import DecodeConfig
from effuse.worker.front import Front
from effuse.worker.supervisor import new_incarnation
from effuse.worker.watchdog import Backoff, GaveUp

CONFIG = DecodeConfig(hang_timeout_s=60.0, drain_s=10.0, log_level="error")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
DECODE, WORKER = "effuse.v1.DecodeService", "effuse.v1.WorkerService"


async def health(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    answer: health_pb2.HealthCheckResponse = await stub.Check(request, timeout=30)
    return int(answer.status)


async def answer(one: fronts.Running, request: pb.DecodeRequest) -> list[str]:
    """The names of all events of a decode."""
    call = one.decode.Decode(request, timeout=patient(20))
    return [str(event.WhichOneof("event")) for event in await fronts.events_of(call)]


async def failure(one: fronts.Running, request: pb.DecodeRequest) -> EffuseError:
    """The error that a decode ends with."""
    return await fronts.failure_of(one.decode.Decode(request, timeout=patient(20)))


def test_ready_means_that_a_request_is_served(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            for service in ("", WORKER, DECODE):
                assert await health(one.channel, service) == SERVING
            facts = json.loads(one.ready_file.read_text())
            assert facts == {
                "address": one.front.shell.address,
                "incarnation": one.incarnation,
                "metrics": facts["metrics"],
                "pid": os.getpid(),
            }
            events = await answer(one, decode_request("a", one.incarnation))
            assert events == ["reservation", "verified", *["commit"] * 3, "finished"]
            await one.until_free()

    asyncio.run(go())


@pytest.mark.parametrize("host", LOOPBACKS)
def test_it_is_reached_at_what_it_announces(host: str, tmp_path: Path) -> None:
    async def go() -> None:
        config = dataclasses.replace(CONFIG, host=host, metrics_host=host, health_port=0)
        async with running(make_role(), config, tmp_path) as one:
            assert await answer(one, decode_request("a", one.incarnation))
            address = (await one.load()).worker.address
            facts = json.loads(one.ready_file.read_text())
            assert facts["address"] == address
            for told in (address, facts["metrics"]):
                assert urlsplit(f"//{told}").hostname == host.strip("[]")

    asyncio.run(go())


def test_a_crash_fails_what_ran_and_the_next_life_serves(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            old = one.incarnation
            endless = one.decode.Decode(
                decode_request("endless", old, fake_engine.ENDLESS), timeout=20
            )
            assert (await event_of(endless)).HasField("reservation")
            errors = [await failure(one, decode_request("crash", old, fake_engine.CRASH))]
            errors.append(await fronts.failure_of(endless))
            for error in errors:
                assert isinstance(error, Unavailable)
                assert error.retryable
                assert error.retry_after_s is not None
                assert error.labels == {"incarnation": old, "ending": "died"}
            await one.until_new_life(old)
            refused = await failure(one, decode_request("late", old))
            assert isinstance(refused, Refused)
            assert old in refused.message
            assert await answer(one, decode_request("good", one.incarnation))
            await eventually(lambda: old not in one.ready_file.read_text())
            await one.until_free()

    asyncio.run(go())


@pytest.mark.parametrize("first_token", [fake_engine.HANG, fake_engine.STAND_STILL])
def test_a_hung_engine_is_noticed_and_replaced(tmp_path: Path, first_token: int) -> None:
    async def go() -> None:
        config = dataclasses.replace(CONFIG, hang_timeout_s=patient(3.0))
        async with running(make_role(), config, tmp_path) as one:
            old = one.incarnation
            error = await failure(one, decode_request("hang", old, first_token))
            assert isinstance(error, EngineLost)
            assert error.labels == {"incarnation": old, "ending": "hung"}
            await one.until_new_life(old)
            assert await answer(one, decode_request("good", one.incarnation))

    asyncio.run(go())


@pytest.mark.parametrize("first_token", [fake_engine.COMPILE, fake_engine.LONG_FORWARD])
def test_an_engine_that_is_busy_for_long_is_not_hung(tmp_path: Path, first_token: int) -> None:
    async def go() -> None:
        config = dataclasses.replace(CONFIG, hang_timeout_s=patient(2.5))
        assert 2 * config.hang_timeout_s < fake_engine.LONG_S
        async with running(make_role(), config, tmp_path) as one:
            old = one.incarnation
            assert await answer(one, decode_request("long", old, first_token))
            assert one.incarnation == old

    asyncio.run(go())


@pytest.mark.parametrize("service", [DECODE, WORKER])
def test_readiness_is_lost_while_there_is_no_engine(tmp_path: Path, service: str) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            seen: list[int] = []

            async def watch() -> None:
                stub = health_pb2_grpc.HealthStub(one.channel)
                request = health_pb2.HealthCheckRequest(service=service)
                async for update in stub.Watch(request, timeout=30):
                    seen.append(update.status)
                    if seen[-2:] == [NOT_SERVING, SERVING]:
                        return

            watcher = asyncio.ensure_future(watch())
            await eventually(lambda: seen == [SERVING])
            life = one.front.shell.supervisor.life
            assert life is not None
            os.kill(life.client.pid, signal.SIGKILL)
            await watcher
            assert seen == [SERVING, NOT_SERVING, SERVING]
            assert await health(one.channel, "") == SERVING

    asyncio.run(go())


async def until_refused(one: fronts.Running) -> None:
    """Returns when no process listens at the front's port."""
    host, _, port = one.front.shell.address.rpartition(":")

    async def is_refused() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:  # it is being closed
            return False
        writer.close()
        return False

    await eventually(is_refused)


async def hang(one: fronts.Running) -> tuple[fronts.DecodeCall, int]:
    """A request that its engine never lets go of, and the engine's process."""
    life = one.front.shell.supervisor.life
    assert life is not None
    call = one.decode.Decode(decode_request("hung", one.incarnation, fake_engine.HANG), timeout=50)
    await eventually(lambda: len(one.front.shell.attempts) == 1)
    return call, life.client.pid


# A router that finds the port closed counts the engine as dead, and reuses pages that it may write
# to.
def test_the_port_of_a_worker_that_ends_outlives_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "END_S", 0.2)
    monkeypatch.setattr(supervisor, "_STOP_GRACE_S", 1.0)

    async def go(url: str) -> None:
        config = dataclasses.replace(CONFIG, hang_timeout_s=60.0, drain_s=0.2, redis_url=url)
        async with running(make_role(), config, tmp_path) as one:
            hung, engine = await hang(one)
            one.stop.set()
            await until_refused(one)
            assert not psutil.pid_exists(engine)
            assert isinstance(await fronts.failure_of(hung), Draining)
        # Its lease was released long before, and no process has taken it.
        assert one.done.exception() is None

    with redis_server.running() as server:
        asyncio.run(go(server.connection_url))


def test_the_port_of_a_worker_that_is_superseded_outlives_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_STOP_GRACE_S", 1.0)

    async def serve(config: DecodeConfig, made: asyncio.Future[Front]) -> None:
        async with asyncio.TaskGroup() as tasks:
            made.set_result(Front(config, fronts.use_fake_engine(make_role()), tasks))
            await made.result().run(asyncio.Event())

    async def go(url: str, ready: Path) -> None:
        config = dataclasses.replace(CONFIG, hang_timeout_s=60.0, redis_url=url, ready_file=ready)
        made: asyncio.Future[Front] = asyncio.get_running_loop().create_future()
        done = asyncio.ensure_future(serve(config, made))
        await eventually(ready.exists)
        shell = (await made).shell
        async with (
            OPEN.connect(shell.address, keepalive=None) as channel,
            Store(url, "effuse", timeout_s=20.0) as store,
        ):
            one = fronts.Running(await made, channel, asyncio.Event(), done, ready)
            hung, engine = await hang(one)
            record = shell.record()
            assert record is not None
            other = msgspec.structs.replace(record, incarnation="another")
            later = new_incarnation()
            assert await store.announce(other, 60.0, later, takes=True) == "held"
            await until_refused(one)
            assert not psutil.pid_exists(engine)
            assert isinstance(await fronts.failure_of(hung), Draining)
        with pytest.raises(ExceptionGroup) as caught:
            await done
        assert caught.group_contains(Superseded)

    with fronts.importable(), redis_server.running() as server:
        asyncio.run(go(server.connection_url, tmp_path / "ready.json"))


@pytest.mark.parametrize("deadline_s", [-1.0, float("nan")])
def test_a_drain_without_a_time_is_refused(tmp_path: Path, deadline_s: float) -> None:
    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await one.worker.Drain(pb.DrainRequest(deadline_s=deadline_s), timeout=30)
            assert isinstance(from_rpc_error(caught.value, "w"), InvalidRequest)
            assert await answer(one, decode_request("good", one.incarnation))

    asyncio.run(go())


def test_a_worker_announces_itself_its_new_life_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker would miss a slow answer, and its end would show only once its lease is over.
    monkeypatch.setattr(front, "Store", partial(Store, timeout_s=20.0))

    async def go() -> None:
        with redis_server.running() as server:
            config = dataclasses.replace(
                CONFIG,
                redis_url=server.connection_url,
                fleet="blue",
                worker_id="d0",
                data_parallel_size=2,
            )
            async with Store(server.connection_url, "blue", timeout_s=20.0) as store:
                view = FleetView(store)

                async def shows(incarnation: str) -> bool:
                    await view.poll()
                    return [w.incarnation for w in view.workers()] == [incarnation]

                async with running(make_role(), config, tmp_path) as one:
                    old = one.incarnation
                    await eventually(lambda: shows(old))
                    (record,) = view.workers()
                    assert (record.worker_id, record.model.name) == ("d0", "fake")
                    capacity = record.capacity
                    assert (capacity.total_pages, capacity.replicas) == (fake_engine.PAGES, 2)
                    await failure(one, decode_request("crash", old, fake_engine.CRASH))
                    await one.until_new_life(old)
                    await eventually(lambda: shows(one.incarnation))
                await view.poll()
                assert view.workers() == []

    asyncio.run(go())


def test_the_loss_of_an_engine_is_announced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is announced but what has changed, and the next engine is long in coming.
    monkeypatch.setattr(front, "Store", partial(Store, timeout_s=20.0))
    monkeypatch.setattr(leases, "TTL_S", 7200.0)
    monkeypatch.setattr(leases, "RENEW_S", 3600.0)

    async def go() -> None:
        with redis_server.running() as server:
            config = dataclasses.replace(CONFIG, redis_url=server.connection_url, fleet="blue")
            async with (
                Store(server.connection_url, "blue", timeout_s=20.0) as store,
                running(make_role(), config, tmp_path) as one,
            ):
                supervising, old = one.front.shell.supervisor, one.incarnation
                view = FleetView(store)

                async def shows(state: str) -> bool:
                    await view.poll()
                    return [(w.state, w.incarnation) for w in view.workers()] == [(state, old)]

                await eventually(lambda: shows("ready"))
                supervising.backoff = Backoff(first_s=3600.0, most_s=3600.0)
                assert supervising.life is not None
                os.kill(supervising.life.client.pid, signal.SIGKILL)
                await eventually(lambda: shows("starting"))
                (record,) = view.workers()
                assert record.load == Load()
                assert supervising.life is None

    asyncio.run(go())


def test_metrics_are_served_on_a_port_of_their_own(tmp_path: Path) -> None:
    def scrape(address: str) -> list[str]:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as page:
            return str(page.read().decode()).splitlines()

    async def go() -> None:
        async with running(make_role(), CONFIG, tmp_path) as one:
            await answer(one, decode_request("a", one.incarnation))
            text = await asyncio.to_thread(
                scrape, json.loads(one.ready_file.read_text())["metrics"]
            )
        of = 'model_name="fake",role="decode"'
        for line in (
            f"effuse_prompt_tokens_total{{{of}}} 3.0",
            f"effuse_generation_tokens_total{{{of}}} 3.0",
            f'effuse_request_success_total{{finished_reason="length",{of}}} 1.0',
            f"effuse_request_queue_time_seconds_count{{{of}}} 1.0",
            f"effuse_time_to_first_block_seconds_count{{{of}}} 1.0",
            f"effuse_tokens_per_forward_count{{{of}}} 1.0",
            f"effuse_front_tasks{{{of}}}",
        ):
            assert any(one.startswith(line) for one in text), line

    asyncio.run(go())


def test_an_engine_that_cannot_start_ends_the_worker() -> None:
    async def go() -> None:
        config = dataclasses.replace(CONFIG, served_model_name="missing")
        async with asyncio.TaskGroup() as tasks:
            one = Front(config, fronts.use_fake_engine(make_role()), tasks)
            tasks.create_task(one.run(asyncio.Event()))

    with fronts.importable(), pytest.raises(ExceptionGroup) as caught:
        asyncio.run(go())
    assert caught.group_contains(GaveUp, match="no such checkpoint")
