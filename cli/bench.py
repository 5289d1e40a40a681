"""`effuse bench`: sends a dataset's prompts to a fleet and prints what it took.

Clients wait for their answers, or requests arrive at a rate, or at rates up to the highest that the
fleet bears. Ctrl-C prints what there is by then. With `--baseline` the same prompts are answered
twice more in this process (`baseline.py`). Tokens are those before the end-of-sequence id.
"""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from effuse.cli.arguments import (
    add_credentials,
    command,
    credentials_of,
    directory,
    file,
    is_unicode,
    new_file,
    number,
    seconds,
    target,
    whole,
)
from effuse.cli.figures import Run, ServiceGoals, as_json, table
from effuse.cli.knobs import add_knobs, params_from
from effuse.cli.load import Tally, Traffic, send_as_they_arrive, send_in_turn
from effuse.cli.sweep import next_rate, verdict
from effuse.client.credentials import Credentials
from effuse.client.options import DEFAULT_TARGET
from effuse.client.params import Params
from effuse.config.flags import add_switch
from effuse.router.tokenizer import Tokenizer, TokenizerError, bundled_directory

if TYPE_CHECKING:
    from effuse.cli.baseline import Baseline

_BASELINE = {"model", "max_tokens", "window", "confidence_threshold"}
_BASELINE_FLAGS = "--model, --max-tokens, --window and --confidence-threshold"
RULE = "tokens: those that the server counts as generated; times from when a request was due"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """What to send, how, and what to compare it with."""

    traffic: Traffic
    concurrency: int  # clients that wait for their answers, where there is no rate
    rate: float | None  # arrivals a second; of a sweep the first
    sweep: bool
    arrival_seed: int
    goals: ServiceGoals
    plot: Path | None
    baseline: bool
    model_dir: Path
    adapter: Path | None
    json: Path | None


class DatasetError(Exception):
    """The dataset is not what is expected."""


