"""Plans that follow a load, and stay as they are in a steady one."""

from __future__ import annotations

import random

import msgspec
import pytest
from router.asking import ask
from router.fake_model import worker_record
from router.fakes import FakeFleet, run
from router.test_planner import EVEN, LOAD

from effuse.placement.records import Role, RouterRecord, decode, encode
from effuse.protos.channels import monitor_stub
from effuse.router.metrics import RouterMetrics
from effuse.router.planner import MOST_COST, MOST_WORKERS, Objectives, Planner, Split, Workload
from effuse.router.policy import Candidate, InFlight, PrefillMode
from effuse.router.steering import (
    AFTER_S,
    ENDED_S,
    FULL_AFTER_S,
    SHRINK_S,
    HeldPlan,
    ModelPlan,
    Steering,
    _piece,
)
from effuse.v1 import monitor_pb2
from effuse.v1 import worker_pb2 as pb

GAP = Objectives(gap_s=0.08)  # so that a prefill worker bears 20 and a decode worker 20 a second


class Day:
    """One model's plans, second by second."""

    def __init__(self, present: tuple[int, int] = (2, 2), objectives: Objectives = GAP) -> None:
        self.objectives = objectives
        self.plan, self.now, self.present, self.changes = ModelPlan(), 0.0, present, 0
        self.fixed = 0, 0

    def spend(self, seconds: float, workload: Workload) -> None:
        for _ in range(round(seconds)):
            before = self.roles, self.desired
            self.plan.planner = Planner(EVEN, workload, self.objectives)
            self.plan.follow(self.present, self.now, self.fixed)
            self.changes += before != (self.roles, self.desired)
            self.now += 1.0

    @property
    def roles(self) -> tuple[int, int]:
        return self.plan.roles.plan.roles if self.plan.roles.plan else (0, 0)

    @property
    def desired(self) -> tuple[int, int]:
        return self.plan.desired.plan.roles if self.plan.desired.plan else (0, 0)


def load(rate: float, prompt: float = 1000.0, answer: float = 128.0) -> Workload:
    return Workload(rate, prompt, answer)


def test_roles_follow_a_load_that_lasts() -> None:
    day = Day((2, 2))
    day.spend(5, load(30))
    assert day.roles == (2, 2)
    day.spend(AFTER_S - 1, load(30, prompt=3000.0))
    assert day.roles == (2, 2)  # not yet
    day.spend(3, load(30, prompt=3000.0))
    assert day.roles == (3, 1)
    day.spend(AFTER_S + 2, load(30))
    assert day.roles == (2, 2)


def test_roles_stay_where_others_would_gain_nothing() -> None:
    day = Day((2, 2))
    day.spend(300, load(2.0, prompt=3000.0))  # 3P1D bears 20, and 2P2D with 13 as well enough
    assert day.roles == (2, 2)
    for number in range(30):  # a load that lasts for less than the time
        day.spend(AFTER_S - 2, load(30, prompt=1000.0 if number % 2 else 3000.0))
    assert day.roles == (2, 2)


def test_other_workers_are_the_roles_that_there_are() -> None:
    day = Day((2, 2))
    day.spend(5, load(30))
    day.present = (1, 2)
    day.spend(1, load(30))
    assert day.roles == (1, 2)
    day.present = (0, 0)
    day.spend(20, load(30))
    assert day.roles == (0, 0)


def test_roles_that_stay_bound_the_plan() -> None:
    day = Day((2, 2))
    day.fixed = (0, 2)
    day.spend(5, load(30))
    day.spend(AFTER_S + 2, load(30, prompt=3000.0))
    assert day.roles == (2, 2), "two workers always decode"
    day.fixed = (0, 1)
    day.spend(AFTER_S + 2, load(30, prompt=3000.0))
    assert day.roles == (3, 1)
    day.fixed = (0, 2)
    day.spend(1, load(30, prompt=3000.0))
    assert day.roles == (2, 2), "an operator has set a role since"


