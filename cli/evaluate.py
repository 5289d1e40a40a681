"""`effuse eval`: the model card's table, on problems that training never used.

Accuracy of the bundled model with five ways of decoding, in the engine that serves it, with tokens
per forward. Only tokens before the end-of-sequence id count. The *worked part* of an answer is
everything before the line with the final answer; its forwards are those until all of it was final.
"""

import argparse
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Final, get_args

from rich.console import Console
from rich.progress import Progress

from effuse.cli.arguments import command, directory, whole
from effuse.client.answer import Answer
from effuse.client.params import Params
from effuse.config.flags import BadInput
from effuse.problems.problem import ANSWER_PREFIX, Problem, check, problem
from effuse.router.tokenizer import Tokenizer, TokenizerError, bundled_directory
from effuse.worker.engine_settings import Dtype

_DTYPES = tuple(one for one in get_args(Dtype) if one != "auto")
_Z95 = 1.96
_BLOCKS: Final = Params(max_tokens=176, algorithm="block_diffusion", confidence_threshold=0.9)
_D2F: Final = replace(_BLOCKS, algorithm="d2f")

WAYS: Final = {  # the other settings as published with D2F and SDAR
    "one token per forward": replace(_BLOCKS, confidence_threshold=1.0),
    "block diffusion, 0.9": _BLOCKS,
    "D2F, 0.9, window 2": replace(_D2F, window=2),
    "D2F, 0.9, window 4": replace(_D2F, window=4),
    "D2F, 0.8, window 4": replace(_D2F, window=4, confidence_threshold=0.8),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one problem."""

    exact: bool  # the whole text is right
    final: bool  # the final answer is right
    tokens: int
    forwards: int
    worked_tokens: int
    worked_forwards: int


def main(argv: Sequence[str]) -> int:
    job = make_parser().parse_args(argv)
    import torch  # slow, and not needed to list the flags

    from effuse.offline.llm import LLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = Tokenizer.load(job.model)
        llm = LLM(job.model, dtype=job.dtype, max_num_seqs=job.batch)
    except (ValueError, TokenizerError) as error:
        raise BadInput(str(error)) from error
    problems = [problem(job.seed, index, "held_out") for index in range(job.count)]
    prompts = [each.prompt for each in problems]
    rows = []
    with llm, Progress(console=Console(stderr=True)) as progress:
        for name, params in WAYS.items():
            task = progress.add_task(name, total=job.count)
            answers = llm.generate(
                prompts, params, progress=lambda *_, task=task: progress.advance(task)
            )
            rows.append((name, judge_all(problems, answers, tokenizer)))
    tokenizer.close()
    print(f"{job.count} held-out problems, seed {job.seed}, {device}, {job.dtype}")
    print(table(rows))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = command("eval", "Print the bundled model's accuracy and tokens per forward.")
    add = parser.add_argument
    add("--model", type=directory, default=bundled_directory(), metavar="DIR",
        help="checkpoint to evaluate (default: the bundled model)")  # fmt: skip
    add("--seed", type=whole(0), default=1, metavar="N", help="seed of the problems")
    add("--count", type=whole(2), default=2000, metavar="N", help="number of problems")
    add("--batch", type=whole(1), default=64, metavar="N", help="problems in one batch")
    add("--dtype", choices=_DTYPES, default="float32", help="type of weights and KV")
    return parser


def judge_all(
    problems: Sequence[Problem], answers: Sequence[Answer], tokenizer: Tokenizer
) -> list[Outcome]:
    return [
        judge(each, answer.token_ids, answer.commits, answer.stats.forward_passes, tokenizer.decode)
        for each, answer in zip(problems, answers, strict=True)
    ]


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
