"""Plans against measured fleets, against every possible split, and at their edges."""

from __future__ import annotations

import json
import math
import random
from operator import ge
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from effuse.benchmarks.fleet_report import GAPS
from effuse.benchmarks.xpyd_report import goodput, objectives
from effuse.router.planner import (
    AnswerPace,
    Objectives,
    Planner,
    PromptTime,
    Split,
    Times,
    Workload,
)
from effuse.router.reasons import named, reasons, sustaining

MEASURED: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "benchmarks/gpu_xpyd.json").read_text()
)
SHAPES = {"512/128": 1, "2048/128": 2, "8192/128": 3}
"""The shapes that were measured on four GPUs, and the prefill workers of the best split."""
EVEN = Times(
    prompts=(PromptTime(1000, 0.05),),  # 20 prompts a second
    answers=(AnswerPace(1, 640, 0.04), AnswerPace(8, 2560, 0.07), AnswerPace(64, 3840, 0.4)),
)  # 5, 20 and 30 answers of 128 tokens a second
LOAD = Workload(rate=20.0, prompt=1000.0, answer=128.0)


def measured_times() -> Times:
    """The times of one H200 at all shapes."""
    prompts, answers = [], []
    for shape, limits in MEASURED["limits"].items():
        prompt, answer = (int(part) for part in shape.split("/"))
        prompts.append(PromptTime(prompt, limits["prefill_s"]))
        for one in limits["decode"]:
            context, gap_s = prompt + answer / 2, one["gap_p99_s"] or 0.0
            answers.append(AnswerPace(one["batch"], one["tokens_per_s"], gap_s, context))
    return Times(tuple(prompts), tuple(answers), piece_tokens=8192)


def planner(**more: Any) -> Planner:
    given: dict[str, Any] = {"times": EVEN, "workload": LOAD, **more}
    return Planner(**given)


@pytest.mark.parametrize(("shape", "best"), SHAPES.items())
@pytest.mark.parametrize("times", GAPS)
def test_it_names_the_split_that_was_best_on_four_gpus(shape: str, best: int, times: int) -> None:
    prompt, answer = (float(part) for part in shape.split("/"))
    bounds = Objectives(first_block_s=1.0, gap_ratio=times)
    plan = Planner(measured_times(), Workload(20, prompt, answer), bounds).best(4)
    assert plan.roles == (best, 4 - best)
    wanted = objectives(MEASURED, shape)[GAPS.index(times)]
    split = [one for one in MEASURED["fleets"] if one["prefill"]]
    found = {one["prefill"]: goodput(one, shape, wanted) for one in split}
    assert max(found, key=lambda prefill: found[prefill][1]) == best, found
    assert found[best][1] == pytest.approx(plan.rate, rel=0.25)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_objectives_each_of_four_gpus_does_both(shape: str) -> None:
    prompt, answer = (float(part) for part in shape.split("/"))
    plan = Planner(measured_times(), Workload(20, prompt, answer)).best(4)
    assert plan.roles == (0, 4) and plan.share == 1.0


@pytest.mark.parametrize(
    ("prefill", "decode", "gap_s", "expected"),
    [
        (1, 3, None, 20.0),  # prefill bounds
        (3, 1, None, 30.0),  # decode bounds
        (3, 1, 0.07, 20.0),  # only the batch of 8 keeps its gaps below
        (3, 1, 0.08, 20 + 10 / 33),  # and one of 9.7, between those of 8 and 64
        (3, 1, 0.01, 0.0),  # none does
        (2, 2, 0.08, 40.0),
        (4, 0, None, 0.0),  # nothing answers
    ],
)
def test_a_split_bears_what_its_busier_role_does(
    prefill: int, decode: int, gap_s: float | None, expected: float
) -> None:
    split = planner(mode="remote", objectives=Objectives(gap_s=gap_s)).split(prefill, decode)
    assert split.rate == pytest.approx(expected)
    assert split.share == 0.0


def test_workers_that_do_both_spend_both_times_on_each_request() -> None:
    assert planner().split(0, 4).rate == pytest.approx(4 / (0.05 + 1 / 30))


