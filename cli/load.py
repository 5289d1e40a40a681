"""Load on a fleet: clients that wait for their answers, or requests that arrive at random.

Arrivals are a Poisson process from a seed, and do not wait for answers, so that delays of a slow
fleet show (an open loop). A request's time begins when it is due, so that a late client hides
nothing. The flags of `effuse bench` describe the job.
"""

import argparse
import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Final, get_args

from effuse.cli.arguments import (
    add_knobs,
    add_router,
    command,
    credentials_of,
    directory,
    explain,
    file,
    new_file,
    number,
    params_from,
    seconds,
    whole,
)
from effuse.cli.dataset import Item, Scorer, check_item, read_items
from effuse.cli.figures import Run, Sample, ServiceGoals
from effuse.client.answer import StreamBroken
from effuse.client.client import AsyncClient
from effuse.client.credentials import Credentials
from effuse.client.params import Params, make_request
from effuse.config.decoding import OBJECTIVES
from effuse.config.extras import lacking
from effuse.config.flags import add_switch, flag_of
from effuse.protos.errors import EffuseError
from effuse.router.tokenizer import bundled_directory

_NOTHING = Credentials()


@dataclass(frozen=True, slots=True)
class Traffic:
    """The prompts and their destination."""

    prompts: tuple[str, ...]
    params: Params
    target: str
    timeout_s: float
    credentials: Credentials = _NOTHING


class Tally:
    """The results so far, consistent at any moment; `on_done` is called at each end."""

    def __init__(self, on_done: Callable[[], None], now: Callable[[], float] = time.monotonic):
        self.samples: list[Sample] = []
        self.failures: Counter[str] = Counter()
        self._on_done = on_done
        self._now = now
        self._began = now()

    def begin(self) -> None:
        """Restart the clock, so that earlier work such as loading weights is not measured."""
        self._began = self._now()

    def add(self, result: Sample | str) -> None:
        """Counts an answer, or the reason for a failure."""
        if isinstance(result, Sample):
            self.samples.append(result)
        else:
            self.failures[result] += 1
        self._on_done()

    def failure_lines(self) -> list[str]:
        by_status: dict[str, Counter[str]] = {}
        for text, count in self.failures.items():
            by_status.setdefault(text.partition(":")[0], Counter())[text] += count
        return [
            f"{texts.total()} x {texts.most_common(1)[0][0]}"
            + (f"; {len(texts) - 1} other texts" if len(texts) > 1 else "")
            for _, texts in sorted(by_status.items())
        ]

    def run(self, name: str, goals: ServiceGoals, rate: float = float("nan")) -> Run:
        total_s, failed = self._now() - self._began, self.failures.total()
        return Run(name, total_s, tuple(self.samples), failed=failed, rate=rate, goals=goals)


def arrival_times(rate: float, count: int, seed: int) -> Iterator[float]:
    """Arrival times of `count` requests in seconds, `rate` per second: a Poisson process."""
    draw, at = random.Random(seed), 0.0
    for _ in range(count):
        at += draw.expovariate(rate)
        yield at


async def send_in_turn(traffic: Traffic, concurrency: int, tally: Tally) -> None:
    """Sends every prompt, `concurrency` at a time: each client waits for its answer."""
    waiting = iter(range(len(traffic.prompts)))

    async def ask_in_turn(client: AsyncClient) -> None:
        for at in waiting:
            tally.add(await _send(client, traffic, at, time.monotonic()))

    async with _client_of(traffic) as client, asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(traffic.prompts))):
            group.create_task(ask_in_turn(client))


async def send_as_they_arrive(traffic: Traffic, rate: float, seed: int, tally: Tally) -> None:
    """Sends every prompt when it is due, however many are running."""

    async def one(at: int, due: float) -> None:
        tally.add(await _send(client, traffic, at, due))

    async with _client_of(traffic) as client, asyncio.TaskGroup() as group:
        began = time.monotonic()
        times = arrival_times(rate, len(traffic.prompts), seed)
        for at, due in enumerate(times):
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
            group.create_task(one(at, began + due))


