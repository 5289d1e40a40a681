"""The bundled model through separate processes: the oracle's tokens, and right answers as text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from e2e.client import all_at_once, connect, load_of
from e2e.comparison import MARGIN, Pair, compare, margin, settings_of
from e2e.workload import Job
from oracle.decode import decode_with
from oracle.forward import load_raw
from tokenizers import Tokenizer

import effuse.models
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.problems.problem import Problem, problem
from effuse.v1 import generation_pb2 as pb

CONCURRENT = 12
DRAWN = 16
ON_CPU = ("--device", "cpu")
BUNDLED = Path(next(iter(effuse.models.__path__))) / "bundled"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """With so few pages that requests are preempted."""
    config = FleetConfig(
        connector="nixl",
        worker_flags=ON_CPU,
        decode_flags=("--num-pages", "22"),
        router_flags=("--prefill", "remote"),
        has_secret=False,  # its workers are asked, too
    )
    with Fleet(config) as running:
        yield running


@cache
def solid_jobs(algorithm: str) -> list[Pair]:
    """Problems with the oracle's answers, which hang on no rounding."""
    raw = load_raw(BUNDLED)
    problems = [problem(2, number, "held_out") for number in range(DRAWN)]
    jobs = [_job(each, algorithm, number) for number, each in enumerate(problems)]
    pairs = [(job, decode_with(raw, job.prompt, settings_of(job))) for job in jobs]
    solid = [(job, answer) for job, answer in pairs if margin(job, answer) > MARGIN]
    assert len(solid) >= CONCURRENT
    return solid


def test_many_problems_at_once(fleet: Fleet) -> None:
    for algorithm in ("d2f", "block_diffusion"):
        solid = 2 * solid_jobs(algorithm)  # by themselves, some runs preempt none
        with connect(fleet.address) as client:
            answers = all_at_once(
                lambda job: client.generate(job.message()), [job for job, _ in solid]
            )
        compare(solid, answers)
        assert all(answer.stats.connector == "nixl" for answer in answers)
        assert sum(answer.stats.kv_bytes for answer in answers) > 0
    assert load_of(fleet.address_of("decode-0")).preemptions > 0


def test_text_in_right_answers_out(fleet: Fleet) -> None:
    problems = [problem(4, number, "held_out") for number in range(CONCURRENT)]
    with connect(fleet.address) as client:
        answers = all_at_once(
            lambda each: client.generate(pb.GenerateRequest(prompt=each.prompt)), problems
        )
    right = sum(
        answer.text.strip() == each.answer.strip()
        for each, answer in zip(problems, answers, strict=True)
    )
    assert right >= CONCURRENT - 2, f"{right} of {CONCURRENT} are right word for word"


def _job(each: Problem, algorithm: str, number: int) -> Job:
    ids = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode(each.prompt).ids
    return Job(
        prompt=tuple(ids),
        max_tokens=40 + 10 * number,
        algorithm=algorithm,
        window=1 + number % 4,
        confidence_threshold=(0.9, 0.8)[number % 2],
        denoising_steps=16,
    )
