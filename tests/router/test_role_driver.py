"""One router of several carries a plan out, at workers that may refuse, be slow or be gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from msgspec.structs import replace
from router.fake_model import byte_tokenizer
from router.fake_workers import FakeDecode, FakeWorker, Handoffs, holds, once, raises
from router.fakes import FakeStore
from router.test_planner import EVEN
from router.test_steering import GAP, load

from effuse.protos.errors import Refused
from effuse.router.config import RouterConfig
from effuse.router.planner import Planner, Split
from effuse.router.role_changes import RETRY_S, SEEN_S, RoleDriver
from effuse.router.router import Router
from effuse.router.tokenizer import Tokenizer


@dataclass
class Pair:
    """A router and the part of it that changes roles."""

    router: Router
    driver: RoleDriver

    async def step(self) -> list[str]:
        """A look at the workers, and the changes that follow; returns what an operator reads."""
        await self.router.fleet.view.poll()
        await self.router.seats.exchange(self.router.id, "")
        one = self.router.steering.of("fake")
        one.records = list(self.router.fleet.records())
        await self.driver.step()
        return list(one.notes)

    def plan(self, prefill: int, decode: int) -> None:
        one = self.router.steering.of("fake")
        one.planner = Planner(EVEN, load(1.0), GAP)
        one.roles.plan = Split(prefill, decode, 0.0, 20.0, 8.0)

    def count(self, to: str, result: str) -> float | None:
        labels = {"model_name": "fake", "to": to, "result": result}
        return self.router.metrics.value("effuse_role_changes_total", labels)


@dataclass
class Steered:
    """Workers whose roles may change, and routers that are not served."""

    pairs: Sequence[Pair]
    workers: Sequence[FakeWorker]
    store: FakeStore
    now: float = 100.0

    async def announce(self) -> None:
        self.store.records = {one.worker_id: one.record for one in self.workers}

    @property
    def roles(self) -> list[str]:
        return [one.record.role for one in self.workers]


@asynccontextmanager
async def steered(
    num_workers: int, num_routers: int = 1, *, steering: bool = True
) -> AsyncIterator[Steered]:
    handoffs, store = Handoffs(), FakeStore()
    found = Steered((), [FakeDecode(f"w{at}", handoffs) for at in range(num_workers)], store)
    for worker in found.workers:
        await worker.start()
        worker.record = replace(worker.record, role="both", may_change_role=True)
    await found.announce()
    config = RouterConfig(metrics=False, steering=steering)
    routers = [
        Router(config, Tokenizer(byte_tokenizer()), store, now=lambda: found.now)
        for _ in range(num_routers)
    ]
    routers.sort(key=lambda one: one.id)
    found.pairs = [Pair(one, RoleDriver(one)) for one in routers]
    try:
        yield found
    finally:
        for one in routers:
            await one.fleet.peers.close()
            one.tokenizer.close()
        for worker in found.workers:
            await worker.server.stop(0)


def run(body: Callable[[Steered], Awaitable[None]], num_workers: int = 3, **kwargs: object) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), steered(num_workers, **kwargs) as found:  # type: ignore[arg-type]
            await body(found)

    asyncio.run(main())


def test_a_plan_is_carried_out_one_worker_after_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def body(found: Steered) -> None:
        (one,) = found.pairs
        one.plan(1, 2)
        assert await one.step() == [
            "this router changes the roles",
            "w0 changes from both to prefill",
        ]
        assert found.roles == ["prefill", "both", "both"]
        await one.step()
        assert found.roles == ["prefill", "both", "both"], "its lease still has the former role"
        await found.announce()
        await one.step()
        assert found.roles == ["prefill", "decode", "both"]
        await found.announce()
        await one.step()
        await found.announce()
        assert await one.step() == ["this router changes the roles"]
        assert found.roles == ["prefill", "decode", "decode"]
        assert (one.count("prefill", "ok"), one.count("decode", "ok")) == (1, 2)
        assert one.router.steering.of("fake").lines()[-1] != ""
        told = [text for text in caplog.messages if "is now" in text]
        assert told[0] == (
            "w0 is now prefill, and was both: "
            "1 prefill worker and 2 decode workers sustain 20 requests a second"
        )
        assert len(told) == 3

    run(body)


def test_a_worker_that_does_not_show_its_role_stops_the_others_for_a_while() -> None:
    async def body(found: Steered) -> None:
        (one,) = found.pairs
        one.plan(1, 2)
        await one.step()
        found.now += SEEN_S - 0.1
        await one.step()
        assert found.workers[1].roles == []
        found.now += 0.2
        await one.step()
        assert found.workers[0].roles == ["prefill", "prefill"], "it asks for the same again"

    run(body)


def test_a_refusal_is_logged_once_and_another_worker_takes_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body(found: Steered) -> None:
        (one,) = found.pairs
        found.workers[0].at["role"] = raises(Refused("an operator has set it", retryable=False))
        one.plan(1, 2)
        notes = await one.step()
        assert notes[-1] == "the role of w0 stays for now: an operator has set it"
        await one.step()
        assert found.roles == ["both", "prefill", "both"]
        assert (one.count("prefill", "refused"), one.count("prefill", "ok")) == (1, 1)
        for _ in range(6):
            found.now += RETRY_S / 2 + 0.1
            await found.announce()
            await one.step()
        assert found.workers[0].roles[1:].count("decode") >= 2, "it is asked again"
        assert sum("the role of w0 stays" in text for text in caplog.messages) == 1

    run(body)


def test_a_worker_that_is_gone_or_hangs_costs_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effuse.router.calls.ASK_S", 0.2)

    async def body(found: Steered) -> None:
        (one,) = found.pairs
        found.workers[0].at["role"] = once(holds(asyncio.Event()))
        await found.workers[1].server.stop(0)
        one.plan(1, 2)
        await one.step()
        await one.step()
        assert one.count("prefill", "failed") == 2
        await one.step()
        assert found.roles == ["both", "both", "prefill"]

    run(body)


def test_one_router_changes_roles_and_another_follows_it() -> None:
    async def body(found: Steered) -> None:
        first, second = found.pairs
        second.plan(1, 2)
        await first.router.seats.exchange(first.router.id, "")
        await second.step()
        assert found.roles == ["prefill", "both", "both"], "the first one has no plan"
        await found.announce()
        first.plan(1, 2)
        await first.step()
        assert await second.step() == [f"{first.router.id} changes the roles"]
        assert [one.roles for one in found.workers] == [["prefill"], ["decode"], []]
        await first.router.seats.others.release()
        await found.announce()
        assert (await second.step())[0] == "this router changes the roles"
        await found.announce()
        await second.step()
        assert found.roles == ["prefill", "decode", "decode"]

    run(body, num_routers=2)


def test_two_that_do_it_at_once_do_no_harm() -> None:
    async def body(found: Steered) -> None:
        for one in found.pairs:
            one.router.seats.others.driver_of = lambda model, one=one: one.router.id  # type: ignore[method-assign,misc]
            one.plan(1, 3)
        for _ in range(8):
            await asyncio.gather(*(one.step() for one in found.pairs))
            await found.announce()
        assert found.roles == ["prefill", "decode", "decode", "decode"]
        for worker in found.workers:
            assert len(set(worker.roles)) == 1, "no worker changed twice"

    run(body, num_workers=4, num_routers=2)


def test_without_redis_a_router_that_is_not_alone_changes_nothing() -> None:
    async def body(found: Steered) -> None:
        first, second = found.pairs
        for one in found.pairs:
            one.plan(1, 2)
            await one.router.fleet.view.poll()
            await one.router.seats.exchange(one.router.id, "")
        await first.router.seats.exchange(first.router.id, "")
        found.store.is_down = True
        assert await first.step() == ["no roles change without Redis"]
        assert found.roles == ["both"] * 3
        found.store.is_down = False
        await second.router.seats.others.release()
        await first.router.seats.exchange(first.router.id, "")
        found.store.is_down = True
        assert (await first.step())[0] == "this router changes the roles"
        assert found.roles == ["prefill", "both", "both"]

    run(body, num_routers=2)


def test_the_flag_and_fixed_roles_change_nothing() -> None:
    async def body(found: Steered) -> None:
        (one,) = found.pairs
        one.plan(1, 2)
        assert await one.step() == ["this router changes no roles, because of --no-steering"]
        assert one.router.steering.steered() == ()
        for worker in found.workers:
            worker.record = replace(worker.record, may_change_role=False)
        await found.announce()
        assert await one.step() == ["no worker may change its role"]
        assert [worker.roles for worker in found.workers] == [[], [], []]

    run(body, steering=False)


def test_a_worker_writes_answers_again_before_there_is_any_plan() -> None:
    """Without answers nothing is measured, so a new router would wait for a plan for ever."""

    async def body(found: Steered) -> None:
        (one,) = found.pairs
        found.workers[2].record = replace(found.workers[2].record, role="decode")
        for worker in found.workers[:2]:
            worker.record = replace(worker.record, role="prefill")
        await found.announce()
        assert await one.step() == [] and one.router.steering.steered() == ()
        found.workers[2].record = replace(found.workers[2].record, role="prefill")
        found.workers[0].record = replace(found.workers[0].record, role_is_pinned=True)
        await found.announce()
        assert (await one.step())[:2] == [
            "this router changes the roles",
            "w1 changes from prefill to decode",
        ]
        assert one.router.steering.steered() == ("fake",)
        assert one.router.steering.of("fake").lines()[2] == "w1 changes from prefill to decode"
        await found.announce()
        assert await one.step() == []
        assert found.roles == ["prefill", "decode", "prefill"]

    run(body)