def test_help_makes_a_split_bear_as_much_as_workers_that_do_both() -> None:
    split, both = planner().split(1, 3), planner().split(0, 4)
    assert split.rate == pytest.approx(both.rate)
    # 20 prompts a second are the prefill worker's, the rest are the decode workers'.
    assert split.share == pytest.approx(1 - 20 / both.rate)


def test_a_decode_worker_helps_as_far_as_gaps_have_room() -> None:
    """In batches of 8 a gap of 0.13 s has room for one piece of 50 ms: 0.05 of 0.13 seconds."""
    found = planner(objectives=Objectives(gap_s=0.13)).split(1, 8)
    assert found.batch == 8
    assert found.rate == pytest.approx(20 + 8 * 20 * 0.05 / 0.13)
    ample = planner(objectives=Objectives(gap_s=0.18)).split(1, 8)
    assert ample.rate == pytest.approx(9 / (0.05 + 1 / 20))  # as much as without a bound
    no_room = planner(objectives=Objectives(gap_s=0.085)).split(1, 8)
    assert no_room.rate == pytest.approx(20) and no_room.share == 0.0
    cut = planner(times=replace(EVEN, piece_tokens=100.0), objectives=Objectives(gap_s=0.085))
    assert cut.split(1, 8).rate > 1.5 * no_room.rate


def test_a_slow_link_bounds_prefill_workers_and_not_help() -> None:
    slow = replace(EVEN, kv_bytes_per_token=1e5, link_bytes_per_second=2e8)  # 0.5 s a prompt
    assert planner(times=slow, mode="remote").split(1, 3).rate == pytest.approx(2.0)
    assert planner(times=slow).split(0, 4).rate == planner().split(0, 4).rate
    assert planner(times=slow).best(4).prefill == 0


def test_a_first_block_in_time_needs_idle_prefill_workers() -> None:
    strict = planner(objectives=Objectives(first_block_s=0.3, gap_s=0.08), mode="remote")
    loose = planner(objectives=Objectives(first_block_s=3.0, gap_s=0.08), mode="remote")
    assert 0.5 * 20 < strict.split(1, 3).rate < 0.8 * 20 < 0.95 * 20 < loose.split(1, 3).rate < 20
    # Several workers wait for each other's ends less often.
    assert strict.split(8, 24).rate > 8 * 0.94 * 20


@pytest.mark.parametrize("seed", range(40))
def test_no_other_split_bears_more_and_no_fewer_workers_suffice(seed: int) -> None:
    rng = random.Random(seed)
    times = Times(
        tuple(PromptTime(tokens, tokens * rng.uniform(1e-5, 1e-4)) for tokens in (500, 5000)),
        tuple(
            AnswerPace(
                batch, batch * 700 / (1 + batch * rng.uniform(0.02, 0.2)), 0.04 + 0.005 * batch
            )
            for batch in (1, 4, 16, 64)
        ),
        piece_tokens=rng.choice([0.0, 512.0]),
    )
    plans = Planner(
        times,
        Workload(rng.uniform(1, 200), rng.uniform(100, 9000), rng.uniform(16, 1000)),
        Objectives(rng.choice([None, 1.0]), rng.choice([None, 0.1, 0.2]), rng.choice([None, 3.0])),
        rng.choice(["auto", "remote", "local"]),
    ).within_reach()
    for workers in (2, 3, 5, 8, 40):
        least = 1 if plans.mode == "remote" else 0
        most = workers if plans.mode != "local" else 1
        every = [plans.split(prefill, workers - prefill) for prefill in range(least, most)]
        assert plans.best(workers).rate >= 0.99 * max(one.rate for one in every)
        fixed = rng.randint(0, workers - 1), rng.randint(0, 1)
        some = [one for one in every if all(map(ge, one.roles, fixed))]
        if some and plans.mode != "local":
            found = plans.best(workers, fixed=fixed)
            assert all(map(ge, found.roles, fixed))
            assert found.rate >= 0.99 * max(one.rate for one in some)
    needed = plans.least(rate := plans.workload.rate)
    assert needed.rate >= rate
    assert plans.best(needed.workers - 1).rate < rate if needed.workers > 1 else True


