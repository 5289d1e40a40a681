"""Generated problems with one right answer each: word problems, arithmetic, lists.

`problem(seed, index)` is a pure function. A hash of the prompt decides on which side of the split
a problem lies, so problems for evaluation never occur in training whatever the seeds.
No tokens and no tensors here; the language lives in `scenes.py` and `frames.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from effuse.problems.lists import list_task
from effuse.problems.stories import Task, arithmetic, chain, compare, products

Split = Literal["train", "held_out"]

HELD_OUT_ONE_IN = 64
ANSWER_PREFIX = "answer: "

_FAMILIES: tuple[Callable[[random.Random], Task], ...] = (
    chain,
    compare,
    products,
    arithmetic,
    list_task,
)
_FAMILY_WEIGHTS = (44, 14, 12, 12, 20)


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt, its one right answer (worked steps, then `answer: ...`) and its origin."""

    prompt: str
    answer: str
    kind: str
    phrasing: str
    steps: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a generated text equals the answer, and whether its last line does."""

    exact: bool
    final: bool


def problem(seed: int, index: int, split: Split = "train") -> Problem:
    """Problem `index` of the stream `seed`, drawn again until its prompt is in `split`."""
    if seed < 0 or index < 0:
        raise ValueError(f"expected a seed and an index of 0 or more, got {seed} and {index}")
    rng = random.Random(f"{split}/{seed}/{index}")
    while True:
        drawn = _draw(rng)
        if is_held_out(drawn.prompt) == (split == "held_out"):
            return drawn


def prompt_hash(prompt: str) -> int:
    """64-bit BLAKE2b hash of the prompt's UTF-8 bytes."""
    return int.from_bytes(blake2b(prompt.encode(), digest_size=8).digest(), "big")


def is_held_out(prompt: str) -> bool:
    """True for one prompt in 64: those are never trained on."""
    return prompt_hash(prompt) % HELD_OUT_ONE_IN == 0


def final_answer(text: str) -> str | None:
    """The text after `answer: ` on the last line that begins with it, or None."""
    lines = [line for line in text.splitlines() if line.startswith(ANSWER_PREFIX)]
    return lines[-1].removeprefix(ANSWER_PREFIX).strip() if lines else None


def check(expected: Problem, text: str) -> Verdict:
    """Compare a generated text with the right answer: whole text, and final answer only."""
    return Verdict(
        exact=text == expected.answer,
        final=final_answer(text) == final_answer(expected.answer),
    )


def _draw(rng: random.Random) -> Problem:
    task = rng.choices(_FAMILIES, _FAMILY_WEIGHTS)[0](rng)
    return Problem(
        prompt=task.prompt,
        answer="\n".join((*task.lines, ANSWER_PREFIX + task.result)),
        kind=task.kind,
        phrasing=task.phrasing,
        steps=task.steps,
    )
