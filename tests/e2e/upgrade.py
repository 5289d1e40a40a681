"""A fleet of another commit is replaced by one of this checkout, process by process, under load.

No request may fail, and a problem must get the same answer in every phase.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.upgrade --other v0.2.0 [--back]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import redis_server
from e2e.client import wait_until

import effuse
from effuse.problems.problem import problem

HERE: Final = Path(__file__).parents[2]
KINDS: Final = ("router", "prefill", "decode")
MODULES: Final = {
    "router": "effuse.router",
    "prefill": "effuse.prefill_worker",
    "decode": "effuse.decode_worker",
}
WORKERS: Final = 2  # of each kind
CLIENTS: Final = 6
PROBLEMS: Final = 200
LULL_S: Final = 4.0
START_S: Final = 120.0
END_S: Final = 90.0


@dataclass
class Ledger:
    """What clients saw, by phase."""

    phase: str = "before"
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)  # by phase and prefill
    longest_s: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, index: int, phase: str, seconds: float, answer: effuse.Answer) -> None:
        """Counts an answer, and compares it with earlier ones to the same problem."""
        with self.lock:
            self.answers[phase, answer.stats.prefill_worker] += 1
            self.longest_s[phase] = max(seconds, self.longest_s.get(phase, 0.0))
            if (first := self.texts.setdefault(index, answer.text)) != answer.text:
                self.wrong.append(f"{phase}: problem {index}: {answer.text!r}, before {first!r}")

    def solved(self) -> float:
        """The share of problems with the right answer."""
        right = [text.strip() == problem(1, index).answer for index, text in self.texts.items()]
        return sum(right) / max(1, len(right))

    def print(self) -> None:
        """One line for each phase, and the first failures."""
        for phase, longest_s in self.longest_s.items():
            by = {name or "none": n for (one, name), n in self.answers.items() if one == phase}
            print(f"{phase}: {by.pop('none', 0)} answers without a prefill worker, {by}, longest "
                  f"{longest_s:.2f} s")  # fmt: skip
        total = self.answers.total()
        print(f"{total} answers, {len(self.failed)} failed, {len(self.wrong)} wrong, "
              f"{self.solved():.3f} of {len(self.texts)} problems solved")  # fmt: skip
        for line in (*self.failed[:5], *self.wrong[:5]):
            print(line)


class MixedFleet:
    """Processes of two trees over one Redis."""

    def __init__(self, redis_url: str, home: Path, connector: str) -> None:
        self._redis_url = redis_url
        self._home = home
        self._connector = connector
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = ""  # of the newest router

    def start(self, tree: Path, kind: str, name: str) -> None:
        """Starts a process of this tree, and returns once it is ready."""
        ready = self._home / f"{name}.json"
        flags = ["--redis-url", self._redis_url, "--fleet", "mixed", "--port", "0"]
        flags += ["--ready-file", str(ready)]
        if kind != "router":
            flags += ["--device", "cpu", "--connector", self._connector, "--worker-id", name]
        with (self._home / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULES[kind], *flags],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONSAFEPATH": "1"},
                stdout=log,
                stderr=log,
            )
        self._processes[name] = process
        wait_until(
            lambda: ready.exists() or process.poll() is not None, f"{name} does not start", START_S
        )
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended: {(self._home / f'{name}.log').read_text()[-2000:]}")
        if kind == "router":
            self.address = json.loads(ready.read_text())["address"]

    def end(self, name: str) -> None:
        """Ends a process in order."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        if status := process.wait(END_S):
            raise RuntimeError(f"{name} ended with {status}")

    def close(self) -> None:
        """Ends all processes."""
        for process in self._processes.values():
            process.kill()
            process.wait()


def replace_all(
    fleet: MixedFleet, before: Path, after: Path, order: Sequence[str], ledger: Ledger
) -> None:
    """Starts the fleet `before`, then replaces each of its processes by one of the tree `after`."""
    numbers = {kind: range(1 if kind == "router" else WORKERS) for kind in KINDS}
    for kind in ("decode", "prefill", "router"):
        for number in numbers[kind]:
            fleet.start(before, kind, f"{kind}-{number}")
    with asking(fleet, ledger):
        time.sleep(LULL_S)
        for kind in order:
            for number in numbers[kind]:
                fleet.start(after, kind, f"{kind}-{number}-new")
                ledger.phase = f"{kind}-{number} and its successor"
                time.sleep(LULL_S)
                fleet.end(f"{kind}-{number}")
                ledger.phase = f"{kind}-{number} replaced"
                time.sleep(LULL_S)
        ledger.phase = "after"
        time.sleep(2 * LULL_S)


@contextlib.contextmanager
def asking(fleet: MixedFleet, ledger: Ledger) -> Iterator[None]:
    """Clients that ask the newest router one problem after another."""
    ends = threading.Event()

    def ask(number: int) -> None:
        chance = random.Random(number)
        while not ends.is_set():
            index, phase, began = chance.randrange(PROBLEMS), ledger.phase, time.monotonic()
            chat = effuse.Chat().user(problem(1, index).prompt)
            try:
                with effuse.Client(fleet.address) as client:
                    answer = client.generate(chat, effuse.Params(max_tokens=128))
            except effuse.EffuseError as error:
                ledger.failed.append(f"{phase}: {error!r}")
                continue
            ledger.add(index, phase, time.monotonic() - began, answer)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def tree_of(commit: str, home: Path) -> Iterator[Path]:
    """The files of a commit of this repository."""
    tree = home / "tree"
    git = ["git", "-C", str(HERE), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
    try:
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what clients saw; 1 if a request failed, an answer differed, or no new worker
    answered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", required=True, metavar="COMMIT", help="of the other fleet")
    parser.add_argument("--back", action="store_true", help="from this checkout to the other one")
    parser.add_argument("--order", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--connector", choices=("nixl", "zmq"), default="nixl")
    args = parser.parse_args(argv)
    ledger = Ledger()
    with (
        redis_server.running() as redis,
        tempfile.TemporaryDirectory(prefix="effuse-upgrade-") as home,
        tree_of(args.other, Path(home)) as other,
        contextlib.closing(MixedFleet(redis.connection_url, Path(home), args.connector)) as fleet,
    ):
        trees = (HERE, other) if args.back else (other, HERE)
        replace_all(fleet, *trees, args.order, ledger)
    ledger.print()
    by_new = sum(n for (phase, name), n in ledger.answers.items() if phase == "after" and name)
    return int(bool(ledger.failed or ledger.wrong) or not by_new or ledger.solved() < 0.98)


if __name__ == "__main__":
    sys.exit(main())
