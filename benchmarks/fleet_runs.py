"""One fleet under its loads, for `gpu_fleet`; and the utilisation of its GPUs meanwhile."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from effuse.benchmarks.fleet_figures import decoding, figures, links
from effuse.benchmarks.fleet_load import Client, Pace, Shape, Steady, Taken, Window, client_of
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.models.config import ModelConfig

PAGE_SIZE = 32
READY_S = 240.0
_SAMPLE_MS = 200
MEMORY = "0.45"  # of a GPU, so that the limits' engines fit in beside a fleet

STEADY_TURNS = 3
REST_S = 0.5  # until cancelled requests have ended


class Beside(Protocol):
    """Measurements that take turns while the fleet is idle."""

    def turn(self, shape: Shape, at_once: int, goes_on: bool) -> object:
        """Around each closed load; returns whether it is called again for the same load."""

    def steady(self, load: Steady, lags: Sequence[int]) -> object:
        """Before or after each steady load; `lags` are the requests' delays in steps behind the
        first.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A fleet and its limits. Without prefill workers, decode workers prefill."""

    prefill: int
    decode: int
    connector: str = "nixl"
    prompt_rows: int  # of one forward
    max_num_seqs: int  # of each decode worker
    caches: bool = True  # whether decode workers keep KV for later requests

    @property
    def name(self) -> str:
        """Its name in tables."""
        size = f"{self.max_num_seqs} seqs, {self.prompt_rows} prompt rows"
        size += "" if self.caches else ", no cache"
        if not self.prefill:
            return f"{self.decode} co-located, {size}"
        return f"{self.prefill}P{self.decode}D over {self.connector}, {size}"


@dataclass(frozen=True, slots=True)
class Kills:
    """Workers that are killed one after the other, evenly spaced, while requests arrive."""

    shape: Shape
    rate: float
    seconds: float
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """The loads of a fleet, in this order; all of them may be empty."""

    alone: Sequence[Shape] = ()  # one request at a time
    alone_count: int = 20
    closed: Sequence[tuple[Shape, int]] = ()  # with their numbers at a time
    steady: Sequence[Steady] = ()  # in turns with their counterparts
    arriving: Sequence[tuple[Shape, float]] = ()  # and requests a second
    kills: Kills | None = None  # last, because killed workers are not restarted
    warm_s: float = 3.0
    seconds: float = 6.0


@dataclass(frozen=True, slots=True)
class Killed:
    """Results of requests while workers were killed."""

    window: Window
    workers: dict[str, float]  # times of the kills, on the monotonic clock

    def rows(self) -> dict[str, Any]:
        """Plain values, with the number of requests that were running at one of the kills."""
        ends = [(one.sent, one.ended or float("inf")) for one in self.window.requests]
        running = sum(
            any(sent < at < ended for at in self.workers.values()) for sent, ended in ends
        )
        return {"workers": list(self.workers), "running": running, **asdict(figures(self.window))}


@dataclass(slots=True)
class Outcome:
    """Results of a fleet's loads. `rows` are plain values for JSON."""

    variant: Variant
    ready_s: float = 0.0
    alone: dict[str, list[Taken]] = field(default_factory=dict)
    closed: dict[tuple[str, int], Window] = field(default_factory=dict)
    arriving: dict[tuple[str, float], Window] = field(default_factory=dict)
    busy: dict[str, list[float]] = field(default_factory=dict)  # of each GPU, by load
    steady: dict[str, list[Pace]] = field(default_factory=dict)
    killed: Killed | None = None

    def everyone(self) -> list[Taken]:
        """All requests."""
        windows = [*self.closed.values(), *self.arriving.values()]
        alone = [one for requests in self.alone.values() for one in requests]
        return alone + [one for window in windows for one in window.requests]

    def rows(self) -> dict[str, Any]:
        """All measurements."""
        return {
            "name": self.variant.name,
            **asdict(self.variant),
            "ready_s": self.ready_s,
            "alone": {shape: [row(one) for one in took] for shape, took in self.alone.items()},
            "closed": [
                {"shape": shape, "at_once": at_once, "busy": self.busy.get(f"{shape} {at_once}")}
                | asdict(figures(window))
                for (shape, at_once), window in self.closed.items()
            ],
            "steady": {name: [asdict(one) for one in paces] for name, paces in self.steady.items()},
            "arriving": [
                {"shape": shape, "rate": rate, "busy": self.busy.get(f"{shape} {rate}/s")}
                | {"seconds": window.seconds}
                | asdict(figures(window))
                | {"each": [row(one) for one in window.requests]}
                for (shape, rate), window in self.arriving.items()
            ],
            "links": links(self.everyone()),
            "killed": self.killed.rows() if self.killed else None,
        }


