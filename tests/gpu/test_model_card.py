"""Every row of the bundled model's card, reproduced on a GPU by the engine that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import effuse
import effuse.models
from effuse.cli.evaluate import WAYS, judge_all, table
from effuse.problems.problem import problem
from effuse.router.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BUNDLED = Path(next(iter(effuse.models.__path__))) / "bundled"
SEED, COUNT, BATCH = 1, 2000, 64


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    made = Tokenizer.load(BUNDLED)
    yield made
    made.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[effuse.LLM]:
    with effuse.LLM(device="cuda", dtype="float32", max_num_seqs=BATCH) as made:
        yield made


@pytest.mark.parametrize("way", WAYS)
def test_the_cards_row_is_what_the_device_gives(
    llm: effuse.LLM, tokenizer: Tokenizer, way: str
) -> None:
    """Figures to their last digit: exact texts, final answers, tokens a forward, worked part."""
    problems = [problem(SEED, index, "held_out") for index in range(COUNT)]
    answers = llm.generate([each.prompt for each in problems], WAYS[way])
    outcomes = judge_all(problems, answers, tokenizer)
    printed = table([(way, outcomes)]).splitlines()[1].removeprefix(way)
    assert printed.replace("%", "").split() == _row_of_the_card(way)


def _row_of_the_card(name: str) -> list[str]:
    for line in (BUNDLED / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == name:
            return [cell.removesuffix(" %") for cell in cells[1:5]]
    raise AssertionError(f"the card has no row {name!r}")
