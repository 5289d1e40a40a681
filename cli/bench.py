"""`effuse bench`: sends a dataset's prompts to a fleet and prints times and rates.

Clients wait for their answers, or requests arrive at a rate, or at rates up to the highest that the
fleet sustains. With `--baseline` the same prompts are first answered by the base model's own loop
(`baseline.py`), by the D2F authors' (`d2f_repo.py`) and by one engine without a fleet. Rows run one
after another and are printed as soon as they are measured; Ctrl-C keeps those rows. Tokens are the
server's count of generated tokens.

A fleet sustains a rate if nine requests in ten met their objectives. The rates of a sweep double
until one fails, and then halve the interval, to the knee: the highest rate that the fleet sustains.
Requests that arrive within their objective's time are always on time, however slow the fleet is,
because a growing queue takes time to show.
"""

import asyncio
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from effuse.cli import figures
from effuse.cli.arguments import client_of, explain
from effuse.cli.dataset import fits, grader, too_long
from effuse.cli.figures import Run
from effuse.cli.load import (
    BenchJob,
    Tally,
    Traffic,
    make_parser,
    parse,
    send_as_they_arrive,
    send_in_turn,
)
from effuse.cli.process import interruptible
from effuse.cli.sandbox import works
from effuse.client.client import Client
from effuse.client.params import Params
from effuse.config.flags import BadInput, CommandError
from effuse.protos.errors import EffuseError, InvalidRequest
from effuse.v1 import model_pb2

if TYPE_CHECKING:
    from effuse.cli.baseline import Rivals

MET_SHARE: Final = 0.9
"""Share of requests that must meet the objectives."""

MOST_RUNS: Final = 16
_NEAR = 1.1  # the knee is known to a tenth
# objectives' times that arrivals must span, so that a rate above it by that tenth is late
_LONG = 10


def next_rate(runs: Sequence[Run], first: float) -> float | None:
    """The next rate to measure, beginning with `first`; None if the knee is known."""
    if not runs:
        return first
    if len(runs) >= MOST_RUNS:
        return None
    borne = knee(runs)
    above = _lowest_not_borne(runs)
    if above is None:
        top = max(runs, key=lambda run: run.rate)
        return None if _arrived_s(top) < _objective_s(top) else 2 * top.rate
    if borne is None:
        return above / 2
    return None if above <= _NEAR * borne else (above + borne) / 2


def knee(runs: Sequence[Run]) -> float | None:
    """The highest measured rate such that it and all lower ones passed; None if there is none."""
    above = _lowest_not_borne(runs)
    borne = [run.rate for run in runs if above is None or run.rate < above]
    return max(borne, default=None)


def _lowest_not_borne(runs: Sequence[Run]) -> float | None:
    return min((run.rate for run in runs if not run.met_share >= MET_SHARE), default=None)


def verdict(runs: Sequence[Run]) -> str:
    """The result of a sweep, in a line."""
    borne = knee(runs)
    if borne is None:
        lowest = min(run.rate for run in runs)
        return (
            f"no rate met the objectives: at {lowest:.3g} requests/s, fewer than 9 in 10 requests "
            "did"
        )
    few = _too_few(next(run for run in runs if run.rate == borne))
    if _lowest_not_borne(runs) is None:
        return f"the fleet sustains {borne:.3g} requests/s, the highest rate that was tried{few}"
    peak = max(run.num_met / run.total_s for run in runs)
    return (
        f"the knee is at {borne:.3g} requests/s; the highest goodput was {peak:.3g} requests/s{few}"
    )


def _too_few(run: Run) -> str:
    """A warning if a run is too short; empty for one that is long enough."""
    objective_s, arrived_s = _objective_s(run), _arrived_s(run)
    if arrived_s >= _LONG * objective_s:
        return ""
    needed = math.ceil(_LONG * objective_s * run.rate)
    return (
        f"; its {_count(run)} requests arrived within {arrived_s:.3g} s, too few to judge an "
        f"objective of {objective_s:.3g} s: send {needed} or more with --limit"
    )


def _count(run: Run) -> int:
    return len(run.samples) + run.failed


def _arrived_s(run: Run) -> float:
    """The time over which its requests arrived, from its rate."""
    return _count(run) / run.rate


def _objective_s(run: Run) -> float:
    goals = run.goals
    asked = [one for one in (goals.first_block_s, goals.gap_s, goals.total_s) if one < math.inf]
    return max(asked, default=0.0)


__all__ = ["main", "make_parser"]

