"""`effuse bench`: sends a dataset's prompts to a fleet and prints what it took.

With `--baseline` the same prompts are answered twice more in this process (`baseline.py`).
Tokens are those before the end-of-sequence id, everywhere.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from effuse.cli.arguments import (
    command,
    directory,
    file,
    is_unicode,
    new_file,
    seconds,
    target,
    whole,
)
from effuse.cli.figures import Run, Sample, as_json, table
from effuse.cli.generate import ask, explain
from effuse.cli.knobs import add_knobs, params_from
from effuse.client.answer import StreamBroken
from effuse.client.options import DEFAULT_TARGET
from effuse.client.params import Params, make_request
from effuse.protos.rpc import connect
from effuse.protos.stubs import generation_stub
from effuse.router.tokenizer import Tokenizer, TokenizerError, bundled_directory

if TYPE_CHECKING:
    from effuse.cli.baseline import Baseline

_BASELINE = {"model", "max_tokens", "window", "confidence_threshold"}
_BASELINE_FLAGS = "--model, --max-tokens, --window and --confidence-threshold"
RULE = "tokens: those before the end-of-sequence id; latency from sending to the last message"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """What to send, where, and what to compare it with."""

    prompts: tuple[str, ...]
    params: Params
    target: str
    concurrency: int
    timeout_s: float
    baseline: bool
    model_dir: Path
    adapter: Path | None
    json: Path | None


class DatasetError(Exception):
    """The dataset is not what is expected."""


class BaselineError(Exception):
    """The baselines' checkpoint cannot be loaded."""


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit status."""
    try:
        job = parse(argv)
        rivals = load_baseline(job) if job.baseline else None
    except (DatasetError, BaselineError) as error:
        print(f"effuse bench: {error}", file=sys.stderr)
        return 2
    with _progress() as progress:
        runs = [asyncio.run(run_fleet(job, _ticker(progress, "fleet", len(job.prompts))))]
        if rivals is not None:
            runs += run_baseline(rivals, progress)
    print(table(runs))
    print(f"{len(job.prompts)} prompts, {job.concurrency} at a time; {RULE}")
    if job.json is not None:
        job.json.write_text(json.dumps(as_json(runs), indent=1) + "\n")
    return 1 if any(run.failed for run in runs) else 0


def parse(argv: Sequence[str]) -> BenchJob:
    """The job that the flags describe; exits with status 2 on bad ones. Raises DatasetError."""
    parser = command("bench", "Send a dataset's prompts to a running fleet; print what it took.")
    add = parser.add_argument
    add("--dataset", type=file, required=True, metavar="FILE", help='lines of {"prompt": ...}')
    add("--target", type=target, default=DEFAULT_TARGET, metavar="HOST:PORT", help="the router")
    add("--concurrency", type=whole(1), default=8, metavar="N",
        help="requests at a time (default: 8)")  # fmt: skip
    add("--limit", type=whole(1), metavar="N", help="take only the first prompts")
    add("--timeout", type=seconds, default=600.0, metavar="S",
        help="longest a request may take (default: 600)")  # fmt: skip
    add("--baseline", action="store_true", help="add vanilla denoising and single-process D2F")
    add("--model-dir", type=directory, default=bundled_directory(), metavar="DIR",
        help="checkpoint of the baselines; the bundled model if absent")  # fmt: skip
    add("--adapter", type=directory, metavar="DIR", help="LoRA adapter of the baselines")
    add("--json", type=new_file, metavar="FILE", help="write all figures there")
    add_knobs(parser)
    job = _job(parser.parse_args(argv))
    if job.baseline and (others := sorted(_unknown_to_baseline(job.params))):
        flags = ", ".join(f"--{name.replace('_ids', '_id').replace('_', '-')}" for name in others)
        parser.error(f"--baseline: expected no settings but {_BASELINE_FLAGS}, got {flags} too")
    return job


def _unknown_to_baseline(params: Params) -> set[str]:
    """Params that were given and that the baselines, greedy D2F and greedy vanilla, do not take."""
    unset = asdict(Params())
    return {name for name, value in asdict(params).items() if value != unset[name]} - _BASELINE


def _job(found: argparse.Namespace) -> BenchJob:
    return BenchJob(
        prompts=tuple(read_prompts(found.dataset)[: found.limit]),
        params=params_from(found),
        target=found.target,
        concurrency=found.concurrency,
        timeout_s=found.timeout,
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


async def run_fleet(job: BenchJob, on_done: Callable[[], None]) -> Run:
    """Send every prompt, `concurrency` at a time, and gather what came back."""
    waiting = iter(job.prompts)
    samples: list[Sample] = []
    failures: list[str] = []
    async with connect(job.target, keepalive=None) as channel:
        stub = generation_stub(channel)

        async def client() -> None:
            for prompt in waiting:
                request = make_request(prompt, job.params)
                try:
                    answer = await ask(stub, request, timeout_s=job.timeout_s)
                except grpc.aio.AioRpcError as error:
                    failures.append(explain(error))
                except StreamBroken as error:
                    failures.append(str(error))
                else:
                    tokens, forwards = answer.usage.completion_tokens, answer.stats.forward_passes
                    samples.append(Sample(tokens, forwards, answer.first_block_s, answer.total_s))
                on_done()

        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(job.concurrency, len(job.prompts))):
                group.create_task(client())
        total_s = time.monotonic() - began
    for failure in sorted(set(failures)):
        print(f"effuse bench: {failures.count(failure)} x {failure}", file=sys.stderr)
    return Run("fleet", total_s, samples, failed=len(failures))


def load_baseline(job: BenchJob) -> "Baseline":
    """Weights and prompts of the two rivals. Raises BaselineError."""
    # These bring torch, so only where they are asked for.
    from effuse.cli.baseline import Baseline
    from effuse.models.config_keys import CheckpointError

    try:
        prompts = asyncio.run(_encode(job))
        return Baseline(
            job.model_dir, job.adapter, prompts, job.params, concurrency=job.concurrency
        )
    except (CheckpointError, TokenizerError) as error:
        raise BaselineError(str(error)) from error


def run_baseline(rivals: "Baseline", progress: Progress) -> list[Run]:
    """The same prompts in this process: single-process D2F, then vanilla denoising."""
    requests, tokens = rivals.size()
    return [
        rivals.single_process(_ticker(progress, "single-process D2F", requests)),
        rivals.vanilla(_ticker(progress, "vanilla denoising, tokens", tokens)),
    ]


async def _encode(job: BenchJob) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.load(job.model_dir)
    try:
        return [tuple(await tokenizer.encode(prompt)) for prompt in job.prompts]
    finally:
        tokenizer.close()


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))


def _ticker(progress: Progress, name: str, total: int) -> Callable[[], None]:
    task = progress.add_task(name, total=total)
    return partial(progress.advance, task)
