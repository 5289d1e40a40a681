"""`effuse demo`: starts a real fleet, or uses a running one, and shows how it solves fresh
problems.

The problems are drawn now, from the split that training never used. The exit status is 0 only if
every answer is right.
"""

import argparse
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from effuse.cli.arguments import (
    add_router,
    calling,
    command,
    credentials_of,
    requests_to,
    whole,
)
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.cli.generate import follow
from effuse.cli.process import end_as_by_ctrl_c
from effuse.cli.watch import watch
from effuse.client.answer import Answer, Stats
from effuse.client.credentials import Credentials
from effuse.client.params import Params, make_request
from effuse.problems.problem import Problem, check, problem
from effuse.worker.gpus import gpus_here

_TIMEOUT_S = 60.0
_OWN = Params(max_tokens=160)
# The bundled model can write a whole block at once. To make denoising visible, a block takes this
# many forwards, which leaves the answers as good.
_WATCHED = Params(
    max_tokens=160, algorithm="block_diffusion", remasking="low_confidence_static",
    denoising_steps=4,
)  # fmt: skip


class Demo(argparse.Namespace):
    """The values of the flags."""

    problems: int
    seed: int
    connector: str
    prefill: int
    decode: int
    target: str | None  # of a running fleet; None starts one
    credentials: Credentials


def main(argv: Sequence[str]) -> int:
    demo = parse(argv)
    console = Console(highlight=False)
    end_as_by_ctrl_c()
    with _fleet(console, demo) as address, calling(address, has_answered=True):
        right = solve(console, address, demo)
    console.print(f"\n{right} of {demo.problems} answers are right.", style="bold")
    if right < demo.problems:
        console.print(explain_errors(demo.problems - right, demo.seed), markup=False)
    return 0 if right == demo.problems else 1


@contextmanager
def _fleet(console: Console, demo: Demo) -> Iterator[str]:
    """The named fleet, or one that lives as long as this. Raises FleetError."""
    if demo.target is not None:
        yield demo.target
        return
    with console.status("starting a fleet"):
        fleet = Fleet(fleet_of(demo))
        fleet.start()
    try:
        _introduce(console, fleet)
        yield fleet.address
    finally:
        fleet.stop()


def make_parser() -> argparse.ArgumentParser:
    parser = command(
        "demo", "Start a fleet, solve fresh problems on it, and show their blocks filling in."
    )
    add = parser.add_argument
    add("--problems", type=whole(1), default=3, metavar="N", help="number of problems (default: 3)")
    add("--seed", type=whole(0), metavar="N", help="seed of the problems (default: new problems)")
    add("--connector", choices=("auto", "nixl", "zmq"), default="auto", help="how KV pages move")
    add("--prefill", type=whole(0), default=1, metavar="X", help="prefill workers (default: 1)")
    add("--decode", type=whole(1), default=1, metavar="Y", help="decode workers (default: 1)")
    about = "use a running fleet that serves the bundled model (default: start one)"
    add_router(parser, None, about)
    return parser


def parse(argv: Sequence[str]) -> Demo:
    parser = make_parser()
    demo: Demo = parser.parse_args(argv, Demo())
    demo.seed = secrets.randbits(32) if demo.seed is None else demo.seed
    demo.credentials = credentials_of(parser, demo) if demo.target else Credentials()
    return demo


def fleet_of(demo: Demo) -> FleetConfig:
    """The fleet to start: on the GPUs of this machine, however few, or on the CPU."""
    return FleetConfig(
        prefill=demo.prefill,
        decode=demo.decode,
        connector=demo.connector,
        gpus=gpus_here() or None,
        gpu_sharing=True,
    )


def solve(console: Console, address: str, demo: Demo) -> int:
    """Send the problems one after another; returns the number of right answers."""
    right = 0
    with requests_to(address, demo.credentials, _TIMEOUT_S) as client:
        for index in range(demo.problems):
            drawn = problem(demo.seed, index, "held_out")
            console.print(f"\nProblem {index + 1} (seed {demo.seed})", style="bold blue")
            console.print(drawn.prompt, markup=False)
            request = make_request(drawn.prompt, _WATCHED, drafts=True)
            with watch(console) as show:
                answer = follow(client.stream_of(request), show)
            own = client.generate(drawn.prompt, _OWN)
            right += _judge(console, drawn, answer, own)
    return right


def explain_errors(wrong: int, seed: int) -> str:
    """The text after a run with wrong answers, and how to repeat it."""
    usual = "The bundled model is small: it answers about 1 in 700 unseen problems wrongly."
    doubt = "If more than one answer is wrong, suspect a fault in effuse."
    again = f"`effuse demo --seed {seed}` draws the same problems again; the exit status is 1."
    return "\n".join([usual, *([doubt] if wrong > 1 else []), again])


def _introduce(console: Console, fleet: Fleet) -> None:
    console.print(f"A fleet is ready on {fleet.address} after {fleet.ready_s:.1f} s:")
    for name, process in fleet.processes.items():
        place = f" on {fleet.gpus[name]}" if name in fleet.gpus else ""
        console.print(f"  {name:<10} pid {process.pid}{place}")


def _forwards(stats: Stats) -> str:
    return f"{stats.forward_passes}, {stats.tokens_per_forward:.1f} tokens each"


def _judge(console: Console, drawn: Problem, answer: Answer, own: Answer) -> bool:
    """Prints whether the answer is right, its figures, and those at the model's own settings."""
    verdict = check(drawn, answer.text)
    stats, usage = answer.stats, answer.usage
    moved = f"{stats.kv_bytes:,} KV bytes over {stats.connector}" if stats.connector else "no KV"
    for name, value in (
        ("prompt", f"{usage.prompt_tokens} tokens"),
        ("first block", f"after {answer.first_block_s * 1e3:.0f} ms"),
        ("answer", f"{usage.completion_tokens} tokens after {answer.total_s * 1e3:.0f} ms"),
        ("forward passes", _forwards(stats)),
        ("at full speed", f"{_forwards(own.stats)}, after {own.total_s * 1e3:.0f} ms"),
        ("handed over", moved),
    ):
        console.print(f"  {name:<15} {value}", style="dim")
    if verdict.final:
        console.print("  right", style="bold green")
    else:
        console.print(f"  wrong; the right answer is:\n{drawn.answer}", style="bold red")
    return verdict.final