class BaselineError(Exception):
    """The baselines' checkpoint cannot be loaded."""


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit status: 1 where a request failed, or a file could not be written,
    130 where it was broken off."""
    try:
        job = parse(argv)
        rivals = load_baseline(job) if job.baseline else None
    except (DatasetError, BaselineError) as error:
        print(f"effuse bench: {error}", file=sys.stderr)
        return 2
    runs: list[Run] = []
    is_whole = False
    with _progress() as progress, suppress(KeyboardInterrupt):
        run_fleet(job, progress, runs)
        if rivals is not None:
            run_baseline(rivals, progress, runs)
        is_whole = True
    is_saved = save(job, runs)
    tell(job, runs)
    if not is_whole:
        print("effuse bench: broken off; the figures are those until then", file=sys.stderr)
        return 130
    return 1 if any(run.failed for run in runs) or not is_saved else 0


def save(job: BenchJob, runs: Sequence[Run]) -> bool:
    """Writes the files that were asked for; False where one could not be, which it tells."""
    try:
        if job.json is not None:
            job.json.write_text(json.dumps(as_json(runs), indent=1) + "\n")
        if job.plot is not None:
            from effuse.cli.plots import plot  # brings matplotlib

            plot(runs, job.plot)
    except OSError as error:
        print(f"effuse bench: {error}", file=sys.stderr)
        return False
    return True


def tell(job: BenchJob, runs: Sequence[Run]) -> None:
    """Prints the figures."""
    print(table(runs))
    how = f"{job.concurrency} at a time" if job.rate is None else "as they arrive"
    print(f"{len(job.traffic.prompts)} prompts, {how}; {RULE}")
    if job.sweep:
        print(verdict([run for run in runs if not math.isnan(run.rate)]))


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = command("bench", "Send a dataset's prompts to a running fleet; print what it took.")
    add = parser.add_argument
    add("--dataset", type=file, required=True, metavar="FILE", help='lines of {"prompt": ...}')
    add("--target", type=target, default=DEFAULT_TARGET, metavar="HOST:PORT", help="the router")
    add("--limit", type=whole(1), metavar="N",
        help="send so many prompts, the dataset again and again (default: each once)")  # fmt: skip
    add("--timeout", type=seconds, default=600.0, metavar="S", help="deadline of each request")
    _add_load(parser)
    add("--baseline", action="store_true", help="add vanilla denoising and single-process D2F")
    add("--model-dir", type=directory, default=bundled_directory(), metavar="DIR",
        help="checkpoint of the baselines (default: the bundled model)")  # fmt: skip
    add("--adapter", type=directory, metavar="DIR", help="LoRA adapter of the baselines")
    add("--json", type=new_file, metavar="FILE", help="write all figures there")
    add("--plot", type=new_file, metavar="FILE",
        help="draw them there, as .svg, .png or .pdf; needs matplotlib")  # fmt: skip
    add_credentials(parser)
    add_knobs(parser)
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    """How requests come, and what is asked of them."""
    add = parser.add_argument
    add("--concurrency", type=whole(1), default=8, metavar="N",
        help="clients that send one request after the other")  # fmt: skip
    add("--rate", type=number(0, open_left=True), metavar="R",
        help="in their place: requests that arrive a second, by chance")  # fmt: skip
    add("--arrival-seed", type=whole(0), default=1, metavar="N", help="when they arrive")
    add_switch(parser, "--sweep", "measure rates from --rate on, to the highest that is borne: "
               "where 9 requests in 10 meet the objectives")  # fmt: skip
    for flag, what in (
        ("--first-block-within", "objective: time to the first block"),
        ("--gap-within", "objective: time from each block to the next"),
        ("--total-within", "objective: time to the end"),
    ):
        add(flag, type=seconds, default=math.inf, metavar="S", help=f"{what} (default: none)")


def parse(argv: Sequence[str]) -> BenchJob:
    """The job that the flags describe; exits with status 2 on bad ones. Raises DatasetError."""
    parser = make_parser()
    found = parser.parse_args(argv)
    job = _job(found, credentials_of(parser, found))
    if job.baseline and (others := sorted(_unknown_to_baseline(job.traffic.params))):
        flags = ", ".join(f"--{name.replace('_ids', '_id').replace('_', '-')}" for name in others)
        parser.error(f"--baseline: expected no settings but {_BASELINE_FLAGS}, got {flags} too")
    if job.sweep and (job.rate is None or job.goals.asks_nothing):
        parser.error("--sweep: expected --rate and an objective, as --total-within, with it")
    if job.plot is not None:
        _check_plot(parser, job.plot)
    return job


def _check_plot(parser: argparse.ArgumentParser, path: Path) -> None:
    if path.suffix not in (".svg", ".png", ".pdf"):
        parser.error(f"--plot: expected a name that ends with .svg, .png or .pdf, got {path.name}")
    if find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is needed: pip install 'effuse[plot]'")


def _unknown_to_baseline(params: Params) -> set[str]:
    """Params that were given and that the baselines, greedy D2F and greedy vanilla, do not take."""
    unset = asdict(Params())
    return {name for name, value in asdict(params).items() if value != unset[name]} - _BASELINE


def _job(found: argparse.Namespace, credentials: Credentials) -> BenchJob:
    prompts = read_prompts(found.dataset)
    return BenchJob(
        traffic=Traffic(
            prompts=tuple(islice(cycle(prompts), found.limit or len(prompts))),
            params=params_from(found),
            target=found.target,
            credentials=credentials,
            timeout_s=found.timeout,
        ),
        concurrency=found.concurrency,
        rate=found.rate,
        sweep=found.sweep,
        arrival_seed=found.arrival_seed,
        goals=ServiceGoals(
            first_block_s=found.first_block_within,
            gap_s=found.gap_within,
            total_s=found.total_within,
        ),
        plot=found.plot,
        baseline=found.baseline,
        model_dir=found.model_dir,
        adapter=found.adapter,
        json=found.json,
    )


def read_prompts(path: Path) -> list[str]:
    """The `prompt` of every line. Raises DatasetError naming the line."""
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: expected UTF-8 text: {error}") from error
    for at, line in enumerate(lines if lines != [""] else [], start=1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise DatasetError(f"{path}:{at}: expected a JSON object, got {line[:40]!r}") from error
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(prompt, str) or not prompt or not is_unicode(prompt):
            raise DatasetError(f'{path}:{at}: expected {{"prompt": "..."}}, got {line[:40]!r}')
        prompts.append(prompt)
    if not prompts:
        raise DatasetError(f"{path}: expected one JSON object a line, found none")
    return prompts


def run_fleet(job: BenchJob, progress: Progress, runs: list[Run]) -> None:
    """Measure the fleet and add what it took to `runs`; a run that is broken off, too.

    Raises KeyboardInterrupt once that is done.
    """
    if job.rate is None:
        _measure(job, progress, runs, "fleet", math.nan)
        return
    if not job.sweep:
        _measure(job, progress, runs, "fleet", job.rate)
        return
    while (rate := next_rate(runs, job.rate)) is not None:
        _measure(job, progress, runs, f"fleet, {rate:.3g}/s", rate)


def _measure(job: BenchJob, progress: Progress, runs: list[Run], name: str, rate: float) -> None:
    """One run; NaN is the rate of clients that wait for their answers."""
    tally = Tally(_ticker(progress, name, len(job.traffic.prompts)))
    if math.isnan(rate):
        load = send_in_turn(job.traffic, job.concurrency, tally)
    else:
        load = send_as_they_arrive(job.traffic, rate, job.arrival_seed, tally)
    try:
        asyncio.run(load)
    finally:
        runs.append(tally.run(name, job.goals, rate))
        for line in tally.tell_failures():
            print(f"effuse bench: {line}", file=sys.stderr)


def load_baseline(job: BenchJob) -> "Baseline":
    """Weights and prompts of the two rivals. Raises BaselineError."""
    # These bring torch, so only where they are asked for.
    from effuse.cli.baseline import Baseline
    from effuse.models.config_keys import CheckpointError

    try:
        prompts = asyncio.run(_encode(job))
        return Baseline(
            job.model_dir, job.adapter, prompts, job.traffic.params, concurrency=job.concurrency
        )
    except (CheckpointError, TokenizerError) as error:
        raise BaselineError(str(error)) from error


def run_baseline(rivals: "Baseline", progress: Progress, runs: list[Run]) -> None:
    """The same prompts in this process: single-process D2F, then vanilla denoising."""
    requests, tokens = rivals.size()
    runs.append(rivals.single_process(_ticker(progress, "single-process D2F", requests)))
    runs.append(rivals.vanilla(_ticker(progress, "vanilla denoising, tokens", tokens)))


async def _encode(job: BenchJob) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.load(job.model_dir)
    try:
        return [tuple(await tokenizer.encode(prompt)) for prompt in job.traffic.prompts]
    finally:
        tokenizer.close()


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))


def _ticker(progress: Progress, name: str, total: int) -> Callable[[], None]:
    task = progress.add_task(name, total=total)
    return partial(progress.advance, task)
