"""A front whose role changes, over an engine without a model."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import fake_engine
import fronts
import grpc.aio
import pytest
from eventually import eventually
from fronts import decode_request, event_of, prefill_start, reservation, running
from grpc_health.v1 import health_pb2, health_pb2_grpc

from effuse.both_worker.server import make_role
from effuse.decode_worker import server as decode_server
from effuse.protos.errors import EffuseError, OtherRole, Refused, from_rpc_error
from effuse.v1 import worker_pb2 as pb
from effuse.worker.config import BothConfig

CONFIG = BothConfig(hang_timeout_s=60.0, drain_s=10.0, log_level="error")


async def set_role(
    one: fronts.Running, role: str, hand_over_s: float | None = None
) -> pb.SetRoleResponse:
    request = pb.SetRoleRequest(role=role, hand_over_s=hand_over_s)
    return await one.worker.SetRole(request, timeout=20)


async def prefill(one: fronts.Running, name: str) -> EffuseError | None:
    """How a whole prefill ends."""
    call = one.prefill.Prefill(timeout=20)
    try:
        await call.write(prefill_start(name, one.incarnation))
        assert isinstance(await call.read(), pb.PrefillResponse)
        await call.write(reservation(name))
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, "the worker")
    return None


async def decode(one: fronts.Running, name: str) -> EffuseError | None:
    """How a whole decode ends."""
    call = one.decode.Decode(decode_request(name, one.incarnation), timeout=20)
    try:
        await fronts.events_of(call)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, "the worker")
    return None


async def serving(one: fronts.Running) -> set[str]:
    """The kinds of work for which health is good."""
    stub, found = health_pb2_grpc.HealthStub(one.channel), set[str]()
    for name in ("Prefill", "Decode"):
        request = health_pb2.HealthCheckRequest(service=f"effuse.v1.{name}Service")
        answer: health_pb2.HealthCheckResponse = await stub.Check(request, timeout=30)
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            found.add(name)
    return found


def test_each_role_serves_its_own_kinds_and_refuses_others_by_name(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(CONFIG), CONFIG, tmp_path) as one:
            first = one.incarnation
            for number, (role, takes) in enumerate(
                [
                    ("both", {"Prefill", "Decode"}),
                    ("prefill", {"Prefill"}),
                    ("decode", {"Decode"}),
                    ("both", {"Prefill", "Decode"}),
                ]
            ):
                assert (await set_role(one, role)).role == role
                ends = {
                    "Prefill": await prefill(one, f"p{number}"),
                    "Decode": await decode(one, f"d{number}"),
                }
                assert {name for name, error in ends.items() if error is None} == takes
                for error in filter(None, ends.values()):
                    assert isinstance(error, OtherRole) and error.labels["role"] == role
                load = await one.load()
                assert load.role == role and one.front.shell.duty.role == role
                assert (record := one.front.shell.record()) is not None
                assert (record.role, record.may_change_role) == (role, True)
                await eventually(partial(_is, one, takes))
            assert one.incarnation == first, "a change is no new life"
            await one.until_free()

    asyncio.run(go())


async def _is(one: fronts.Running, wanted: set[str]) -> bool:
    return await serving(one) == wanted


def test_what_runs_goes_on_and_is_counted(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(CONFIG), CONFIG, tmp_path) as one:
            call = one.decode.Decode(
                decode_request("endless", one.incarnation, fake_engine.ENDLESS), timeout=20
            )
            await event_of(call)
            assert (await set_role(one, "prefill")).leaving == 1
            assert (await one.load()).leaving == 1
            assert isinstance(await decode(one, "late"), OtherRole)
            for _ in range(3):
                await event_of(call)
            assert (await set_role(one, "both")).leaving == 0
            call.cancel()
            await one.until_free()

    asyncio.run(go())


def test_what_runs_too_long_is_handed_over_with_the_error_of_a_changed_role(
    tmp_path: Path,
) -> None:
    async def go() -> None:
        async with running(make_role(CONFIG), CONFIG, tmp_path) as one:
            call = one.decode.Decode(
                decode_request("endless", one.incarnation, fake_engine.ENDLESS), timeout=20
            )
            await event_of(call)
            await set_role(one, "prefill", hand_over_s=0.0)
            error = await fronts.failure_of(call)
            assert isinstance(error, OtherRole) and error.labels["role"] == "prefill"
            assert await prefill(one, "next") is None
            await one.until_free()

    asyncio.run(go())


def test_a_later_change_takes_back_what_was_to_be_handed_over(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(CONFIG), CONFIG, tmp_path) as one:
            call = one.decode.Decode(
                decode_request("endless", one.incarnation, fake_engine.ENDLESS), timeout=20
            )
            await event_of(call)
            await set_role(one, "prefill", hand_over_s=0.3)
            await set_role(one, "both")
            await asyncio.sleep(0.6)
            await event_of(call)
            call.cancel()
            await one.until_free()

    asyncio.run(go())


def test_a_role_outlives_an_engine(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_role(CONFIG), CONFIG, tmp_path) as one:
            old = one.incarnation
            call = one.decode.Decode(decode_request("x", old, fake_engine.CRASH), timeout=20)
            await set_role(one, "decode")
            with pytest.raises(grpc.aio.AioRpcError):
                await fronts.events_of(call)
            await one.until_new_life(old)
            assert isinstance(await prefill(one, "p"), OtherRole)
            assert await decode(one, "d") is None
            await one.until_free()

    asyncio.run(go())


def test_a_worker_of_one_kind_keeps_its_role(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(decode_server.make_role(), CONFIG, tmp_path) as one:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await set_role(one, "prefill")
            error = from_rpc_error(caught.value, "the worker")
            assert isinstance(error, Refused) and "effuse-worker" in error.message
            assert (await set_role(one, "decode")).role == "decode"
            assert (await one.load()).role == "decode"

    asyncio.run(go())


def test_several_replicas_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="--data-parallel-size: expected 1"):
        BothConfig(data_parallel_size=2)
