"""The benchmark of groups of GPUs on tiny models, whose ranks are threads on the CPU."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch
from thread_group import run_ranks

from effuse.benchmarks import gpu_long_prompts, gpu_ranks
from effuse.benchmarks.gpu_long_context import lines
from effuse.benchmarks.gpu_long_prompts import PromptResult
from effuse.benchmarks.gpu_ranks import Result, measure, table, waves
from effuse.benchmarks.gpu_ranks_floor import Silent
from effuse.benchmarks.gpu_step import PAGE_SIZE
from effuse.models.group import RankPlace

CPU = torch.device("cpu")


def asked(model: str, **options: object) -> argparse.Namespace:
    return argparse.Namespace(
        **{"model": model, "batch": [1], "context": 64, "prefill": [], "long": [], **options}
    )


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(gpu_ranks, "BATCHES", ((1, 4, 2), (8, 1, 1)))
    # The profiler is global to the process.
    monkeypatch.setattr(gpu_ranks, "kernel_classes", lambda run, repeats: [run(), []][1])


def measured(size: int, options: argparse.Namespace, context_degree: int = 1) -> list[list[Result]]:
    def of_rank(place: RankPlace) -> list[Result]:
        results: list[Result] = []
        measure(options, place, CPU, results.append)
        return results

    experts = options.model == "tiny-experts"
    return run_ranks(
        size,
        of_rank,
        expert_parallel=experts and size > 1,
        context_degree=context_degree,
        page_size=PAGE_SIZE,
    )


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_measure_steps_and_prompts_in_lockstep(size: int) -> None:
    found = measured(size, asked("tiny", prefill=[96]))
    for step, prompt in found:
        assert (step.what, step.degree, step.rows > 0, step.bare_ms is None) == (
            "step",
            size,
            True,
            False,
        )
        assert (prompt.what, prompt.rows) == ("prefill", 96)
        assert ("nccl" in step.bare_by) == (size > 1)
    assert len({step.rows for step, _ in found}) == 1


def test_ranks_that_cut_the_context_are_compared_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_ranks, "LONG_STEPS", 2)
    options = asked("tiny", long=[(2, 64)])
    ((one,),), ((cut,), *_) = measured(1, options), measured(4, options, context_degree=2)
    assert (cut.context_parallel, one.context_parallel) == (2, 1)
    assert one.kv_bytes == 4 * cut.kv_bytes > 0
    assert cut.rows == one.rows
    found = [replace(each, model="fast-dllm-1.5b", ms=ms) for each, ms in ((one, 4), (cut, 2))]
    (told,) = lines(found)
    assert "DCP 2, 2 x 64: 2.00x" in told and "KV 0.250 of one GPU's" in told


def test_prompts_that_ranks_cut_are_compared_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_long_prompts, "kernel_classes", lambda run, repeats: [run(), []][1])
    options = argparse.Namespace(model="tiny", length=[160], chunk=64)

    def of_rank(place: RankPlace) -> list[PromptResult]:
        results: list[PromptResult] = []
        gpu_long_prompts.measure(options, place, CPU, results.append)
        return results

    ((one,),) = run_ranks(1, of_rank)
    (cut,), _ = run_ranks(2, of_rank, context_degree=2, page_size=PAGE_SIZE, cuts_rows=True)
    assert (one.degree, cut.degree, one.length) == (1, 2, 160)
    assert one.kv_bytes * 6 == cut.kv_bytes * 10 > 0  # three pages of two ranks hold five
    found = [replace(each, ms=ms) for each, ms in ((one, 36), (cut, 20))]
    (told,) = gpu_long_prompts.lines(found)
    assert "prompt of 160 over 2" in told and ": 0.900 of 2x" in told and "MISSED" not in told


@pytest.mark.parametrize("size", [1, 2])
def test_steps_of_experts_have_a_limit_by_bytes(size: int) -> None:
    (first,), *_ = found = measured(size, asked("tiny-experts"))
    assert len(found) == size
    assert first.bytes_ms is not None and first.bytes_ms > 0


def test_a_silent_group_gives_the_right_shapes() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert Silent(2).gather(x, [3, 3]).shape == (2, 6)
    assert Silent(2).gather(x, [4, 3]).shape == (2, 7)


def test_degrees_run_side_by_side_if_there_are_enough_gpus() -> None:
    assert waves([1, 2, 4], 4) == [[1, 2], [4]]
    assert waves([1, 2, 4], 1) == [[1], [2], [4]]


def test_the_table_compares_with_one_gpu() -> None:
    one = Result(
        model="m", degree=1, what="step", batch=1, context=64, rows=1, ms=6.0, silent_ms=6.0
    )
    two = Result(
        model="m", degree=2, what="step", batch=1, context=64, rows=1, ms=4.0, silent_ms=3.0
    )
    assert " 1.500 " in table([one, two]).splitlines()[2]
