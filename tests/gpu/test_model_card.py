"""Every row of the bundled model's card, reproduced on a GPU by the engine that serves it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import effuse.models
from effuse.cli.evaluate import WAYS, Way, answer_all
from effuse.cli.scores import judge, table
from effuse.models.transformer import Transformer
from effuse.models.weights import load_model
from effuse.problems.problem import Problem, problem
from effuse.router.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BUNDLED = Path(next(iter(effuse.models.__path__))) / "bundled"
SEED, COUNT, BATCH = 1, 2000, 64


@dataclass(frozen=True, slots=True)
class Given:
    """What all rows share."""

    model: Transformer
    tokenizer: Tokenizer
    problems: list[Problem]
    prompts: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def given() -> Given:
    tokenizer = Tokenizer.load(BUNDLED)
    problems = [problem(SEED, index, "held_out") for index in range(COUNT)]

    async def encode() -> list[tuple[int, ...]]:
        return [tuple(await tokenizer.encode(each.prompt)) for each in problems]

    return Given(load_model(BUNDLED, device="cuda"), tokenizer, problems, asyncio.run(encode()))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_the_cards_row_is_what_the_device_gives(given: Given, way: Way) -> None:
    """Figures to their last digit: exact texts, final answers, tokens a forward, worked part."""
    answers = answer_all(given.model, given.prompts, way, BATCH, lambda: None)
    outcomes = [
        judge(each, answer.token_ids, answer.commits, answer.forward_passes, given.tokenizer.decode)
        for each, answer in zip(given.problems, answers, strict=True)
    ]
    printed = table([(way.name, outcomes)]).splitlines()[1].removeprefix(way.name)
    assert printed.replace("%", "").split() == _row_of_the_card(way.name)


def _row_of_the_card(name: str) -> list[str]:
    for line in (BUNDLED / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == name:
            return [cell.removesuffix(" %") for cell in cells[1:5]]
    raise AssertionError(f"the card has no row {name!r}")
