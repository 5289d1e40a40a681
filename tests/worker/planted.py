"""Plants differences between the commands that a leader sends and those that a rank reads.

From the root of the checkout: PYTHONPATH=src:tests python -P -m worker.planted --count 100
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from checkpoints import write_tiny_checkpoint
from slowness import patient

import effuse
from effuse.worker.rank_messages import COMMANDS, ENCODER, Command, RunParts
from effuse.worker.ranks import Ranks
from effuse.worker.watchdog import GroupBroken

LIMIT_S = patient(2.0)
KINDS = ("number", "bit", "earlier", "twice")
CHANGED = "changed"
_FIRST = 30  # commands among which the changed one is; three answers take more


def ranks_of(llm: effuse.LLM) -> Ranks:
    """Those of an engine of several devices."""
    ranks = llm._engine.ranks
    assert ranks is not None
    return ranks


class Tampering:
    """Stands before a rank's socket, and changes one command or its place."""

    def __init__(self, socket: zmq.Socket[bytes], kind: str, at: int, rng: random.Random) -> None:
        self._socket = socket
        self._kind = kind
        self._left = at
        self._rng = rng
        self._earlier: list[bytes] = []
        self.num_changed = 0

    def send(self, data: bytes, flags: int) -> None:
        """Sends a command, or what replaces it."""
        for one in [data] if self.num_changed else self._instead_of(data):
            self._socket.send(one, flags)

    def _instead_of(self, data: bytes) -> list[bytes]:
        if self._left or not self._earlier:
            self._left = max(0, self._left - 1)
            self._earlier.append(data)
            return [data]
        match self._kind:
            case "number":
                command: Command = COMMANDS.decode(data)
                if not isinstance(command, RunParts):
                    return [data]  # the next one
                return self._is_done(ENCODER.encode(RunParts(command.number + 1, command.parts)))
            case "bit":
                flipped = bytearray(data)
                flipped[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
                return self._is_done(bytes(flipped))
            case "earlier":
                return self._is_done(self._rng.choice([d for d in self._earlier if d != data]))
            case _:
                return self._is_done(data, data)

    def _is_done(self, *data: bytes) -> list[bytes]:
        self.num_changed = 1
        print(CHANGED, flush=True)
        return list(data)

    def close(self, linger: int) -> None:
        """Closes the socket."""
        self._socket.close(linger)


def plant_here(kind: str, seed: int) -> None:
    """Makes a group in this process and plants a difference; prints what becomes of it.

    A collective of two sizes may end the process.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="effuse-planted-") as home:
        path = write_tiny_checkpoint(Path(home) / "model", "sdar", seed=2)
        with effuse.LLM(path, device="cpu", num_pages=64, tensor_parallel_size=2) as group:
            ranks = ranks_of(group)
            rank = ranks._others[1]
            tampering = Tampering(rank.commands, kind, rng.randrange(_FIRST), rng)
            rank.commands = tampering  # type: ignore[assignment]
            params = effuse.Params(max_tokens=32, ignore_eos=True)
            while tampering.num_changed == 0:
                try:
                    group.generate(["ab", "a longer prompt"], params)
                except GroupBroken as error:
                    print("broken:", error, flush=True)
                    return
                if tampering.num_changed:
                    print("answered", flush=True)


@dataclass(frozen=True, slots=True)
class Planted:
    """What became of a difference."""

    seconds: float  # from the difference to the end of the group
    lines: tuple[str, ...]  # that the process printed afterwards

    @property
    def has_answered(self) -> bool:
        """Whether an answer came after the difference."""
        return "answered" in self.lines


def plant(kind: str, seed: int) -> Planted:
    """Plants a difference in a process of its own. Raises AssertionError if none was planted."""
    command = [sys.executable, "-P", "-m", "worker.planted", "--one", kind, str(seed)]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment()
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == CHANGED:
            break
    began = time.monotonic()
    lines = []
    for line in child.stdout:
        lines.append(line.strip())
        if line.startswith(("broken", "answered")):
            break
    seconds = time.monotonic() - began
    out, err = child.communicate(timeout=patient(60.0))
    assert lines or child.returncode < 0, f"{child.returncode}: {out}{err}"
    return Planted(seconds, (*lines, *out.splitlines()))


def _environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}


def main(argv: Sequence[str] | None = None) -> int:
    """Plants differences, each in a group of its own; 1 if one gave an answer or took too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "SEED"), help="in this process")
    found = parser.parse_args(argv)
    if found.one:
        plant_here(found.one[0], int(found.one[1]))
        return 0
    all_planted = []
    for seed in range(found.count):
        kind = KINDS[seed % len(KINDS)]
        all_planted.append(one := plant(kind, seed))
        print(f"{seed} {kind}: ended after {one.seconds:.2f} s {one.lines}", flush=True)
    answered = sum(one.has_answered for one in all_planted)
    late = sum(one.seconds > LIMIT_S for one in all_planted)
    print(
        f"{found.count} differences: {answered} answers; {late} groups ended later than "
        f"{LIMIT_S:g} s, the last one after {max(one.seconds for one in all_planted):.2f} s"
    )
    return int(answered > 0 or late > 0)


if __name__ == "__main__":
    sys.exit(main())
