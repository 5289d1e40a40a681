"""The first request's handoff on each new pair of workers, compared with the median of the next
ones.

A fleet of one pair starts and becomes ready; then requests follow one another, each with another
prompt of the same length. The same is repeated after killing the prefill engine, and after killing
the decode engine. Prefill is remote, so each request uses the pair's link.

    python -m effuse.benchmarks.first_handoff --connector nixl [--model DIR] [--device cuda]

Prints a table and exits with 1 if a first handoff took more than MOST times the median. With enough
GPUs each worker has as many of its own as `--sizes` asks for.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from effuse.benchmarks.report import Figure, Report
from effuse.cli.commands import SIZE_FLAG, FleetConfig
from effuse.cli.fleet import Fleet
from effuse.client.client import Client
from effuse.client.params import Params
from effuse.worker.gpus import gpus_here

MOST = 3.0
NUM_NEXT = 100
READY_S = 900.0
BACK_S = 300.0
REQUEST_S = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen benchmarks; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m effuse.benchmarks.first_handoff")
    parser.add_argument("--connector", choices=("auto", "nixl", "zmq"), default="nixl")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--model", type=Path, help="checkpoint directory (default: the bundled model)"
    )
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each prompt")
    parser.add_argument("--next", type=int, default=NUM_NEXT, help="requests after the first one")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs=2,
        default=(1, 1),
        metavar=("PREFILL", "DECODE"),
        help="ranks of each worker",
    )
    parser.add_argument("--no-kills", action="store_true", help="only the fleet that is ready")
    parser.add_argument("--worker-flag", action="append", default=[], help="of both workers")
    parser.add_argument("--log-dir", type=Path, help="where the processes log")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/first_handoff.json"))
    asked = parser.parse_args(argv)
    report = Report(f"first handoff of a new pair, {asked.device}, {asked.connector}")
    with Fleet(_config(asked)) as fleet, Client(fleet.address, timeout_s=REQUEST_S) as client:
        kills = () if asked.no_kills else ("prefill engine killed", "decode engine killed")
        for name in ("a fleet that is ready", *kills):
            if name.endswith("killed"):
                _replace_engine(fleet, f"{name.split()[0]}-0")
            figure, note = _measured(client, name, asked.tokens, asked.next)
            report.figures.append(figure)
            report.notes.append(note)
            print(note, flush=True)
    report.print()
    report.write(asked.json)
    return report.exit_status


def _config(asked: argparse.Namespace) -> FleetConfig:
    """One prefill and one decode worker; every prompt is handed over."""
    prefill, decode = asked.sizes
    on_cuda, num_gpus = asked.device == "cuda", prefill + decode
    started = "--startup-timeout-s", str(READY_S)
    return FleetConfig(
        connector=asked.connector,
        model=asked.model,
        router_flags=("--prefill", "remote"),
        worker_flags=("--device", asked.device, *started, *asked.worker_flag),
        prefill_flags=(SIZE_FLAG, str(prefill)),
        decode_flags=(SIZE_FLAG, str(decode)),
        gpus=tuple(gpus_here())[:num_gpus] if on_cuda else None,
        gpu_sharing=on_cuda and len(gpus_here()) < num_gpus,
        log_dir=asked.log_dir,
    )


def _measured(client: Client, name: str, num_tokens: int, num_next: int) -> tuple[Figure, str]:
    """The first handoff over the median of the next ones, with both times."""
    draw = random.Random(name)
    first, *others = (_handoff_s(client, draw, num_tokens) for _ in range(1 + num_next))
    median = statistics.median(others)
    figure = Figure(
        name=f"first handoff, {name}",
        value=first / median,
        limit=MOST,
        unit="x",
        bound="at most",
        against=f"median of the next {num_next}",
    )
    span = f"{min(others) * 1e3:.2f} to {max(others) * 1e3:.2f} ms"
    return figure, f"{name}: first {first * 1e3:.2f} ms, then {median * 1e3:.2f} ms ({span})"


def _handoff_s(client: Client, draw: random.Random, num_tokens: int) -> float:
    """Seconds of one request's handoff. Raises RuntimeError if its prompt was not handed over."""
    prompt = [draw.randrange(10, 200) for _ in range(num_tokens)]
    stats = client.generate(prompt, Params(max_tokens=1)).stats
    if not stats.kv_bytes:
        raise RuntimeError("a prompt was not handed over")
    return stats.handoff_s


def _replace_engine(fleet: Fleet, name: str) -> None:
    """Kills the engine of a worker and waits for the next one."""
    worker = psutil.Process(fleet.processes[name].pid)
    (engine,) = worker.children()
    os.kill(engine.pid, signal.SIGKILL)
    deadline = time.monotonic() + BACK_S
    while [child.pid for child in worker.children()] in ([], [engine.pid]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no other engine of {name} was there within {BACK_S:g} s")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
