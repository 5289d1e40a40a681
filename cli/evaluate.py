"""`effuse eval`: the model card's table, on problems that training never saw.

Accuracy of the bundled model under five ways of decoding, by the engine that serves it, with the
tokens each forward gives. Only tokens before the end-of-sequence id count.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from effuse.cli.arguments import command, directory, whole
from effuse.cli.local import Ask, LocalAnswer, LocalEngine, pick_device
from effuse.cli.scores import Outcome, judge, table
from effuse.config.decoding import Algorithm, DecodeSettings
from effuse.models.config_keys import CheckpointError
from effuse.models.transformer import Transformer
from effuse.models.weights import DTYPES, load_model
from effuse.problems.problem import Problem, problem
from effuse.router.tokenizer import Tokenizer, TokenizerError, bundled_directory

_MAX_TOKENS = 176


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table."""

    name: str
    algorithm: Algorithm
    window: int
    threshold: float


WAYS = (
    Way("one token per forward", "block_diffusion", 1, 1.0),
    Way("block diffusion, 0.9", "block_diffusion", 1, 0.9),
    Way("D2F, 0.9, window 2", "d2f", 2, 0.9),
    Way("D2F, 0.9, window 4", "d2f", 4, 0.9),
    Way("D2F, 0.8, window 4", "d2f", 4, 0.8),
)


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure."""

    model: Path
    seed: int
    count: int
    batch: int
    dtype: str


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit status."""
    job = parse(argv)
    device, _ = pick_device()
    try:
        model = load_model(job.model, device=device, dtype=DTYPES[job.dtype])
        tokenizer = Tokenizer.load(job.model)
    except (CheckpointError, TokenizerError) as error:
        print(f"effuse eval: {error}", file=sys.stderr)
        return 2
    problems = [problem(job.seed, index, "held_out") for index in range(job.count)]
    prompts = asyncio.run(_encode(tokenizer, problems))
    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        for way in WAYS:
            task = progress.add_task(way.name, total=job.count)
            answers = answer_all(model, prompts, way, job.batch, partial(progress.advance, task))
            rows.append((way.name, _judge_all(problems, answers, tokenizer)))
    tokenizer.close()
    print(f"{job.count} held-out problems, seed {job.seed}, {device.type}, {job.dtype}")
    print(table(rows))
    return 0


def parse(argv: Sequence[str]) -> Job:
    """The measurement that the flags describe; exits with status 2 on bad ones."""
    parser = command("eval", "Print the bundled model's accuracy and tokens per forward.")
    add = parser.add_argument
    add("--model", type=directory, default=bundled_directory(), metavar="DIR",
        help="checkpoint; the bundled model if absent")  # fmt: skip
    add("--seed", type=whole(0), default=1, metavar="N", help="which problems (default: 1)")
    add("--count", type=whole(2), default=2000, metavar="N", help="how many (default: 2000)")
    add("--batch", type=whole(1), default=64, metavar="N", help="problems at a time (default: 64)")
    add("--dtype", choices=DTYPES, default="float32", help="of weights and KV (default: float32)")
    found = parser.parse_args(argv)
    return Job(
        model=found.model,
        seed=found.seed,
        count=found.count,
        batch=found.batch,
        dtype=found.dtype,
    )


async def _encode(tokenizer: Tokenizer, problems: Sequence[Problem]) -> list[tuple[int, ...]]:
    return [tuple(await tokenizer.encode(each.prompt)) for each in problems]


def answer_all(
    model: Transformer,
    prompts: Sequence[tuple[int, ...]],
    way: Way,
    batch: int,
    on_done: Callable[[], None],
) -> list[LocalAnswer]:
    """Every prompt's answer under one way of decoding."""
    longest = max(len(prompt) for prompt in prompts)
    engine = LocalEngine(model, max_num_seqs=batch, max_model_len=longest + _MAX_TOKENS)
    settings = settings_of(way, model.config.block_size)
    asks = [
        Ask(prompt_token_ids=prompt, max_tokens=_MAX_TOKENS, settings=settings)
        for prompt in prompts
    ]
    return engine.run(asks, on_done)


def settings_of(way: Way, block_size: int) -> DecodeSettings:
    """A way of decoding in the engine's terms; the rest as published with D2F and SDAR."""
    return DecodeSettings(
        algorithm=way.algorithm,
        window=way.window,
        confidence_threshold=way.threshold,
        denoising_steps=block_size,
    )


def _judge_all(
    problems: Sequence[Problem], answers: Sequence[LocalAnswer], tokenizer: Tokenizer
) -> list[Outcome]:
    return [
        judge(each, answer.token_ids, answer.commits, answer.forward_passes, tokenizer.decode)
        for each, answer in zip(problems, answers, strict=True)
    ]
