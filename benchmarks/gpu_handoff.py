"""`python -m effuse.benchmarks.gpu_handoff`: pages from GPU to GPU, compared with the bare
transports.

Two processes, each of which sees one GPU of those in EFFUSE_GPUS (0,1 or 0; none: the CPU). Pages
of the Dream-7B shape are scattered in both pools. A handoff is timed as engines see it, including
digests: from the moment that the pages are final until the receiver's engine knows that all is
verified, and until the sender's does. It was requested 5 ms before, as by an engine whose forward
is queued. Processes of one machine share the clock for that. In turns between the same two
processes there is a bare NIXL write of the same pages from prepared lists, to the receiver's
answer, with both ends polling without a pause. It takes the faster of two ways, one descriptor for
each page or for each of its groups of layers. For ZMQ it is a bare push of as many bytes of host
memory. With --busy our connectors also poll without a pause. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from effuse.benchmarks.raw_transfer import Move, raw_rounds_s, receive, scattered

MODULE = "effuse.benchmarks.gpu_handoff"
PAGE_TOKENS = 32
PAGE_BYTES = 28 * 2 * 4 * PAGE_TOKENS * 128 * 2
GROUPS = 7  # groups of layers in which a page leaves
TOKENS = (512, 2048, 8192)
WARM_UP, ROUNDS = 5, 25
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Prompts of one length over one connector; milliseconds, medians."""

    connector: str
    polling: str
    tokens: int
    megabytes: float
    handoff_ms: float  # until the sender knows of its end
    handoff_p99_ms: float
    bare_ms: float  # until the sender knows of its end
    ratio: float  # of the two above
    post_ms: float  # of the bare write: until posting it has returned
    gigabytes_per_s: float
    verified_ms: float = math.nan  # until the receiver may use the pages; earlier files lack it


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was asked for."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--connector", choices=("nixl", "zmq"), action="append")
    parser.add_argument("--tokens", type=int, action="append", help=f"else {TOKENS}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/gpu_handoff.json"))
    parser.add_argument("--busy", action="store_true", help="also poll without a pause")
    parser.add_argument("--end", choices=("sender", "receiver", "copy"), help=argparse.SUPPRESS)
    parser.add_argument("--pages", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="dream-7b", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="bfloat16", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.end:
        from effuse.benchmarks.gpu_handoff_end import End, copy_between, memory_for, serve

        if asked.end == "copy":
            copy_between(64 * PAGE_BYTES)
            return 0
        connector = asked.connector[0]
        memory = memory_for(asked.pages, asked.model, asked.dtype, connector)
        serve(End(asked.end, connector, memory, is_busy=asked.busy))
        return 0
    lengths = asked.tokens or TOKENS
    gpus = [one for one in os.environ.get("EFFUSE_GPUS", "").split(",") if one]
    results = [
        result
        for kind in asked.connector or ("nixl", "zmq")
        for result in measure(kind, lengths, asked.rounds, is_busy=asked.busy, gpus=gpus)
    ]
    print(table(results), flush=True)
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return 0


def measure(
    kind: str, lengths: Sequence[int], rounds: int, *, is_busy: bool, gpus: Sequence[str]
) -> list[Result]:
    """Handoffs over `kind` from the first of these GPUs to the last, between two new processes,
    each length with its limit.
    """
    flags = ["--connector", kind, "--pages", str(max(lengths) // PAGE_TOKENS)]
    flags += ["--busy"] if is_busy else []
    with end("sender", flags, gpus[:1]) as sender, end("receiver", flags, gpus[-1:]) as receiver:
        hello = receiver.ask(do="hello")
        receiver.ask(do="meet", **sender.ask(do="meet", **hello))
        polling = "without a pause" if is_busy else "as served"
        return [
            replace(_measure(kind, tokens, rounds, sender, receiver), polling=polling)
            for tokens in lengths
        ]


def _measure(kind: str, tokens: int, rounds: int, sender: Peer, receiver: Peer) -> Result:
    count = tokens // PAGE_TOKENS
    ours: list[float] = []
    verified: list[float] = []
    bare: dict[int, list[dict[str, float]]] = {1: [], GROUPS: []}
    for number in range(WARM_UP + rounds):
        pages = {"source": scattered(count, 2 * number), "target": scattered(count, 2 * number + 1)}
        for parts, wrote in bare.items() if kind == "nixl" else ():
            receiver.send(do="answer")
            wrote.append(sender.ask(do="write", parts=parts, **pages))
            receiver.receive()
        held = receiver.ask(do="reserve", name=f"{tokens} {number}", pages=pages["target"])
        pushed = sender.ask(do="push", pages=pages["source"], **held)
        ours.append(pushed["seconds"])
        verified.append(receiver.receive()["verified_at"] - pushed["final_at"])
    if kind == "zmq":
        move = Move(PAGE_BYTES, scattered(count, 1), scattered(count, 2))
        ways = [median_of(times) for times in raw_rounds_s("zmq", move, WARM_UP + rounds).values()]
        return _result(kind, tokens, ours[WARM_UP:], verified[WARM_UP:], min(ways), 0.0)
    rounds_of = [wrote[WARM_UP:] for wrote in bare.values()]
    best = min(rounds_of, key=lambda wrote: statistics.median(one["seconds"] for one in wrote))
    limit, post = (statistics.median(one[name] for one in best) for name in ("seconds", "post_s"))
    return _result(kind, tokens, ours[WARM_UP:], verified[WARM_UP:], limit, post)


def median_of(rounds: Sequence[float]) -> float:
    """Of those after the first few, which warm up."""
    return statistics.median(rounds[WARM_UP:])


def _result(
    kind: str, tokens: int, ours: list[float], verified: list[float], limit: float, post_s: float
) -> Result:
    handoff, num_bytes = statistics.median(ours), tokens // PAGE_TOKENS * PAGE_BYTES
    return Result(
        connector=kind,
        polling="",
        tokens=tokens,
        megabytes=num_bytes / 1e6,
        handoff_ms=1e3 * handoff,
        handoff_p99_ms=1e3 * sorted(ours)[int(0.99 * (len(ours) - 1))],
        bare_ms=1e3 * limit,
        ratio=handoff / limit,
        post_ms=1e3 * post_s,
        gigabytes_per_s=num_bytes / handoff / 1e9,
        verified_ms=1e3 * statistics.median(verified),
    )


def table(results: Sequence[Result]) -> str:
    """The results, a line each, as Markdown."""
    head = (
        "| connector | our polling | tokens | MB | verified ms | sender knows ms | p99 | bare ms "
    )
    head += "| verified / bare | sender knows / bare | bare post ms | GB/s |"
    lines = [head, "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    lines += [
        f"| {r.connector} | {r.polling} | {r.tokens} | {r.megabytes:.1f} | {r.verified_ms:.3f} | "
        f"{r.handoff_ms:.3f} | {r.handoff_p99_ms:.3f} | {r.bare_ms:.3f} | "
        f"{r.verified_ms / r.bare_ms:.2f} | {r.ratio:.2f} | {r.post_ms:.3f} | "
        f"{r.gigabytes_per_s:.1f} |"
        for r in results
    ]
    return "\n".join(lines)


class Peer:
    """One of the two processes, with JSON lines as messages."""

    def __init__(self, process: subprocess.Popen[str], output: IO[str]) -> None:
        self._process = process
        self._output = output

    def send(self, **command: object) -> None:
        """Sends it a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Its next answer."""
        return receive(self._output)

    def ask(self, **command: object) -> dict[str, Any]:
        """Sends it a command, and returns the answer."""
        self.send(**command)
        return self.receive()


def end(role: str, flags: Sequence[str], gpus: Sequence[str]) -> AbstractContextManager[Peer]:
    """One of the two, with a pool on the named GPU, if there is one."""
    return child(MODULE, ["--end", role, *flags], gpus)


@contextmanager
def child(module: str, flags: Sequence[str], gpus: Sequence[str]) -> Iterator[Peer]:
    """A process of this module that sees these GPUs, or those of this process if none is named."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})},
    )
    assert process.stdout is not None
    try:
        yield Peer(process, process.stdout)
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def peer_copy(gpus: Sequence[str]) -> float:
    """Bytes a second of a copy of 117 MB from the first of these GPUs to the second, best of a few;
    the copying process sees both.
    """
    with child(MODULE, ["--end", "copy"], gpus[:2]) as copier:
        return float(copier.receive()["bytes_per_s"])


if __name__ == "__main__":
    sys.exit(main())