def test_objectives_that_nothing_keeps_are_left_out_and_named() -> None:
    asked = planner(objectives=Objectives(first_block_s=1.0, gap_s=0.02))
    kept = asked.within_reach()
    assert kept.objectives == Objectives(first_block_s=1.0)
    lines = reasons(asked, kept.best(4))
    assert "left out, because 4 workers that do both cannot meet it: gaps within 0.02 s" in lines
    neither = planner(objectives=Objectives(first_block_s=0.01, gap_s=0.02))
    assert neither.within_reach().objectives == Objectives()
    local = planner(objectives=Objectives(gap_s=0.08), mode="local")  # gaps have no room at all
    assert local.within_reach().objectives == Objectives()
    remote = planner(objectives=Objectives(gap_s=0.02), mode="remote")
    assert remote.best(4).rate == 0 and remote.best(1).roles == (0, 1)
    assert remote.within_reach().objectives == Objectives()
    assert remote.within_reach().best(4).rate > 0


def test_a_gap_that_was_too_short_to_measure_leaves_no_room_for_prompts() -> None:
    instant = replace(EVEN, answers=(replace(EVEN.answers[0], gap_s=0.0), *EVEN.answers[1:]))
    asked = planner(times=instant, objectives=Objectives(gap_ratio=2.0))
    assert asked.best(4).share == 0.0


def test_reasons_have_load_times_bounds_and_the_result() -> None:
    bounds = planner(objectives=Objectives(gap_s=0.08))
    assert reasons(bounds, bounds.best(4)) == [
        "load: 20 requests a second with prompts of 1,000 tokens and answers of 128",
        "a worker computes a prompt in 50 ms: 20 a second",
        "a decode worker answers 20 requests a second in batches of 8, with gaps of 70 ms, "
        "within 80 ms",
        "decode workers compute no prompts, because 50 ms in one forward would lengthen gaps too "
        "much",
        "2 prefill and 2 decode workers sustain 40 requests a second",
    ]
    assert "decode workers compute 58% of the prompts" in reasons(planner(), planner().split(1, 3))


def test_one_worker_is_singular_and_numbers_are_written_out() -> None:
    assert named(Split(0, 1)) == "1 worker that does both"
    assert named(Split(1, 3)) == "1 prefill worker and 3 decode workers"
    alone = Split(0, 1, rate=44_321.0)
    assert sustaining(alone) == "1 worker that does both sustains 44,300 requests a second"
    instant = replace(EVEN, prompts=(PromptTime(1000, 0.0000225),))
    lines = reasons(quick := planner(times=instant), quick.best(4))
    assert "a worker computes a prompt in 0.0225 ms: 44,400 a second" in lines


def test_times_are_linear_between_lengths_and_contexts() -> None:
    times = Times(
        (PromptTime(1000, 0.1), PromptTime(3000, 0.5)),
        (AnswerPace(8, 1000, 0.1, 1000), AnswerPace(8, 600, 0.3, 3000)),
    )
    assert [times.prompt_s(n) for n in (500, 1000, 2000, 5000)] == pytest.approx(
        [0.05, 0.1, 0.3, 0.9]
    )
    (between,) = times.paces(2000)
    assert (between.tokens_per_second, between.gap_s) == pytest.approx((800, 0.2))
    assert [times.paces(n)[0].tokens_per_second for n in (1, 9000)] == [1000, 600]


def test_a_rate_that_no_number_bears_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 1,048,576 workers"):
        planner().least(math.inf)
    with pytest.raises(ValueError, match="no number of workers meets"):
        planner(objectives=Objectives(gap_s=0.02)).least(1.0)


def test_a_plan_for_ten_thousand_workers_is_found_in_few_splits() -> None:
    found = planner(objectives=Objectives(gap_s=0.08)).least(100_000.0)
    assert found.roles == (5000, 4926)
    assert isinstance(found, Split)