RULE = "tokens: generated tokens by the server's count; times: from each request's due time"
_LOOK_S = 10.0
_SHOWN = ("algorithm", "max_tokens", "window", "confidence_threshold", "temperature")

Way = Callable[[Tally], None]
"""A way to answer all prompts: adds each outcome to a tally as it arrives."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 1 if a request or a row failed or a file could not be written, and
    130 if the user interrupted it."""
    job = parse(argv)
    rivals = load_rivals(job) if job.baseline else None
    if job.scorer == "humaneval" and not works():
        raise BadInput("--scorer humaneval: a sandboxed Python program cannot run on this machine")
    bench = Bench(job, rivals)
    try:
        with interruptible():
            bench.run()
    except KeyboardInterrupt:
        bench.status = 130
    bench.finish()
    return bench.status


class Bench:
    """One run of the command: the measured rows, and the exit status so far."""

    def __init__(self, job: BenchJob, rivals: "Rivals | None") -> None:
        self.status = 0
        self.runs: list[Run] = []
        self._job, self._rivals = job, rivals
        self._heading = ""

    def run(self) -> None:
        """Measures every row. Raises KeyboardInterrupt after it has kept an interrupted row."""
        fleet = self._introduce()
        print(figures.headings(), flush=True)
        if self._rivals is not None:
            for name, way in ways(self._job, self._rivals):
                self._measure(name, way)
        first = self._job.rate
        if first is None or not self._job.sweep:
            self._measure(fleet, partial(send, self._job, first), first)
            return
        swept: list[Run] = []
        while (rate := next_rate(swept, first)) is not None:
            self._measure(f"fleet, {rate:.3g}/s", partial(send, self._job, rate), rate)
            swept.append(self.runs[-1])

    def finish(self) -> None:
        if not self.runs:
            print("effuse bench: stopped before the first measurement", file=sys.stderr)
            return
        is_saved = self._save()
        self._print_figures()
        if self.status == 130:
            print(
                "effuse bench: stopped early; the figures cover the requests until then",
                file=sys.stderr,
            )
        elif not is_saved or any(run.failed for run in self.runs):
            self.status = 1

    def _introduce(self) -> str:
        """Prints the heading and the refused prompts before the first measurement; returns the name
        of the fleet's row."""
        job, name, about, refused = self._job, "fleet", "", ""
        try:
            name, about, refused = look(job.traffic, [one.name for one in job.items])
        except EffuseError as error:
            print(f"effuse bench: {explain(error, job.traffic.target)}", file=sys.stderr)
        self._heading = f"{job.dataset.name}, {len(job.items)} prompts, {_how(job)}{about}"
        print(self._heading)
        if self._rivals is not None:
            beside = f"beside the fleet: {self._rivals.described()}"
            self._heading += f"; {beside}"
            print(beside)
        if refused:
            print(refused)
        return name

    def _measure(self, name: str, way: Way, rate: float | None = None) -> None:
        """Measures and keeps one row, even if interrupted; a complete one is graded and printed."""
        progress = _progress()
        task = progress.add_task(name, total=len(self._job.items))
        tally = Tally(partial(progress.advance, task))
        try:
            with progress:
                way(tally)
        except (CommandError, EffuseError) as error:
            print(f"effuse bench: {name}: {error}", file=sys.stderr)
            self.status = 1
        finally:
            run = tally.run(name, self._job.goals, math.nan if rate is None else rate)
            if run.samples or run.failed:
                self.runs.append(run)
            for line in tally.failure_lines():
                print(f"effuse bench: {name}: {line}", file=sys.stderr)
        if self.runs and self.runs[-1] is run:
            self.runs[-1] = _graded(run, self._job)
            print(figures.row(self.runs[-1], self.runs[0]), flush=True)

    def _save(self) -> bool:
        """Writes the requested files. If one cannot be written, prints why and returns False."""
        try:
            if self._job.json is not None:
                rows = [{"heading": self._heading, **row} for row in figures.as_json(self.runs)]
                self._job.json.write_text(json.dumps(rows, indent=1) + "\n")
            if self._job.plot is not None:
                figures.plot(self.runs, self._job.plot)
        except OSError as error:
            print(f"effuse bench: {error}", file=sys.stderr)
            return False
        return True

    def _print_figures(self) -> None:
        print(f"{figures.RULE}\n\n{figures.table(self.runs)}")
        print(f"{len(self._job.items)} prompts, {_how(self._job)}; {RULE}")
        swept = [run for run in self.runs if not math.isnan(run.rate)]
        if self._job.sweep and swept:
            print(verdict(swept))


