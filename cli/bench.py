"""`effuse bench`: sends a dataset's prompts to a fleet and prints times and rates.

Clients wait for their answers, or requests arrive at a rate, or at rates up to the highest that the
fleet sustains. With `--baseline` the same prompts are first answered by the base model's own loop
(`baseline.py`), by the D2F authors' (`d2f_repo.py`) and by one engine without a fleet. Rows run one
after another and are printed as soon as they are measured; Ctrl-C keeps those rows. Tokens are the
server's count of generated tokens.
"""

import asyncio
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from effuse.cli import comparison, served
from effuse.cli.arguments import explain
from effuse.cli.bench_job import BenchError, BenchJob, make_parser, parse
from effuse.cli.dataset import DatasetError, Item
from effuse.cli.figures import Run, as_json, table
from effuse.cli.graders import Scorer, grader
from effuse.cli.load import Tally, send_as_they_arrive, send_in_turn
from effuse.cli.sandbox import works
from effuse.cli.sweep import next_rate, verdict
from effuse.protos.errors import EffuseError

if TYPE_CHECKING:
    from effuse.cli.baseline import Rivals

__all__ = ["main", "make_parser"]

RULE = "tokens: generated tokens by the server's count; times: from when a request was due"

Way = Callable[[Tally], None]
"""A way to answer all prompts: adds each outcome to a tally as it arrives."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 1 if a request or a row failed or a file could not be written, and
    130 if the user interrupted it.
    """
    try:
        job = parse(argv)
        rivals = load_rivals(job) if job.baseline else None
        if job.scorer == "humaneval" and not works():
            raise BenchError(
                "--scorer humaneval: a sandboxed Python program cannot run on this machine"
            )
    except (DatasetError, BenchError) as error:
        print(f"effuse bench: {error}", file=sys.stderr)
        return 2
    bench = Bench(job, rivals)
    try:
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
        self._fleet = "fleet"
        self._heading = ""

    def run(self) -> None:
        """Measures every row. Raises KeyboardInterrupt after it has kept an interrupted row."""
        self._look()
        print(comparison.headings(), flush=True)
        if self._rivals is not None:
            for name, way in ways(self._job, self._rivals):
                self._measure(name, way)
        self._run_fleet()

    def finish(self) -> None:
        """Prints all figures and writes the files."""
        if not self.runs:
            print("effuse bench: stopped before the first measurement", file=sys.stderr)
        elif not save(self._job, self.runs, self._heading) and not self.status:
            self.status = 1
        if self.runs:
            tell(self._job, self.runs)
        if self.runs and self.status == 130:
            print(
                "effuse bench: stopped early; the figures cover the requests until then",
                file=sys.stderr,
            )
        if not self.status and any(run.failed for run in self.runs):
            self.status = 1

    def _look(self) -> None:
        """Prints the heading and the refused prompts before the first measurement."""
        job, about = self._job, ""
        try:
            found = served.look(job.traffic, job.items)
        except EffuseError as error:
            refused = ""
            print(f"effuse bench: {explain(error, job.traffic.target)}", file=sys.stderr)
        else:
            self._fleet, refused = f"fleet {found.workers}", found.refused
            about = f"; {found.model.name}, {served.settings(found, job.traffic.params)}"
        self._heading = f"{job.dataset.name}, {len(job.items)} prompts, {_how(job)}{about}"
        print(self._heading)
        if self._rivals is not None:
            beside = f"beside the fleet: {self._rivals.described()}"
            self._heading += f"; {beside}"
            print(beside)
        if refused:
            print(refused)

    def _run_fleet(self) -> None:
        job = self._job
        if job.rate is None or not job.sweep:
            self._measure(self._fleet, partial(send, job, job.rate), job.rate)
            return
        swept: list[Run] = []
        while (rate := next_rate(swept, job.rate)) is not None:
            self._measure(f"fleet, {rate:.3g}/s", partial(send, job, rate), rate)
            swept.append(self.runs[-1])

    def _measure(self, name: str, way: Way, rate: float | None = None) -> None:
        """Measures and keeps one row, even if interrupted; a complete one is graded and printed."""
        progress = _progress()
        tally = Tally(_ticker(progress, name, len(self._job.items)))
        try:
            with progress:
                way(tally)
        except (BenchError, EffuseError) as error:
            print(f"effuse bench: {name}: {error}", file=sys.stderr)
            self.status = 1
        finally:
            run = tally.run(name, self._job.goals, math.nan if rate is None else rate)
            if run.samples or run.failed:
                self.runs.append(run)
            for line in tally.tell_failures():
                print(f"effuse bench: {name}: {line}", file=sys.stderr)
        if self.runs and self.runs[-1] is run:
            if self._job.scorer is not None:
                self.runs[-1] = graded(run, self._job.items, self._job.scorer)
            print(comparison.row(self.runs[-1], self.runs[0]), flush=True)


def save(job: BenchJob, runs: Sequence[Run], heading: str) -> bool:
    """Writes the requested files. If one cannot be written, prints why and returns False."""
    try:
        if job.json is not None:
            rows = zip(as_json(runs), runs, strict=True)
            fields = [
                {"heading": heading, **row, **comparison.as_fields(run, runs[0])}
                for row, run in rows
            ]
            job.json.write_text(json.dumps(fields, indent=1) + "\n")
        if job.plot is not None:
            from effuse.cli.plots import plot  # imports matplotlib

            plot(runs, job.plot)
    except OSError as error:
        print(f"effuse bench: {error}", file=sys.stderr)
        return False
    return True


def tell(job: BenchJob, runs: Sequence[Run]) -> None:
    """Prints all figures."""
    print(f"{comparison.RULE}\n\n{table(runs)}")
    print(f"{len(job.items)} prompts, {_how(job)}; {RULE}")
    if job.sweep:
        print(verdict([run for run in runs if not math.isnan(run.rate)]))


def graded(run: Run, items: Sequence[Item], scorer: Scorer) -> Run:
    """The same run with each of its answers graded."""
    is_right = grader(scorer)
    samples = [replace(one, is_right=is_right(items[one.prompt], one.text)) for one in run.samples]
    return replace(run, samples=tuple(samples))


def send(job: BenchJob, rate: float | None, tally: Tally) -> None:
    """The fleet's way: sends every prompt to the router."""
    if rate is None:
        asyncio.run(send_in_turn(job.traffic, job.concurrency, tally))
    else:
        asyncio.run(send_as_they_arrive(job.traffic, rate, job.arrival_seed, tally))


def load_rivals(job: BenchJob) -> "Rivals":
    """The checked checkpoint of the baselines. Raises BenchError."""
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
        raise BenchError(str(error)) from error
    return rivals


def ways(job: BenchJob, rivals: "Rivals") -> Iterator[tuple[str, Way]]:
    """The rows before the fleet's, by name."""
    from effuse.cli import baseline, d2f_repo

    yield "base model", partial(baseline.base_model, rivals)
    if job.d2f_repo is not None:
        loop = partial(d2f_repo.authors_loop, job.d2f_repo, rivals, job.traffic.timeout_s)
        yield "D2F authors' loop", loop
    yield "single-process D2F", partial(baseline.single_process, rivals)


def _how(job: BenchJob) -> str:
    return f"{job.concurrency} at a time" if job.rate is None else "as they arrive"


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    return Progress(*columns, TimeElapsedColumn(), console=console, redirect_stdout=False)


def _ticker(progress: Progress, name: str, total: int) -> Callable[[], None]:
    task = progress.add_task(name, total=total)
    return partial(progress.advance, task)
