"""Groups of GPUs: right answers as on one GPU, with graphs and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expert_checkpoints import write_expert_checkpoint

import effuse
from effuse.problems.problem import check, problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "max_model_len": 256,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "num_pages": 512,
}
NUM_PROBLEMS = 40


def num_right(**options: Any) -> int:
    problems = [problem(5, number) for number in range(NUM_PROBLEMS)]
    with effuse.LLM(**OPTIONS, **options) as llm:
        answers = llm.generate([one.prompt for one in problems], effuse.Params(max_tokens=96))
    return sum(check(one, answer.text).final for one, answer in zip(problems, answers, strict=True))


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_a_group_is_as_often_right_as_one_gpu(size: int, enforce_eager: bool) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"fewer than {size} CUDA devices")
    expected = num_right()
    found = num_right(tensor_parallel_size=size, enforce_eager=enforce_eager)
    assert abs(found - expected) <= 4


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize(("size", "cut"), [(2, 2), (4, 2), (4, 4)])
def test_a_group_that_cuts_the_context_is_as_often_right_as_one_gpu(
    size: int, cut: int, enforce_eager: bool
) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"fewer than {size} CUDA devices")
    options: dict[str, Any] = {"enforce_eager": enforce_eager, "page_size": 16}
    expected = num_right(**options)
    found = num_right(tensor_parallel_size=size, decode_context_parallel_size=cut, **options)
    assert abs(found - expected) <= 4


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_stages_give_the_same_tokens_in_fp32(*, enforce_eager: bool) -> None:
    """Answers with log-probabilities among them, whose ends come while others are under way."""
    params = [
        effuse.Params(
            max_tokens=64, seed=number, temperature=number % 2, logprobs=number % 3 or None
        )
        for number in range(NUM_PROBLEMS)
    ]
    prompts = [problem(5, number).prompt for number in range(NUM_PROBLEMS)]
    found = []
    staged: dict[str, Any] = {"pipeline_parallel_size": 2, "enforce_eager": enforce_eager}
    for options in ({}, staged):
        with effuse.LLM(dtype="float32", **OPTIONS, **options) as llm:
            answers = llm.generate(prompts, params)
        found.append([answer.token_ids for answer in answers])
    assert found[0] == found[1]


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize(
    "group",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "expert_parallel": True},
        {"data_parallel_size": 2},
    ],
    ids=str,
)
def test_experts_of_a_group_give_the_same_tokens_in_fp32(
    tmp_path: Path, group: dict[str, Any], enforce_eager: bool
) -> None:
    path = write_expert_checkpoint(tmp_path, "llada2_moe", 5, head_dim=32)
    params = effuse.Params(max_tokens=24, ignore_eos=True)
    prompts = ["abcd", "abcd" * 9, "e", "fg" * 7, "hijk"]  # more on one replica than on the other
    tokens = []
    for options in ({}, {**group, "enforce_eager": enforce_eager}):
        with effuse.LLM(path, dtype="float32", **OPTIONS, **options) as llm:
            answers = llm.generate(prompts, params)
        tokens.append([answer.token_ids for answer in answers])
    assert tokens[0] == tokens[1]
