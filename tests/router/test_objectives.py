"""Objectives of requests: their classes, their way to the router, the order of the queue, and the
one rule of goodput."""

from __future__ import annotations

import asyncio
import json
import math
import random
from functools import partial
from typing import Any

import pytest
from router.asking import ask, failure, request
from router.fake_model import model_info
from router.fake_workers import holds
from router.fakes import FakeFleet, run, until

from effuse.benchmarks.fleet_report import Objectives as FleetObjectives
from effuse.cli.figures import Sample, ServiceGoals
from effuse.client.params import Params, make_request
from effuse.protos import errors
from effuse.protos.channels import monitor_stub
from effuse.router.admission import LATEST_S, SlotNeed
from effuse.router.config import RequestClass, RouterConfig
from effuse.router.measures import NO_GOALS, Goals, Kept, KeptShares, Measured
from effuse.router.openai_requests import request_of
from effuse.router.planner import Objectives, Planner, Workload
from effuse.router.steering import Steering
from effuse.router.validation import Asked, validate
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import monitor_pb2

CLASSES = {"chat": RequestClass(Goals(0.5, 0.1), "high"), "batch": RequestClass(NO_GOALS, "low")}
CHAT = ("chat:first-block=0.5,gap=0.1,priority=high", "batch:priority=low")


def asked(goals: Goals = NO_GOALS, **fields: Any) -> Asked:
    message = request(**fields)
    return validate(message, model_info(), is_stream=True, classes=CLASSES, goals=goals)


def test_a_request_takes_its_own_objectives_then_its_class_then_the_routers() -> None:
    router = Goals(2.0, 3.0)
    assert asked(router).goals == router
    assert asked(router, request_class="chat").goals == Goals(0.5, 0.1)
    assert asked(router, request_class="batch").goals == router
    own = asked(router, request_class="chat", objectives=pb.Objectives(gap_within=0.25))
    assert own.goals == Goals(0.5, 0.25) and own.sent.request_class == "chat"


def test_a_class_sets_the_priority_unless_the_request_does() -> None:
    assert asked().priority == "normal"
    assert asked(request_class="chat").priority == "high"
    assert asked(request_class="batch").priority == "low"
    assert asked(request_class="chat", priority=pb.PRIORITY_NORMAL).priority == "normal"


@pytest.mark.parametrize("name", ["first_block_within", "gap_within"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 3601.0])
def test_a_bad_objective_is_named(name: str, value: float) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        asked(objectives=pb.Objectives(**{name: value}))
    (found,) = caught.value.violations
    assert found.field == f"objectives.{name}"
    assert found.description.startswith("expected a number above 0, at most 3600, got ")


def test_an_unknown_class_is_refused_with_the_known_ones() -> None:
    with pytest.raises(errors.InvalidRequest, match="expected one of chat, batch, got 'fast'"):
        asked(request_class="fast")
    with pytest.raises(errors.InvalidRequest, match="expected one of chat, batch, got ''"):
        asked(request_class="")
    with pytest.raises(errors.InvalidRequest, match="no classes are defined"):
        validate(request(request_class="chat"), model_info(), is_stream=True)