def test_a_host_that_ends_and_returns_keeps_the_ratio_of_the_plan() -> None:
    """Its workers were all prefill workers, and come back as workers that do both."""
    day = Day((8, 8))
    day.spend(5, load(120))
    assert day.roles == (8, 8)
    day.present = (4, 8)
    day.spend(1, load(120))
    assert day.roles == (6, 6), "at once, because the load is the same"
    day.present = (6, 10)
    day.spend(1, load(120))
    assert day.roles == (8, 8)
    day.present = (8, 7)
    day.spend(1, load(120))
    assert day.roles == (8, 7), "others would bear hardly more"


def test_a_worker_that_comes_and_goes_does_not_stop_plans() -> None:
    day = Day((8, 8))
    day.spend(5, load(120))
    for number in range(10):
        day.present = (8, 8 - number % 2)
        day.spend(AFTER_S / 2, load(120, prompt=3000.0))
    assert day.roles[0] > 8


def test_a_full_fleet_changes_for_less() -> None:
    day = Day((10, 10))
    day.spend(FULL_AFTER_S + 30, load(150, prompt=1150.0))
    assert day.roles == (10, 10), "6 % more are not worth a change"
    day.spend(FULL_AFTER_S - 5, load(180, prompt=1150.0))
    assert day.roles == (10, 10), "not yet"
    day.spend(10, load(180, prompt=1150.0))
    assert day.roles == (11, 9)


def test_desired_workers_grow_soon_and_shrink_late() -> None:
    day = Day()
    day.spend(1, load(16.0))
    assert day.desired == (1, 1)  # 16 is 0.8 of 20
    day.spend(AFTER_S + 1, load(64.0))
    assert day.desired == (4, 4)
    day.spend(SHRINK_S - 2, load(16.0))
    assert day.desired == (4, 4)
    day.spend(4, load(16.0))
    assert day.desired == (1, 1)
    day.spend(SHRINK_S + 2, load(0.0))
    assert sum(day.desired) <= 2


def test_a_fleet_too_small_for_first_blocks_in_time_gets_the_best_roles_without_them() -> None:
    tight = Objectives(first_block_s=0.23, gap_s=0.08)  # 150 ms and a gap of 40 ms leave 40
    assert Planner(EVEN, load(30, prompt=3000.0), tight).best(4).rate == 0
    day = Day((2, 2), tight)
    day.spend(AFTER_S + 2, load(30, prompt=3000.0))
    assert day.roles == (3, 1)
    assert any("a first block within 0.23 s" in line for line in day.plan.lines())


def test_desired_workers_are_bounded_as_prompts_come_near_to_the_objective() -> None:
    for tokens in range(1000, 6000, 50):
        needed = []
        for objectives in (Objectives(first_block_s=0.3, gap_s=0.08), GAP):
            day = Day((2, 2), objectives)
            day.spend(1, load(30, prompt=float(tokens)))
            needed.append(sum(day.desired))
        assert needed[1] <= needed[0] <= MOST_COST * needed[1]


def test_a_load_that_no_number_of_workers_sustains_gets_the_most_of_them() -> None:
    """An error would leave all models behind it without plans."""
    day = Day((2, 2))
    day.spend(AFTER_S + 2, load(1e9, prompt=3000.0))
    assert day.roles == (3, 1) and sum(day.desired) > MOST_WORKERS / 2


@pytest.mark.parametrize("rate", [16.0, 31.9, 47.9, 160.0])
def test_noise_in_a_steady_load_changes_nothing(rate: float) -> None:
    """An hour of a load that lies at a step of the plan and varies by as much as a Poisson process
    over a minute."""
    day, rng = Day((4, 4)), random.Random(7)
    day.spend(120, load(rate))
    day.changes, level = 0, rate
    for _ in range(360):
        level += 0.3 * (rate - level) + rng.gauss(0, 0.3 * (rate / 60) ** 0.5)
        day.spend(10, load(level, prompt=1000 * rng.uniform(0.97, 1.03)))
    assert day.changes <= 1


