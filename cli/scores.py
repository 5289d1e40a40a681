"""Quality of answers to generated problems, and their tokens per forward: pure arithmetic.

Only tokens before the end-of-sequence id count. The *worked part* of an answer is everything before
the line with the final answer; its forwards are those until all of it was final.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from effuse.problems.problem import ANSWER_PREFIX, Problem, check

_Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one problem."""

    exact: bool  # the whole text is right
    final: bool  # the final answer is right
    tokens: int
    forwards: int
    worked_tokens: int
    worked_forwards: int


def judge(
    asked: Problem,
    token_ids: Sequence[int],
    commits: Sequence[tuple[int, int]],
    forwards: int,
    decode: Callable[[Sequence[int]], str],
) -> Outcome:
    """Compare an answer with the right one; `commits` are (tokens, forwards) so far, ascending."""
    text = decode(token_ids)
    verdict = check(asked, text)
    worked = worked_tokens(text, token_ids, decode)
    return Outcome(
        exact=verdict.exact,
        final=verdict.final,
        tokens=len(token_ids),
        forwards=forwards,
        worked_tokens=worked,
        worked_forwards=next((done for tokens, done in commits if tokens >= worked), forwards),
    )


def worked_tokens(
    text: str, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> int:
    """Tokens of the text before the last line that gives the final answer."""
    start = f"\n{text}".rfind(f"\n{ANSWER_PREFIX}")
    if start < 0:
        return len(token_ids)
    lengths = range(len(token_ids) + 1)
    return bisect_left(lengths, start, key=lambda tokens: len(decode(token_ids[:tokens])))


def table(rows: Sequence[tuple[str, Sequence[Outcome]]]) -> str:
    """One line for each way of decoding; differences are to the first, in points of exact match."""
    head = (
        f"{'':<24}{'whole text':>12}{'final answer':>14}{'tokens/forward':>16}"
        f"{'worked part':>13}{'difference, 95 % interval':>28}"
    )
    lines = [_line(name, outcomes, rows[0][1]) for name, outcomes in rows]
    return "\n".join([head, *lines])


def paired_difference(
    outcomes: Sequence[Outcome], base: Sequence[Outcome]
) -> tuple[float, float, float]:
    """Mean difference in exact match to `base` and its 95 % interval, in points."""
    gains = [100.0 * (ours.exact - its.exact) for ours, its in zip(outcomes, base, strict=True)]
    mean = fmean(gains)
    half = _Z95 * stdev(gains) / math.sqrt(len(gains))
    return mean, mean - half, mean + half


def _line(name: str, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> str:
    exact = 100 * fmean(each.exact for each in outcomes)
    final = 100 * fmean(each.final for each in outcomes)
    rate = sum(each.tokens for each in outcomes) / sum(each.forwards for each in outcomes)
    worked = sum(each.worked_tokens for each in outcomes)
    worked_rate = worked / max(1, sum(each.worked_forwards for each in outcomes))
    line = f"{name:<24}{exact:>10.2f} %{final:>12.2f} %{rate:>16.2f}{worked_rate:>13.2f}"
    if outcomes is base:
        return line
    mean, low, high = paired_difference(outcomes, base)
    return line + f"{f'{mean:+.2f} [{low:+.2f}, {high:+.2f}]':>28}"