def row(one: Taken) -> dict[str, object]:
    """One request as plain values for JSON."""
    return {
        "first_s": one.first_s if one.blocks else None,
        "gaps": [round(gap, 5) for gap in one.gaps],
        "handoff_s": one.handoff_s,
        "failure": one.failure,
    }


def run(
    variant: Variant,
    loads: Loads,
    *,
    model: Path,
    config: ModelConfig,
    gpus: Sequence[str],
    log_dir: Path,
    beside: Beside | None = None,
) -> Outcome:
    """Starts the fleet on these GPUs (none: the CPU), runs the loads and stops it.

    Raises FleetError if it does not start, and RuntimeError if no request of a load succeeded.
    """
    outcome = Outcome(variant)
    longest = max(shape.prompt + shape.answer for shape in _shapes(loads, config))
    settings = fleet_config(
        variant, longest, model=model, config=config, gpus=gpus, log_dir=log_dir
    )
    with Fleet(settings) as fleet, Busy(gpus) as busy:
        outcome.ready_s = fleet.ready_s
        _print(variant, f"ready in {fleet.ready_s:.0f} s")
        asyncio.run(_put_under(fleet, config, loads, outcome, busy, beside))
    return outcome


async def _put_under(
    fleet: Fleet,
    config: ModelConfig,
    loads: Loads,
    outcome: Outcome,
    busy: Busy,
    beside: Beside | None,
) -> None:
    words = min(config.mask_token_id, *config.eos_token_ids)
    async with client_of(fleet.address, words, config.block_size) as client:
        await _warm(client, _shapes(loads, config))
        for shape in loads.alone:
            outcome.alone[str(shape)] = _well(await client.alone(shape, loads.alone_count))
        for shape, at_once in loads.closed:
            if beside:
                await asyncio.to_thread(beside.turn, shape, at_once, True)
            window = await client.closed(shape, at_once, loads.warm_s, loads.seconds)
            if beside:
                await asyncio.to_thread(beside.turn, shape, at_once, False)
            outcome.closed[str(shape), at_once] = window
            outcome.busy[f"{shape} {at_once}"] = busy.shares(window.begin, window.end)
            _print_window(outcome.variant, f"{shape} x {at_once}", window)
        for load in loads.steady:
            outcome.steady[str(load)] = await _steady(client, load, outcome.variant, beside)
        for number, (shape, rate) in enumerate(loads.arriving):
            window = await client.arriving(shape, rate, loads.seconds, seed=number)
            outcome.arriving[str(shape), rate] = window
            outcome.busy[f"{shape} {rate}/s"] = busy.shares(window.begin, window.end)
            _print_window(outcome.variant, f"{shape} at {rate:g}/s", window)
        if loads.kills:
            outcome.killed = await _kill_under(fleet, client, loads.kills)
            _print_window(outcome.variant, f"{loads.kills.workers} killed", outcome.killed.window)


async def _steady(
    client: Client, load: Steady, variant: Variant, beside: Beside | None
) -> list[Pace]:
    """Turns of a steady load, every other one after its rival's instead of before. The rival's
    requests have the same lags as the fleet's last ones.
    """
    paces: list[Pace] = []
    for turn in range(STEADY_TURNS):
        if beside and turn % 2:
            await asyncio.to_thread(beside.steady, load, paces[-1].lags)
        paces.append(await client.steady(load))
        _print(variant, f"{load}: {paces[-1]}")
        await asyncio.sleep(REST_S)
        if beside and not turn % 2:
            await asyncio.to_thread(beside.steady, load, paces[-1].lags)
    return paces


async def _kill_under(fleet: Fleet, client: Client, kills: Kills) -> Killed:
    times: dict[str, float] = {}

    async def kill() -> None:
        for worker in kills.workers:
            await asyncio.sleep(kills.seconds / (len(kills.workers) + 1))
            times[worker] = time.monotonic()
            fleet.processes[worker].send(signal.SIGKILL)

    killing = asyncio.create_task(kill())
    window = await client.arriving(kills.shape, kills.rate, kills.seconds, seed=99)
    await killing
    return Killed(window, times)