def test_other_routers_are_part_of_the_load() -> None:
    record = RouterRecord(router_id="r", address="", workloads={"fake": (5.0, 100.0, 50.0)})
    assert decode(encode(record), RouterRecord, "router record") == record
    others = {"fake": [Workload(*one) for one in record.workloads.values()]}
    now = 0.0
    steering = Steering(GAP, "auto", lambda: now, lambda model: others.get(model, []))
    one = steering.of("fake")
    for now in (number / 5 for number in range(100)):
        one.load.note_prompt(400, now)
        one.load.note_answer(50, now)
        one.measured.note_prompt("p", 400, 0, 0.01, now)
        one.measured.note_commit(1, 400, 8, 0.04)
    now += 1.0
    assert steering.look([], {})
    assert steering.workloads()["fake"].rate == pytest.approx(5.0, rel=0.1)
    assert one.planner is not None
    assert one.planner.workload.rate == pytest.approx(10.0, rel=0.1)
    assert one.planner.workload.prompt == pytest.approx(250, rel=0.1)
    assert not steering.look([], {})  # not again in the same second


def test_a_model_that_is_not_served_any_more_has_no_plan_and_no_figure() -> None:
    """Otherwise a scaler would keep a worker for it. One that is asked for may come back."""
    now, worker = 0.0, worker_record("w0", "decode")
    steering, metrics = Steering(GAP, "auto", lambda: now), RouterMetrics()
    labels = {"model_name": "fake", "worker_role": "decode"}

    def after(seconds: float, *workers: Candidate, waiting: int = 0) -> float | None:
        nonlocal now
        now += seconds
        assert steering.look(workers, {"fake": waiting})
        metrics.plans.show(steering.models)
        return metrics.value("effuse_desired_workers", labels)

    one = steering.of("fake")
    one.desired.plan = one.roles.plan = Planner(EVEN, LOAD, GAP).split(0, 1)
    ready = Candidate(worker, InFlight())
    assert after(2 * ENDED_S, ready) == 1
    assert after(ENDED_S) == 1
    assert after(1, waiting=1) == 1
    assert after(ENDED_S) == 1
    steering.of("fake")  # by a request
    assert after(ENDED_S) == 1
    assert after(1) is None
    assert not steering.models


@pytest.mark.parametrize("prefill", [0, 1])
def test_paces_and_own_prompts_are_as_workers_report_them(prefill: int) -> None:
    """Gaps count without the time that went to prompts. Those of prompts alone do not count."""

    async def body(fleet: FakeFleet) -> None:
        measured, found = fleet.router.steering.of("fake").measured, []
        for prompts_s in (60.0, 0.0):
            commit = pb.DecodeCommit(batch=8, prompts_s=prompts_s)
            fleet.decode[0].costs = commit, pb.PrefillVerified(compute_s=0.25)
            for _ in range(20):
                await ask(fleet)
            found.append({one.batch for one in measured.times(0, 0).answers})
        assert found == [set(), {8.0}]
        times = measured.times(0, 0)
        own = [one.seconds for one in times.prompts if one.seconds == 0.25]
        assert len(own) == (0 if prefill else 1)

    run(body, num_prefill=prefill, num_decode=1)


