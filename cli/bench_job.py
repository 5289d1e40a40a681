"""The flags of `effuse bench`, and the job that they describe."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Final, get_args

from effuse.cli.arguments import (
    add_knobs,
    add_router,
    command,
    credentials_of,
    directory,
    file,
    new_file,
    number,
    params_from,
    seconds,
    whole,
)
from effuse.cli.dataset import Item, Scorer, check_item, read_items
from effuse.cli.figures import ServiceGoals
from effuse.cli.load import Traffic
from effuse.client.params import Params
from effuse.config.extras import lacking
from effuse.config.flags import add_switch
from effuse.router.tokenizer import bundled_directory


class BenchError(Exception):
    """The benchmark cannot begin, or one of its rows cannot be measured."""


_BASELINE: Final = {"model", "max_tokens", "window", "confidence_threshold"}
_BASELINE_FLAGS: Final = "--model, --max-tokens, --window and --confidence-threshold"


class BenchJob(argparse.Namespace):
    """The values of the flags, and what follows from them."""

    dataset: Path
    limit: int | None
    target: str
    timeout: float
    concurrency: int  # clients that wait for their answers, if there is no rate
    rate: float | None  # arrivals per second; the first rate of a sweep
    sweep: bool
    arrival_seed: int
    scorer: Scorer | None
    run_model_code: bool
    plot: Path | None
    json: Path | None
    baseline: bool
    d2f_repo: Path | None
    model_dir: Path
    adapter: Path | None

    items: tuple[Item, ...]  # one for each prompt
    traffic: Traffic
    goals: ServiceGoals


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = command("bench", "Send a dataset's prompts to a running fleet; print times and rates.")
    add = parser.add_argument
    add("--dataset", type=file, required=True, metavar="FILE", help='lines of {"prompt": ...}')
    add("--limit", type=whole(1), metavar="N",
        help="send this many prompts, repeating the dataset (default: each once)")  # fmt: skip
    add("--timeout", type=seconds, default=600.0, metavar="S", help="deadline of each request")
    _add_load(parser)
    _add_comparison(parser)
    add("--json", type=new_file, metavar="FILE", help="write all figures to this file")
    add("--plot", type=new_file, metavar="FILE",
        help="draw the figures to this file, as .svg, .png or .pdf; needs matplotlib")  # fmt: skip
    add_router(parser)
    add_knobs(parser)
    return parser


def _add_comparison(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of comparisons and grading."""
    add = parser.add_argument
    add_switch(parser, "--baseline", "first answer in this process with the base model's own loop "
               "and with one engine without a fleet; all greedy")  # fmt: skip
    add("--model-dir", type=directory, default=bundled_directory(), metavar="DIR",
        help="checkpoint of the baselines (default: the bundled model)")  # fmt: skip
    add("--adapter", type=directory, metavar="DIR",
        help="LoRA adapter of the baselines; the base model does not use it")  # fmt: skip
    add("--d2f-repo", type=directory, metavar="DIR",
        help="with --baseline: also run the D2F authors' loop from this checkout, in another "
        "process; this runs its code and code in --model-dir")  # fmt: skip
    add("--scorer", choices=get_args(Scorer),
        help="grade answers: gsm8k by the last number, humaneval by running tests")  # fmt: skip
    add_switch(parser, "--run-model-code", "allow --scorer humaneval to run code that the model "
               "wrote, in a sandbox with limits")  # fmt: skip


def _add_load(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the load and its objectives."""
    add = parser.add_argument
    add("--concurrency", type=whole(1), default=8, metavar="N",
        help="number of clients, each of which sends one request after another")  # fmt: skip
    add("--rate", type=number(0, open_left=True), metavar="R",
        help="instead of --concurrency: requests per second, at random times")  # fmt: skip
    add("--arrival-seed", type=whole(0), default=1, metavar="N", help="seed of these times")
    add_switch(parser, "--sweep", "raise the rate from --rate to the highest at which 9 requests "
               "in 10 meet the objectives")  # fmt: skip
    for flag, what in (
        ("--first-block-within", "objective: time to the first block"),
        ("--gap-within", "objective: time from each block to the next"),
        ("--total-within", "objective: time to the end"),
    ):
        add(flag, type=seconds, default=math.inf, metavar="S", help=f"{what} (default: none)")


def parse(argv: Sequence[str]) -> BenchJob:
    """The job from the flags; exits with status 2 on bad ones. Raises DatasetError."""
    parser = make_parser()
    job: BenchJob = parser.parse_args(argv, BenchJob())
    params = params_from(parser, job)
    objectives = (job.first_block_within, job.gap_within, job.total_within)
    job.goals = ServiceGoals(*objectives)
    _check(parser, job, params)
    if job.baseline:  # all rows have these settings instead of the model's own
        params = replace(params, algorithm="d2f", temperature=0.0, top_p=1.0, top_k=0)
    credentials = credentials_of(parser, job)
    listed = read_items(job.dataset)
    for item in listed:
        check_item(job.scorer, item)
    job.items = tuple(islice(cycle(listed), job.limit or len(listed)))
    prompts = tuple(item.prompt for item in job.items)
    job.traffic = Traffic(prompts, params, job.target, job.timeout, credentials)
    return job


def _check(parser: argparse.ArgumentParser, job: BenchJob, params: Params) -> None:
    """Exits with status 2 if flags contradict each other."""
    if job.baseline and (others := sorted(_unknown_to_baseline(params))):
        flags = ", ".join(f"--{name.replace('_ids', '_id').replace('_', '-')}" for name in others)
        parser.error(f"--baseline: expected no settings except {_BASELINE_FLAGS}, got also {flags}")
    if job.d2f_repo is not None and not job.baseline:
        parser.error("--d2f-repo: expected together with --baseline")
    if job.scorer == "humaneval" and not job.run_model_code:
        parser.error(
            "--scorer humaneval: expected --run-model-code, because it runs code that a model wrote"
        )
    if job.sweep and (job.rate is None or job.goals.asks_nothing):
        parser.error("--sweep: expected --rate and an objective, such as --total-within")
    if job.plot is None:
        return
    if job.plot.suffix not in (".svg", ".png", ".pdf"):
        form = "a name that ends with .svg, .png or .pdf"
        parser.error(f"--plot: expected {form}, got {job.plot.name}")
    if find_spec("matplotlib") is None:
        parser.error(f"--plot: {lacking('matplotlib')}")


def _unknown_to_baseline(params: Params) -> set[str]:
    """Given params that the greedy rows beside the fleet do not support."""
    unset = asdict(Params())
    return {name for name, value in asdict(params).items() if value != unset[name]} - _BASELINE