def _client_of(traffic: Traffic) -> AsyncClient:
    shown, limit_s = traffic.credentials, traffic.timeout_s
    return AsyncClient(
        traffic.target, timeout_s=limit_s, max_attempts=1, tls=shown.tls, token=shown.token
    )


async def _send(client: AsyncClient, traffic: Traffic, at: int, due: float) -> Sample | str:
    """Sends the prompt with this index, due at this time; records times or failure."""
    commits: list[float] = []
    stream = client.stream_of(make_request(traffic.prompts[at], traffic.params))
    try:
        async for event in stream.events():
            # those of other answers at the same time, without order
            if event.HasField("commit") and not event.answer_index:
                commits.append(time.monotonic())
        answer = await stream.answer
    except EffuseError as error:
        return explain(error, traffic.target)
    except StreamBroken as error:
        return str(error)
    ended = time.monotonic()
    return Sample(
        sum(one.usage.completion_tokens for one in answer.answers),
        sum(one.stats.forward_passes for one in answer.answers),
        (commits[0] if commits else ended) - due,
        ended - due,
        gaps(commits),
        prompt=at,
        text=answer.text,
    )


def gaps(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(after - before for before, after in pairwise(times))


_BASELINE: Final = {"model", "max_tokens", "window", "confidence_threshold", *OBJECTIVES}
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
    parser = command("bench", "Send a dataset's prompts to a running fleet; print times and rates.")
    add = parser.add_argument
    add("--dataset", type=file, required=True, metavar="FILE", help='lines of {"prompt": ...}')
    add("--limit", type=whole(1), metavar="N",
        help="send this many prompts, repeating the dataset (default: each once)")  # fmt: skip
    add("--timeout", type=seconds, default=600.0, metavar="S", help="deadline of each request")
    add("--concurrency", type=whole(1), default=8, metavar="N",
        help="number of clients, each of which sends one request after another")  # fmt: skip
    add("--rate", type=number(0, open_left=True), metavar="R",
        help="instead of --concurrency: requests per second, at random times")  # fmt: skip
    add("--arrival-seed", type=whole(0), default=1, metavar="N", help="seed of these times")
    add_switch(parser, "--sweep", "raise the rate from --rate to the highest at which 9 requests "
               "in 10 meet the objectives")  # fmt: skip
    add("--total-within", type=seconds, default=math.inf, metavar="S",
        help="objective: seconds until the end (default: none)")  # fmt: skip
    add_switch(parser, "--baseline", "before the fleet, answer the prompts in this process with "
               "the base model's own loop and one engine; all greedy")  # fmt: skip
    add("--model-dir", type=directory, metavar="DIR",
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
    add("--json", type=new_file, metavar="FILE", help="write all figures to this file")
    add("--plot", type=new_file, metavar="FILE",
        help="draw the figures to this file, as .svg, .png or .pdf; needs matplotlib")  # fmt: skip
    add_router(parser)
    add_knobs(parser)
    return parser


def parse(argv: Sequence[str]) -> BenchJob:
    """The job from the flags; exits with status 2 on bad ones. Raises BadInput."""
    parser = make_parser()
    job: BenchJob = parser.parse_args(argv, BenchJob())
    params = params_from(parser, job)
    # Requests have the first two as well.
    own = params.first_block_within or math.inf, params.gap_within or math.inf
    job.goals = ServiceGoals(*own, job.total_within)
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
    given = {name for name, value in asdict(params).items() if value != getattr(Params(), name)}
    if job.baseline and (others := sorted(given - _BASELINE)):
        flags = ", ".join(f"--{name.replace('_ids', '_id').replace('_', '-')}" for name in others)
        parser.error(f"--baseline: expected no settings except {_BASELINE_FLAGS}, got also {flags}")
    for name in ("model_dir", "adapter", "d2f_repo"):
        if getattr(job, name) is not None and not job.baseline:
            parser.error(f"{flag_of(name)}: expected together with --baseline")
    job.model_dir = job.model_dir or bundled_directory()
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