def _graded(run: Run, job: BenchJob) -> Run:
    if job.scorer is None:
        return run
    is_right = grader(job.scorer)
    samples = [
        replace(one, is_right=is_right(job.items[one.prompt], one.text)) for one in run.samples
    ]
    return replace(run, samples=tuple(samples))


def send(job: BenchJob, rate: float | None, tally: Tally) -> None:
    if rate is None:
        asyncio.run(send_in_turn(job.traffic, job.concurrency, tally))
    else:
        asyncio.run(send_as_they_arrive(job.traffic, rate, job.arrival_seed, tally))


def load_rivals(job: BenchJob) -> "Rivals":
    """The checked checkpoint of the baselines. Raises BadInput."""
    # These import torch, so only if needed.
    from effuse.cli import baseline, d2f_repo
    from effuse.models.config_keys import CheckpointError
    from effuse.router.tokenizer import TokenizerError

    params, prompts = job.traffic.params, job.traffic.prompts
    try:
        rivals = baseline.check(job.model_dir, job.adapter, prompts, params, job.concurrency)
        if job.d2f_repo is not None:
            d2f_repo.check(job.d2f_repo, rivals)
    except (CheckpointError, TokenizerError) as error:
        raise BadInput(str(error)) from error
    return rivals


def ways(job: BenchJob, rivals: "Rivals") -> Iterator[tuple[str, Way]]:
    """The rows before the fleet's, by name."""
    from effuse.cli import baseline, d2f_repo

    yield "base model", partial(baseline.base_model, rivals)
    if job.d2f_repo is not None:
        loop = partial(d2f_repo.authors_loop, job.d2f_repo, rivals, job.traffic.timeout_s)
        yield "D2F authors' loop", loop
    yield "single-process D2F", partial(baseline.single_process, rivals)


def look(traffic: Traffic, names: Sequence[str]) -> tuple[str, str, str]:
    """Asks the router about its fleet: a name such as "fleet 1P1D" (one prefill and one decode
    worker; "1B" is one that does both), the model with its settings, and a line about the prompts
    that do not fit, or "".

    Raises EffuseError if it does not answer or does not serve the model of `traffic`.
    """
    params = traffic.params
    with client_of(traffic.target, traffic.credentials, _LOOK_S) as client:
        model = _model(client.models(), params.model)
        workers = [one for one in client.workers() if one.model == model.name]
        by_prompt = dict(zip(traffic.prompts, names, strict=True))
        taken = [_takes(client, model, prompt, params) for prompt in by_prompt]
    prefill = sum(one.role == model_pb2.WORKER_ROLE_PREFILL for one in workers)
    both = sum(one.role == model_pb2.WORKER_ROLE_BOTH for one in workers)
    shape = f"{prefill}P{len(workers) - prefill - both}D" + (f"{both}B" if both else "")
    asked = "" if params.max_tokens is None else f" with --max-tokens {params.max_tokens}"
    refused = too_long([*by_prompt.values()], taken, f"{model.max_model_len} tokens{asked}")
    about = f"; {model.name}, {_settings(model, params)}"
    return f"fleet {shape}", about, refused


def _settings(model: model_pb2.Model, params: Params) -> str:
    """The most important settings, from the request or otherwise the model's own."""
    defaults = MessageToDict(model.defaults, preserving_proto_field_name=True)
    known: dict[str, Any] = {
        **defaults.get("decoding", {}),
        **defaults.get("sampling", {}),
        "max_tokens": model.defaults.max_tokens,
    }
    known["algorithm"] = str(known.get("algorithm", "")).removeprefix("ALGORITHM_").lower()
    known |= {name: value for name, value in asdict(params).items() if value is not None}
    shown = [(name, known[name]) for name in _SHOWN if name in known]
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in shown
    )


def _model(models: Sequence[model_pb2.Model], name: str | None) -> model_pb2.Model:
    found = [one for one in models if name in (None, one.name)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(one.name for one in models) or "none"
    raise InvalidRequest.of("model", f"expected one of the served models with --model: {listed}")


def _takes(client: Client, model: model_pb2.Model, prompt: str, params: Params) -> bool:
    try:
        ids = client.tokenize(prompt, model=model.name)
    except InvalidRequest:
        return False
    return fits(len(ids), params.max_tokens, model.max_model_len)


def _how(job: BenchJob) -> str:
    return f"{job.concurrency} at a time" if job.rate is None else "as they arrive"


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    return Progress(*columns, TimeElapsedColumn(), console=console, redirect_stdout=False)
