"""Kills and freezes single ranks of workers of two devices while clients ask; counts wrong answers.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.rank_faults --faults 40
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from checkpoints import Architecture
from e2e.client import connect
from e2e.comparison import Pair
from e2e.test_detection import lives
from e2e.test_equality import solid_jobs
from e2e.tiny import tiny_fleet

from effuse.cli.fleet import Fleet

CLIENTS = 4
_LIMIT_S = 60.0


@dataclass
class Ledger:
    """Results of all clients and of all faults."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    is_over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self) -> str:
        """One line."""
        took = sorted(self.took_s) or [0.0]
        return (
            f"{self.right} right, {len(self.wrong)} wrong, {len(self.failed)} failed; faults "
            f"{self.faults}; p50 {took[len(took) // 2]:.2f} s, most {took[-1]:.2f} s"
        )


def rank_pids(module: str) -> list[int]:
    """Processes of this machine that run `python -m module`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if module.encode() in words:
            found.append(int(path.parent.name))
    return found


def ask(fleet: Fleet, pairs: Sequence[Pair], number: int, ledger: Ledger) -> None:
    """Sends requests until the ledger is over."""
    with connect(fleet.address) as client:
        at = number
        while not ledger.is_over.is_set():
            job, expected = pairs[at % len(pairs)]
            at += 1
            began = time.monotonic()
            try:
                answer = client.generate(job.message())
            except grpc.RpcError as error:
                with ledger.lock:
                    ledger.failed.append(str(error))
                continue
            with ledger.lock:
                ledger.took_s.append(time.monotonic() - began)
                if tuple(answer.token_ids) == expected.token_ids:
                    ledger.right += 1
                else:
                    ledger.wrong.append(str(job))


def inject(fleet: Fleet, count: int, ledger: Ledger) -> None:
    """Each fault hits one rank, once both workers of its kind are ready."""
    rng = random.Random(1)
    for _ in range(count):
        role = rng.choice(("prefill", "decode"))
        before = wait_ready(fleet)
        victim = rng.choice(rank_pids(f"effuse.{role}_worker.rank"))
        kind = rng.choice((signal.SIGKILL, signal.SIGSTOP))
        began = time.monotonic()
        os.kill(victim, kind)
        if not has_happened(victim, kind):
            raise AssertionError(f"{kind.name} of {victim} was not seen to happen")
        name = f"{role} rank {'killed' if kind is signal.SIGKILL else 'frozen'}"
        ledger.faults[name] = ledger.faults.get(name, 0) + 1
        ended = began + _LIMIT_S
        while Path(f"/proc/{victim}").exists():
            if time.monotonic() > ended:
                raise AssertionError(f"{name}: process {victim} is still there")
            time.sleep(0.1)
        gone_s = time.monotonic() - began
        wait_ready(fleet, before)
        print(f"{name}: gone after {gone_s:.1f} s, ready after {time.monotonic() - began:.1f} s")
        print(f"  {ledger.tell()}", flush=True)


def has_happened(pid: int, kind: signal.Signals) -> bool:
    """Whether the process has ended or, of a freeze, stands still."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in ("Z", "X") or (kind is signal.SIGSTOP and state == "T"):
            return True
        time.sleep(0.02)
    return False


def wait_ready(fleet: Fleet, before: dict[str, str] | None = None) -> dict[str, str]:
    """The lives of all four workers once they are ready, as the router sees them, and one of them
    is in another life than `before`.
    """
    ended = time.monotonic() + _LIMIT_S
    with connect(fleet.address) as client:
        while time.monotonic() < ended:
            found = lives(client)
            if len(found) == 4 and found != before:
                return found
            time.sleep(0.2)
    raise AssertionError(f"workers were not ready after {_LIMIT_S:g} s")


def storm(architecture: Architecture, connector: str, count: int) -> Ledger:
    """Runs one storm over 2P2D with two ranks in each worker."""
    pairs = solid_jobs(architecture, "d2f", seed=2)
    ledger = Ledger()
    flags = ("--tensor-parallel-size", "2", "--hang-timeout-s", "3")
    with (
        tiny_fleet(
            architecture, connector=connector, prefill=2, decode=2, worker_flags=flags
        ) as fleet,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        asking = [pool.submit(ask, fleet, pairs, number, ledger) for number in range(CLIENTS)]
        try:
            inject(fleet, count, ledger)
        finally:
            ledger.is_over.set()
        for one in asking:
            one.result()
    return ledger


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a storm; 1 if an answer was wrong or a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--connector", default="nixl", choices=("nixl", "zmq"))
    found = parser.parse_args(argv)
    ledger = storm("sdar", found.connector, found.faults)
    print(ledger.tell())
    for text in (ledger.wrong + ledger.failed)[:5]:
        print(text)
    return int(bool(ledger.wrong or ledger.failed))


if __name__ == "__main__":
    sys.exit(main())
