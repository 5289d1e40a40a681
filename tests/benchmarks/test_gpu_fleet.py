"""The fleet benchmark on a tiny model and the CPU: that it counts what happened, and rightly."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import fields, replace
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from effuse.benchmarks import fleet_report
from effuse.benchmarks.fleet_figures import decoding, figures, links
from effuse.benchmarks.fleet_load import (
    TOKENS_A_FORWARD,
    Client,
    Shape,
    Steady,
    Taken,
    Window,
    arrivals,
)
from effuse.benchmarks.fleet_plans import colocated, split
from effuse.benchmarks.fleet_report import GAPS, Objectives, objectives, plot, report
from effuse.benchmarks.fleet_runs import Loads, Outcome, run
from effuse.benchmarks.gpu_alone import Alone
from effuse.benchmarks.gpu_load import ClosedLoad, requests
from effuse.benchmarks.gpu_models import TINY
from effuse.benchmarks.random_checkpoint import word, write_checkpoint
from effuse.models.weights import load_model
from effuse.router.tokenizer import Tokenizer

if TYPE_CHECKING:
    from effuse.decode_worker.engine import DecodeEngine
    from effuse.v1.generation_pb2_grpc import GenerationServiceAsyncStub

CPU = torch.device("cpu")
SHAPE = Shape(40, 96)
# A block of the tiny model takes 20 ms: eight of them are less than a busy machine may hold one
# request's prefill up.
STEADY = Steady(prompt=40, at_once=3, first=1, last=3, spare=80)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), TINY, CPU, torch.float32)


@pytest.fixture(scope="module")
def outcomes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    loads = Loads(
        alone=[SHAPE],
        alone_count=3,
        closed=[(SHAPE, 3)],
        steady=[STEADY],
        arriving=[(SHAPE, 8.0)],
        warm_s=0.3,
        seconds=1.0,
    )
    variants = [split(64, 4), replace(colocated(64, 4), decode=1)]
    logs = tmp_path_factory.mktemp("logs")
    return [
        run(one, loads, model=checkpoint, config=TINY, gpus=[], log_dir=logs) for one in variants
    ]


def test_the_checkpoint_loads_as_the_shape_that_it_was_made_in(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    assert model.config == TINY
    assert not model.weights.head[[TINY.mask_token_id, *TINY.eos_token_ids]].any()
    assert 0.01 < model.weights.layers[0].qkv.std() < 0.03


def test_a_word_of_a_prompt_is_a_token(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    ids = [0, 7, 89, 92, 95]
    text = " ".join(word(i) for i in ids)
    assert asyncio.run(tokenizer.encode(text)) == ids
    assert tokenizer.decode(ids) == text
    tokenizer.close()


def test_only_shapes_of_dream_and_sdar_are_written(tmp_path: Path) -> None:
    sdar = replace(TINY, architecture="sdar", qkv_bias=False, qk_norm=True)
    assert load_model(write_checkpoint(tmp_path, sdar, CPU, torch.float32)).config == sdar
    with pytest.raises(ValueError, match="'llada'"):
        write_checkpoint(tmp_path, replace(TINY, architecture="llada"), CPU, torch.float32)


def test_every_request_writes_as_many_tokens_a_forward(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        everyone = outcome.everyone()
        assert not [one.failure for one in everyone if one.failure]
        for one in everyone:
            assert sum(one.sizes) == one.shape.answer
            # The last forward of a block is its next one's first.
            assert one.forwards * TOKENS_A_FORWARD >= one.shape.answer
            assert one.sent < one.blocks[0] <= one.blocks[-1] <= one.ended
        assert len(outcome.alone[str(SHAPE)]) == 3


def test_only_what_was_split_was_handed_over(outcomes: list[Outcome]) -> None:
    ours, theirs = (one.everyone() for one in outcomes)
    assert all(one.kv_bytes and one.handoff_s and one.prefill_worker for one in ours)
    assert not any(one.kv_bytes or one.prefill_worker for one in theirs)
    assert list(links(ours)) == ["prefill-0 to decode-0"]
    assert not links(theirs)


def test_a_run_becomes_tables_and_a_plot(outcomes: list[Outcome], tmp_path: Path) -> None:
    ours, theirs = (one.rows() for one in outcomes)
    content = _content(ours, theirs)
    text = report(json.loads(json.dumps(content), parse_constant=lambda _: None))
    rate = ours["closed"][0]["tokens_per_s"]
    assert f"| {SHAPE} x 3 | {rate:.0f} | 640 | {rate / 640:.2f} |" in text
    assert f"| {STEADY} | " in text and "| 2.000 | 1.000, 2.000, 4.000 |" in text
    phases = ", ".join(f"{one['phases']}/2" for one in ours["steady"][str(STEADY)])
    assert f"| {phases} |" in text
    assert f"| {SHAPE} x 3 | {rate:.0f} | 640 |" in report(content | {"colocated": []})
    plot(content, tmp_path / "x.svg")
    assert "1P1D over nixl" in (tmp_path / "x.svg").read_text()


def _content(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    alone = {"tokens_per_s": 9000.0, "gap_p50_s": 0.01, "gap_p99_s": 0.02}
    paces = [one["step_s"] for one in ours["steady"][str(STEADY)]]
    ratios = zip(paces, (1, 2, 4), strict=True)
    steady = [{"step_s": pace / ratio, "phases": 2} for pace, ratio in ratios]
    return {
        "served": str(SHAPE),
        "split": [ours],
        "colocated": [theirs],
        "limits": {
            "prefill": {"40": 0.15},  # 96 tokens each
            "decode": [{"shape": str(SHAPE), "at_once": 3, **alone}],
            "steady": {str(STEADY): steady},
            "arrivals": {"with": 0.002, "without": 0.001, "handoff_p50_s": 0.001},
        },
        "handoffs": [],
        "peer_copy_gigabytes_per_s": 0.0,
    }


def test_arrivals_are_the_same_for_every_fleet_and_as_many_as_asked_for() -> None:
    drawn = list(arrivals(50.0, 100.0, seed=3))
    assert drawn == list(arrivals(50.0, 100.0, seed=3)) != list(arrivals(50.0, 100.0, seed=4))
    assert drawn == sorted(drawn) and 4700 < len(drawn) < 5300
    gaps = [after - before for before, after in pairwise(drawn)]
    assert statistics.pstdev(gaps) == pytest.approx(1 / 50, rel=0.1)


def test_a_steady_load_counts_from_one_block_of_each_to_another() -> None:
    load = Steady(prompt=8, at_once=2, first=1, last=3)
    # 8 forwards a block of 32: the first request takes 10 ms each, the second 20.
    blocks = [[0.0, 0.08, 0.16, 0.24, 0.9], [1.0, 1.16, 1.32, 1.48]]
    pace = load.pace(blocks, 32)
    assert pace.step_s == pytest.approx(0.015)
    assert (pace.begin, pace.end) == (1.16, 0.24)
    assert pace.lags == [0, 72] and pace.phases == 1  # 1.08 s, which are nine blocks
    assert load.pace([blocks[0], [at + 0.02 for at in blocks[1]]], 32).phases == 2
    assert load.shape(32).answer > 3 * 32


class _Counting:
    """An engine that serves no request to its end, and records in which step each began."""

    def __init__(self) -> None:
        self.steps, self.begun = 0, list[int]()

    def handle(self, _message: object) -> None:
        self.begun.append(self.steps)

    def step(self) -> bool:
        self.steps += 1
        return True

    def outbox(self) -> list[object]:
        return []


def test_requests_begin_as_many_steps_behind_the_first_as_they_are_told() -> None:
    engine = _Counting()
    load = ClosedLoad(cast("DecodeEngine", engine), requests(TINY, [8] * 4, 1, 32), most=0)
    load.begin([5, 0, 2, 0])
    assert engine.begun == [0, 0, 2, 5] and engine.steps == 6


class _Short(Client):
    """Every request ends after its first block."""

    async def ask(self, shape: Shape, into: list[Taken] | None = None) -> Taken:
        assert into is not None
        into.append(Taken(shape, time.monotonic(), [time.monotonic()], [32], failure="INTERNAL"))
        return into[-1]


def test_a_steady_load_of_which_one_ends_is_none() -> None:
    client = _Short(cast("GenerationServiceAsyncStub", None), 10, 32)
    with pytest.raises(RuntimeError, match=r"ended early.*INTERNAL"):
        asyncio.run(client.steady(Steady(8, 2, 1, 3)))


def _taken(sent: float, blocks: list[float], failure: str = "") -> Taken:
    return Taken(SHAPE, sent, blocks, [32] * len(blocks), blocks[-1] if blocks else 0, failure)


def test_a_window_counts_tokens_that_came_in_it_and_requests_that_began_in_it() -> None:
    window = Window(
        [
            _taken(0.0, [0.5, 1.5, 2.5]),  # before it; two of its blocks come inside
            _taken(1.0, [1.4, 1.8, 3.5]),
            _taken(1.5, [], "UNAVAILABLE: x"),
            _taken(3.2, [3.4]),
        ],
        begin=1.0,
        end=3.0,
    )
    found = figures(window)
    assert (found.requests, found.failed, found.failures) == (2, 1, ("UNAVAILABLE: x",))
    assert found.tokens_per_s == 4 * 32 / 2
    assert found.first_p50_s == pytest.approx(0.4)
    assert found.gap_p50_s == pytest.approx(1.0) and found.gap_p99_s == pytest.approx(1.0)
    # The first decodes from the window's begin to 2.5, the second from one gap before 1.4 on.
    assert decoding(window) == pytest.approx((1.5 + 2.0) / 2)


class _Sleeping(Client):
    """Takes a millisecond for each token, without calling anything."""

    async def ask(self, shape: Shape, into: list[Taken] | None = None) -> Taken:
        taken = Taken(shape, time.monotonic())
        assert into is not None
        into.append(taken)
        await asyncio.sleep(shape.answer / 1000)
        taken.ended = time.monotonic()
        return taken


def test_a_window_begins_once_all_first_answers_are_over() -> None:
    client = _Sleeping(cast("GenerationServiceAsyncStub", None), 10, 32)
    window = asyncio.run(client.closed(Shape(8, 200), 4, 0.01, 0.1))
    shorter = [one.ended for one in window.requests if one.shape.answer < 200]
    assert len(shorter) == 3 and max(shorter) <= window.begin
    assert window.seconds == pytest.approx(0.1)
    assert any(window.begin <= one.ended < window.end for one in window.requests)


@pytest.mark.parametrize(
    ("request_", "meets"),
    [
        ({"first_s": 0.9, "gaps": [0.1, 0.2], "failure": ""}, True),
        ({"first_s": 0.9, "gaps": [], "failure": ""}, True),
        ({"first_s": 1.1, "gaps": [0.1], "failure": ""}, False),
        ({"first_s": 0.9, "gaps": [0.1, 0.21], "failure": ""}, False),
        ({"first_s": 0.9, "gaps": [0.1] * 99 + [9.0], "failure": ""}, False),
        ({"first_s": 0.9, "gaps": [0.1], "failure": "INTERNAL"}, False),
        ({"first_s": None, "gaps": [], "failure": ""}, False),
    ],
)
def test_objectives(request_: dict[str, Any], meets: bool) -> None:
    assert Objectives(1.0, 0.2).met_by(request_) is meets


def test_one_gap_is_shared_by_both_kinds_of_fleet() -> None:
    def fleet(gap: float) -> dict[str, Any]:
        return {"alone": {str(SHAPE): [{"gaps": [gap, gap, 9.0]}]}}

    content = {"served": str(SHAPE), "split": [fleet(0.03)], "colocated": [fleet(0.02)]}
    assert [one.gap_s for one in objectives(content)] == [0.02 * times for times in GAPS]
    assert {one.first_block_s for one in objectives(content)} == {fleet_report.FIRST_S}


def test_who_is_measured_alone_takes_all_that_a_steady_load_has() -> None:
    """They are sent to another process by their names."""
    taken = signature(Alone._steady).parameters.keys() - {"self", "lags"}
    assert taken == {field.name for field in fields(Steady)}
