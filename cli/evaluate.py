"""`effuse eval`: the model card's table, on problems that training never used.

Accuracy of the bundled model with five ways of decoding, in the engine that serves it, with tokens
per forward. Only tokens before the end-of-sequence id count.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, get_args

from rich.console import Console
from rich.progress import Progress

from effuse.cli.arguments import command, directory, whole
from effuse.cli.scores import Outcome, judge, table
from effuse.client.answer import Answer
from effuse.client.params import Params
from effuse.problems.problem import Problem, problem
from effuse.router.tokenizer import Tokenizer, TokenizerError, bundled_directory
from effuse.worker.config import Dtype

_DTYPES = tuple(one for one in get_args(Dtype) if one != "auto")
_BLOCKS: Final = Params(max_tokens=176, algorithm="block_diffusion", confidence_threshold=0.9)
_D2F: Final = replace(_BLOCKS, algorithm="d2f")

WAYS: Final = {  # the other settings as published with D2F and SDAR
    "one token per forward": replace(_BLOCKS, confidence_threshold=1.0),
    "block diffusion, 0.9": _BLOCKS,
    "D2F, 0.9, window 2": replace(_D2F, window=2),
    "D2F, 0.9, window 4": replace(_D2F, window=4),
    "D2F, 0.8, window 4": replace(_D2F, window=4, confidence_threshold=0.8),
}


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    job = make_parser().parse_args(argv)
    import torch  # slow, and not needed to list the flags

    from effuse.offline.llm import LLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = Tokenizer.load(job.model)
        llm = LLM(job.model, dtype=job.dtype, max_num_seqs=job.batch)
    except (ValueError, TokenizerError) as error:
        print(f"effuse eval: {error}", file=sys.stderr)
        return 2
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
    """The command's flags."""
    parser = command("eval", "Print the bundled model's accuracy and tokens per forward.")
    add = parser.add_argument
    add("--model", type=directory, default=bundled_directory(), metavar="DIR",
        help="checkpoint to evaluate (default: the bundled model)")  # fmt: skip
    add("--seed", type=whole(0), default=1, metavar="N", help="seed of the problems (default: 1)")
    add("--count", type=whole(2), default=2000, metavar="N",
        help="number of problems (default: 2000)")  # fmt: skip
    add("--batch", type=whole(1), default=64, metavar="N",
        help="problems in one batch (default: 64)")  # fmt: skip
    add("--dtype", choices=_DTYPES, default="float32",
        help="type of weights and KV (default: float32)")  # fmt: skip
    return parser


def judge_all(
    problems: Sequence[Problem], answers: Sequence[Answer], tokenizer: Tokenizer
) -> list[Outcome]:
    """Each answer with its problem, in the same order."""
    return [
        judge(each, answer.token_ids, answer.commits, answer.stats.forward_passes, tokenizer.decode)
        for each, answer in zip(problems, answers, strict=True)
    ]