def _shapes(loads: Loads, config: ModelConfig) -> list[Shape]:
    shapes = [*loads.alone, *(shape for shape, _ in [*loads.closed, *loads.arriving])]
    return [*shapes, *(load.shape(config.block_size) for load in loads.steady)]


async def _warm(client: Client, shapes: Sequence[Shape]) -> None:
    """Each shape a few times together, so that nothing is compiled during measurements."""
    for shape in dict.fromkeys(shapes):
        short = Shape(shape.prompt, min(shape.answer, 64))
        for at_once in (1, 8):
            _well(list(await asyncio.gather(*(client.ask(short) for _ in range(at_once)))))


def _well(requests: list[Taken]) -> list[Taken]:
    if requests and all(one.failure for one in requests):
        raise RuntimeError(f"no request ended well: {requests[0].failure}")
    return requests


def _print_window(variant: Variant, load: str, window: Window) -> None:
    found = figures(_checked(window))
    _print(
        variant,
        f"{load}: {found.tokens_per_s:.0f} tok/s, first {found.first_p50_s:.3f} "
        f"{found.first_p99_s:.3f}, gaps {found.gap_p50_s:.3f} {found.gap_p99_s:.3f}, "
        f"handoff {1e3 * found.handoff_p50_s:.1f} {1e3 * found.handoff_p99_s:.1f} ms, "
        f"batch {decoding(window):.1f}, failed {found.failed} {found.failures[:1]}",
    )


def _checked(window: Window) -> Window:
    _well(window.requests)
    return window


def _print(variant: Variant, line: str) -> None:
    print(f"{variant.name}: {line}", flush=True)


def fleet_config(
    variant: Variant,
    longest: int,
    *,
    model: Path,
    config: ModelConfig,
    gpus: Sequence[str],
    log_dir: Path,
) -> FleetConfig:
    """The fleet's, for requests of at most `longest` tokens."""
    pages = -(-longest // PAGE_SIZE)
    # A settled and an active block each, and room for prompts, which any decode worker may have to
    # prefill.
    step_rows = 2 * config.block_size * variant.max_num_seqs + variant.prompt_rows
    seqs = ("--max-num-seqs", str(variant.max_num_seqs))
    memory = ("--gpu-memory-utilization", MEMORY) if gpus else ("--num-pages", str(70 * pages))
    return FleetConfig(
        prefill=variant.prefill,
        decode=variant.decode,
        connector=variant.connector if variant.prefill else "zmq",
        model=model,
        worker_flags=(
            *("--page-size", str(PAGE_SIZE), "--max-model-len", str(pages * PAGE_SIZE)),
            *("--startup-timeout-s", str(READY_S)),
            *memory,
        ),
        prefill_flags=(
            ("--max-num-batched-tokens", str(variant.prompt_rows)) if variant.prefill else ()
        ),
        decode_flags=(
            *(*seqs, "--max-num-batched-tokens", str(step_rows)),
            *(() if variant.caches else ("--no-enable-prefix-caching",)),
        ),
        gpus=tuple(gpus) or None,
        gpu_sharing=True,
        log_dir=log_dir,
    )


class Busy:
    """Repeatedly asks nvidia-smi for the share of time that each GPU computed."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = list(dict.fromkeys(gpus))
        self._samples: list[tuple[float, str, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Busy:
        if self._gpus:
            self._process = subprocess.Popen(
                [
                    *("nvidia-smi", "--query-gpu=index,utilization.gpu"),
                    *("--format=csv,noheader,nounits", "-i", ",".join(self._gpus)),
                    *("-lms", str(_SAMPLE_MS)),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10.0)

    def shares(self, begin: float, end: float) -> list[float]:
        """Of each GPU in turn, between two points of the monotonic clock; empty if unknown."""
        found = [
            [share for at, gpu, share in self._samples if gpu == name and begin <= at < end]
            for name in self._gpus
        ]
        return [sum(each) / len(each) for each in found if each]

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            gpu, _, share = line.partition(",")
            if share.strip().isdigit():
                self._samples.append((time.monotonic(), gpu.strip(), int(share) / 100))


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Prints how long it took."""
    begin = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - begin:.0f} s", flush=True)