def test_a_router_plans_from_its_requests_and_shows_it() -> None:
    async def body(fleet: FakeFleet) -> None:
        stub = monitor_stub(fleet.channel)
        assert not (await stub.GetPlan(monitor_pb2.GetPlanRequest())).plans
        steering = fleet.router.steering
        steering.look(fleet.router.fleet.candidates(), {})
        for _ in range(20):
            await ask(fleet)
        await fleet.idle()
        one = steering.of("fake")
        for _ in range(20):  # the fakes answer at once, so gaps and times are too short to see
            one.measured.note_commit(2, 100, 4, 0.02)
            one.measured.note_prompt("p0", 100, 0, 0.01, fleet.router.now())
        steering._looked_at = float("-inf")
        assert steering.look(fleet.router.fleet.candidates(), {})
        fleet.router.metrics.plans.show(steering.models)
        (plan,) = (await stub.GetPlan(monitor_pb2.GetPlanRequest())).plans
        assert plan.model == "fake" and plan.mode == "auto"
        assert (plan.roles.prefill, plan.roles.decode) == (1, 2)
        assert plan.workload.rate > 0 and plan.workload.answer > 0
        assert plan.times.prompts and plan.times.answers
        assert plan.objectives.gap_ratio == 4 and not plan.objectives.HasField("gap_s")
        assert plan.desired.prefill + plan.desired.decode >= 1
        labels = {"model_name": "fake", "worker_role": "decode"}
        assert fleet.metric("effuse_planned_workers", **labels) == 2
        assert fleet.metric("effuse_desired_workers", **labels) == plan.desired.decode
        async for look in stub.WatchRequests(monitor_pb2.WatchRequestsRequest()):
            assert list(look.plan) == [f"fake: {line}" for line in plan.lines]
            break

    run(body, num_decode=2, gap_objective_ratio=4.0)


def test_prompts_can_be_cut_whatever_roles_workers_have_now() -> None:
    """Otherwise plans would depend on the roles of the moment, and never settle."""
    both, decode = worker_record("w0", "both"), worker_record("w1", "decode")
    causal = msgspec.structs.replace(both.model, prompt_attention="causal_blocks")
    for records in ([both], [decode], [both, decode], [worker_record("w2", "prefill"), both]):
        cut = [msgspec.structs.replace(one, model=causal) for one in records]
        assert _piece(cut) == 512
        assert _piece(records) == 0, "bidirectional prompts cannot"


@pytest.mark.parametrize(
    ("mode", "role", "wanted"),
    [
        ("remote", "decode", (1, 2)),
        ("remote", "both", None),
        ("remote", "prefill", (2, 1)),
        ("auto", "decode", None),
    ],
)
def test_a_kind_of_work_without_a_worker_gets_one_before_there_is_a_plan(
    mode: PrefillMode, role: Role, wanted: tuple[int, int] | None
) -> None:
    one = Steering(GAP, mode, lambda: 0.0).of("fake")
    one.records = [worker_record(f"w{number}", role) for number in range(3)]
    assert (one.due and one.due.roles) == wanted
    one.records = [worker_record("w0", "decode")]
    assert one.due is None, "it alone could not do both"


def test_a_plan_needs_measurements() -> None:
    assert ModelPlan().lines() == ["no plan yet: too few prompts or gaps have been measured"]
    assert Split(1, 2).workers == 3
    assert LOAD.context == 1064


@pytest.mark.parametrize(
    ("first", "then", "after_s"),
    [
        (Split(1, 2), Split(4, 4), AFTER_S),  # fewer workers, then more
        (Split(4, 4), Split(1, 2), SHRINK_S),
        (Split(1, 3), Split(3, 1), AFTER_S),  # other roles of as many
    ],
)
def test_a_plan_takes_over_no_time_of_one_in_the_other_direction(
    first: Split, then: Split, after_s: float
) -> None:
    held = HeldPlan(Split(2, 2))
    for now in range(round(after_s) - 1):
        held.follow(first, now, SHRINK_S)
    began = after_s - 1
    held.follow(then, began, after_s)
    held.follow(then, began + after_s - 0.1, after_s)
    assert held.plan == Split(2, 2)
    held.follow(then, began + after_s, after_s)
    assert held.plan == then


def test_a_plan_takes_over_the_time_of_others_in_its_direction() -> None:
    """A load that grows wants more workers at each look."""
    held = HeldPlan(Split(2, 2))
    for now in range(round(AFTER_S) + 1):
        held.follow(Split(2, 3 + now), now, AFTER_S)
    assert held.plan == Split(2, 3 + round(AFTER_S))