def test_clients_send_objectives() -> None:
    params = Params(first_block_within=0.5, gap_within=0.1, request_class="chat")
    sent = make_request("how many?", params)
    assert (sent.objectives.first_block_within, sent.objectives.gap_within) == (0.5, 0.1)
    assert sent.request_class == "chat"
    bare = make_request("how many?", Params())
    assert not bare.HasField("request_class") and not bare.objectives.ListFields()
    for bad in ({"gap_within": 0}, {"first_block_within": float("inf")}, {"request_class": 3}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Params(**bad)


def test_openais_clients_send_objectives() -> None:
    body = {"prompt": "how many?", "first_block_within": 0.5, "gap_within": 0.1,
            "request_class": "chat"}  # fmt: skip
    (sent,) = request_of(json.loads(json.dumps(body)), "completion").requests
    assert (sent.objectives.first_block_within, sent.objectives.gap_within) == (0.5, 0.1)
    assert sent.request_class == "chat"
    for name in ("first_block_within", "gap_within"):
        with pytest.raises(errors.InvalidRequest, match=f"{name}.*above 0, at most 3600"):
            request_of({**body, name: 0.0}, "completion")


# The queue.


def place(arrived: float, *, first: float | None = None, **fields: Any) -> float:
    if first is not None:
        fields["objectives"] = pb.Objectives(first_block_within=first)
    return SlotNeed.of(asked(**fields), "", arrived, 60.0).place


def test_within_a_priority_the_earliest_first_block_goes_first() -> None:
    assert place(5.0, first=1.0) < place(0.0, first=7.0) < place(0.0, first=8.0)
    assert place(0.0) < place(1.0)  # without objectives in the order of arrival, as before
    assert place(LATEST_S - 2, first=1.0) < place(0.0) < place(LATEST_S, first=1.0)


def test_no_objective_makes_a_request_wait_for_ever() -> None:
    """Later requests pass one for `LATEST_S` seconds at most, as with a far deadline."""
    draw = random.Random(2)
    for _ in range(200):
        slow = place(0.0, first=draw.uniform(1.0, 3600.0))
        later = place(LATEST_S, first=draw.uniform(1e-3, 3600.0))
        assert slow < later


def test_a_priority_goes_before_any_objective() -> None:
    high, low = place(0.0, priority=pb.PRIORITY_HIGH), place(0.0, priority=pb.PRIORITY_LOW)
    assert high < place(0.0, first=0.001) and place(0.0, first=3600.0) < low


def has_waiting(fleet: FakeFleet, number: int) -> bool:
    return fleet.router.admission.num_waiting == number


def test_the_queue_of_a_router_follows_the_objectives() -> None:
    async def body(fleet: FakeFleet) -> None:
        go, reached, order = asyncio.Event(), asyncio.Event(), list[str]()
        fleet.decode[0].at["start"] = holds(go, reached)

        async def one(name: str, **fields: object) -> None:
            await ask(fleet, **fields)
            order.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(one("running"))
            await reached.wait()
            wanted: dict[str, dict[str, Any]] = {
                "class": {"request_class": "batch"},
                "none": {},
                "late": {"objectives": pb.Objectives(first_block_within=20.0)},
                "soon": {"objectives": pb.Objectives(first_block_within=1.0)},
            }
            for at, (name, fields) in enumerate(wanted.items()):
                group.create_task(one(name, **fields))
                await until(partial(has_waiting, fleet, at + 1))
            go.set()
        assert order == ["running", "soon", "late", "none", "class"]

    run(body, max_concurrent_requests=1, request_class=CHAT)


def test_the_gap_travels_to_the_decode_worker() -> None:
    async def body(fleet: FakeFleet) -> None:
        await ask(fleet)
        await ask(fleet, request_class="chat")
        await ask(fleet, objectives=pb.Objectives(gap_within=0.25, first_block_within=1.0))
        first, second, third = fleet.decode[0].requests
        assert not first.HasField("gap_s")
        assert (second.gap_s, third.gap_s) == (0.1, 0.25)

    run(body, num_decode=1, request_class=CHAT)


# Goodput.


def counts(fleet: FakeFleet, name: str, met: str, of: str = "") -> float | None:
    labels = {"model_name": "fake", "class": of, "objective": name, "met": met}
    return fleet.metric("effuse_requests_within_objectives_total", **labels)


def test_goodput_is_counted_by_class_and_objective() -> None:
    async def body(fleet: FakeFleet) -> None:
        await ask(fleet)  # without objectives nothing is counted
        await ask(fleet, request_class="chat")
        tight = pb.Objectives(first_block_within=1e-6, gap_within=60.0)
        await ask(fleet, request_class="chat", objectives=tight)
        await ask(fleet, objectives=pb.Objectives(gap_within=60.0))
        error = await failure(ask(fleet, request_class="chatty"))
        assert type(error) is errors.InvalidRequest and "chat, batch" in str(error)
        await fleet.idle()
        assert counts(fleet, "first_block", "true", "chat") == 1
        assert counts(fleet, "first_block", "false", "chat") == 1
        assert counts(fleet, "gap", "true", "chat") == 2
        assert counts(fleet, "all", "true", "chat") == counts(fleet, "all", "false", "chat") == 1
        assert counts(fleet, "all", "true") == counts(fleet, "gap", "true") == 1
        (plan,) = (await monitor_stub(fleet.channel).GetPlan(monitor_pb2.GetPlanRequest())).plans
        assert list(plan.kept) == [
            "100.0% of the latest requests met their objectives",
            "50.0% of the latest requests of class chat met their objectives",
        ]
        assert list(plan.lines[-2:]) == list(plan.kept)

    run(body, request_class=CHAT)


def test_a_request_that_fails_misses_its_objectives_but_not_one_that_its_client_cancels() -> None:
    async def body(fleet: FakeFleet) -> None:
        fleet.decode[0].at["commit 1"] = holds(asyncio.Event(), reached := asyncio.Event())
        asking = asyncio.create_task(ask(fleet, request_class="chat"))
        await reached.wait()
        asking.cancel()
        await fleet.idle()
        assert not counts(fleet, "all", "false", "chat")
        late = fleet.generation.Generate(request(request_class="chat"), timeout=0.3)
        assert type(await failure(late)) is errors.DeadlineExceeded
        await fleet.idle()
        for name in ("first_block", "gap", "all"):
            assert counts(fleet, name, "false", "chat") == 1

    run(body, request_class=CHAT)


def test_shares_are_of_the_latest_requests() -> None:
    shares = KeptShares()
    for at in range(5000):
        shares.note("m", "", is_kept=at > 2500)
    (line,) = shares.lines("m")
    assert float(line.partition("%")[0]) > 99
    assert shares.lines("another") == []


def test_a_relative_gap_is_of_the_gaps_that_were_measured() -> None:
    steering = Steering(Objectives(first_block_s=2.0, gap_ratio=3.0), "auto", lambda: 0.0)
    assert steering.goals("m") == Goals(2.0)
    measured = Measured()
    for _ in range(20):
        measured.note_commit(1, 100, 4, 0.04)
        measured.note_prompt("p0", 100, 0, 0.01, 1.0)
    planner = Planner(measured.times(0.0, 0.0), Workload(1.0, 100.0, 8.0), steering._objectives)
    steering.of("m").planner = planner
    assert steering.goals("m").gap_s == pytest.approx(0.12)


def test_an_objective_that_no_request_may_have_counts_as_none() -> None:
    """Decode workers refuse it, and would refuse each request."""
    assert Steering(Objectives(gap_s=7200.0), "auto", lambda: 0.0).goals("m") == NO_GOALS


@pytest.mark.parametrize(
    ("goals", "kept", "all_of_them"),
    [
        (NO_GOALS, Kept(None, None), None),
        (Goals(first_block_s=0.5), Kept(True, None), True),
        (Goals(first_block_s=0.49), Kept(False, None), False),
        (Goals(gap_s=0.2), Kept(None, True), True),
        (Goals(gap_s=0.19), Kept(None, False), False),  # every gap counts, not most of them
        (Goals(0.5, 0.19), Kept(True, False), False),
    ],
)
def test_what_an_answer_kept(goals: Goals, kept: Kept, all_of_them: bool | None) -> None:
    gaps = (*[0.1] * 200, 0.2)
    assert goals.kept(0.5, gaps) == kept and goals.kept(0.5, gaps).all is all_of_them
    # The command and the benchmarks judge by the same rule.
    sample = Sample(1, 1, 0.5, 9.0, gaps)
    assert ServiceGoals(goals.first_block_s, goals.gap_s).met_by(sample) is (
        all_of_them is not False
    )
    request = {"failure": "", "first_s": 0.5, "gaps": list(gaps)}
    told = FleetObjectives(goals.first_block_s, goals.gap_s)
    assert told.met_by(request) is (all_of_them is not False)


def test_a_failed_request_keeps_none_of_its_objectives() -> None:
    assert Goals(3600.0, 3600.0).missed() == Kept(False, False)
    assert NO_GOALS.missed() == Kept(None, None)


def test_own_objectives_come_before_those_of_the_class() -> None:
    assert Goals(1.0).or_else(Goals(2.0, 3.0)).or_else(Goals(4.0, 5.0)) == Goals(1.0, 3.0)


def classes(*texts: str) -> dict[str, RequestClass]:
    return RouterConfig(request_class=texts).classes


def test_classes_of_a_flag() -> None:
    found = classes("chat:first-block=0.5,gap=0.1,priority=high", "batch:", "x")
    assert found == {
        "chat": RequestClass(Goals(0.5, 0.1), "high"),
        "batch": RequestClass(NO_GOALS, "normal"),
        "x": RequestClass(NO_GOALS, "normal"),
    }
    assert classes("batch:priority=low")["batch"].priority == "low"
    assert math.isinf(classes("a:gap=1")["a"].goals.first_block_s)


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ([":gap=1"], "expected a name of 1 to 64 characters"),
        (["a b:gap=1"], "expected a name of 1 to 64 characters"),
        (["a", "a:gap=1"], "expected different names, got 'a' twice"),
        (["a:gap"], "expected NAME:first-block=S"),
        (["a:gap=1,gap=2"], "expected NAME:first-block=S"),
        (["a:total=1"], "expected NAME:first-block=S"),
        (["a:priority=urgent"], "expected one of low, normal, high as a priority, got 'urgent'"),
        *((["a:gap=" + bad], "expected a number above 0, at most 3600, as seconds, got")
          for bad in ("0", "-1", "nan", "inf", "3601", "soon", "")),
        ([f"c{at}" for at in range(65)], "expected at most 64 classes, got 65"),
    ],
)  # fmt: skip
def test_bad_classes(texts: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=f"^--request-class: {told}"):
        classes(*texts)
