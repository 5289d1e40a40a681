"""Kills and freezes single ranks of workers of two devices while clients ask; counts wrong answers.

One worker of each role may be down at a time, so that one of each is always ready. With `--gpus`
the workers are two co-located groups of two GPUs, with the bundled model. With `--engines` two
prefill and two decode workers of one rank share up to two GPUs, in bf16 with `--batch-invariant`,
and their engines are killed. With `--tier` few pages are left, and units come back from below them.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.rank_faults --faults 40
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import grpc
import psutil
from e2e.client import connect
from e2e.degrees import Asked
from e2e.kept import LLADA2
from e2e.same_answers import BASE, HOST_GIB, answers, loaded_bytes, place_of, requests
from e2e.test_detection import lives
from e2e.test_equality import solid_jobs
from e2e.tiny import fleet_of, tiny_fleet
from slowness import patient

import effuse
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.client.params import make_request
from effuse.placement.records import Role
from effuse.problems.problem import problem
from effuse.worker.gpus import gpus_here

CLIENTS = 4
ROLES: tuple[Role, ...] = ("prefill", "decode")
_LIMIT_S = patient(180.0)
_PAUSE_S = 0.2  # of a client, so that workers that start get a processor too


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
            f"{self.faults}; p50 {took[len(took) // 2]:.2f} s, "
            f"p99 {took[len(took) * 99 // 100]:.2f} s, most {took[-1]:.2f} s"
        )


def pids_of(fleet: Fleet, role: Role, part: str) -> list[int]:
    """Processes of a role's ranks, without their leaders (`rank`), or of its engines (`build`)."""
    names = (f"{role}-{number}" for number in range(2))
    return [one.pid for name in names for one in ranks_of(fleet, name, role, part)]


def ranks_of(fleet: Fleet, name: str, role: Role, part: str = "rank") -> list[psutil.Process]:
    """The same of one worker."""
    module, found = f"effuse.{role}_worker.{part}", []
    for child in psutil.Process(fleet.processes[name].pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if module in child.cmdline():
                found.append(child)
    return found


def ask(fleet: Fleet, asked: Sequence[Asked], number: int, ledger: Ledger) -> None:
    """Sends requests until the ledger is over."""
    with connect(fleet.address) as client:
        at = number
        while not ledger.is_over.is_set():
            request, expected = asked[at % len(asked)]
            at += 1
            began = time.monotonic()
            try:
                answer = client.generate(request)
            except grpc.RpcError as error:
                with ledger.lock:
                    ledger.failed.append(str(error))
                continue
            with ledger.lock:
                ledger.took_s.append(time.monotonic() - began)
                if list(answer.token_ids) == list(expected):
                    ledger.right += 1
                else:
                    ledger.wrong.append(str(request))
            time.sleep(_PAUSE_S)


def inject(fleet: Fleet, role: Role, count: int, ledger: Ledger, until: float, part: str) -> None:
    """Each fault hits one rank or engine of a role, once both workers of that role are ready; none
    after `until`."""
    rng = random.Random(role)
    for number in range(count):
        before = wait_ready(fleet, role)
        if time.monotonic() > until:
            return
        victim = rng.choice(pids_of(fleet, role, part))
        kind = signal.SIGKILL if part == "build" else (signal.SIGKILL, signal.SIGSTOP)[number % 2]
        began = time.monotonic()
        os.kill(victim, kind)
        if not has_happened(victim, kind):
            raise AssertionError(f"{kind.name} of {victim} was not seen to happen")
        did = "killed" if kind is signal.SIGKILL else "frozen"
        name = f"{role} {'engine' if part == 'build' else 'rank'} {did}"
        ended = began + _LIMIT_S
        while Path(f"/proc/{victim}").exists():
            if time.monotonic() > ended:
                raise AssertionError(f"{name}: process {victim} is still there")
            time.sleep(0.1)
        gone_s = time.monotonic() - began
        wait_ready(fleet, role, before)
        ready_s = time.monotonic() - began
        with ledger.lock:
            ledger.faults[name] = ledger.faults.get(name, 0) + 1
            print(f"{name}: gone after {gone_s:.1f} s, ready after {ready_s:.1f} s")
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


def wait_ready(fleet: Fleet, role: Role, before: dict[str, str] | None = None) -> dict[str, str]:
    """The lives of both workers of a role once they are ready, as the router sees them, and one of
    them is in another life than `before`.
    """
    ended = time.monotonic() + _LIMIT_S
    addresses = [fleet.address_of(f"{role}-{number}") for number in range(2)]
    with connect(fleet.address) as client:
        while time.monotonic() < ended:
            ready = lives(client)
            found = {at: ready[at] for at in addresses if at in ready}
            if len(found) == 2 and found != before:
                return found
            time.sleep(0.2)
    raise AssertionError(f"both {role} workers were not ready after {_LIMIT_S:g} s")


@contextlib.contextmanager
def serving(
    connector: str, *, replicas: bool, cuts_prompts: bool, has_stages: bool = False
) -> Iterator[tuple[Fleet, list[Asked]]]:
    """2P2D with two ranks in each worker, which may be stages, in decode workers replicas, and in
    prefill workers may cut prompts."""
    kind = "pipeline" if has_stages else "tensor"
    hang, cut = ("--hang-timeout-s", "3"), (f"--{kind}-parallel-size", "2")
    if not replicas:
        pairs = solid_jobs("sdar", "d2f", seed=2)
        asked = [(job.message(), expected.token_ids) for job, expected in pairs]
        flags = (*cut, *hang)
        rows = ("--tensor-parallel-size", "1", "--prefill-context-parallel-size", "2")
        with tiny_fleet(
            "sdar",
            connector=connector,
            prefill=2,
            decode=2,
            worker_flags=flags,
            prefill_flags=rows if cuts_prompts else (),
        ) as fleet:
            yield fleet, list(asked)
        return
    with (
        tempfile.TemporaryDirectory(prefix="effuse-faults-") as home,
        fleet_of(
            LLADA2.write(Path(home) / "model", LLADA2.block_size),
            connector=connector,
            prefill=2,
            decode=2,
            worker_flags=hang,
            prefill_flags=(*cut, "--expert-parallel"),
            decode_flags=("--data-parallel-size", "2"),
        ) as fleet,
    ):
        yield (
            fleet,
            [
                (make_request(run.prompt, run.params, token_ids=True), run.tokens)
                for run in LLADA2.runs(LLADA2.block_size)
            ],
        )


@contextlib.contextmanager
def with_pool() -> Iterator[tuple[Fleet, list[Asked]]]:
    """2P2D with two ranks in each worker, whose prompts go through a pool. Every few seconds it
    loses units and spoils others, and few fit into the workers, so they are read often."""
    pairs = solid_jobs("sdar", "block_diffusion", seed=3, least_blocks=7)
    with (
        place_of("pool") as pool,
        tiny_fleet(
            "sdar",
            connector="zmq",
            prefill=2,
            decode=2,
            num_pages=96,
            worker_flags=(
                *("--tensor-parallel-size", "2", "--hang-timeout-s", "6"),
                *("--kv-pool", pool, "--kv-offloading-size", "0.001"),
            ),
            router_flags=("--kv-mode", "pool"),
        ) as fleet,
    ):
        yield fleet, [(job.message(), expected.token_ids) for job, expected in pairs]


@contextlib.contextmanager
def on_gpus(connector: str, *, eager: bool) -> Iterator[tuple[Fleet, list[Asked]]]:
    """Two co-located groups of two GPUs, and the answers of one GPU, in fp32."""
    params = effuse.Params(max_tokens=64)
    prompts = [problem(5, number).prompt for number in range(2 * CLIENTS)]
    options = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
    with effuse.LLM(device="cuda", enforce_eager=True, num_pages=256, **options) as llm:  # type: ignore[arg-type]
        answers = llm.generate(prompts, params)
    flags = [word for name, value in options.items() for word in (_flag(name), str(value))]
    flags += ["--enforce-eager"] * eager
    config = FleetConfig(
        prefill=0,
        decode=2,
        connector=connector,
        worker_flags=("--device", "cuda", "--hang-timeout-s", "3", "--num-pages", "256", *flags),
        decode_flags=("--tensor-parallel-size", "2"),
        gpus=tuple(gpus_here())[:4],
        has_secret=False,
    )
    messages = [make_request(prompt, params, token_ids=True) for prompt in prompts]
    with Fleet(config) as fleet:
        with connect(fleet.address) as client, ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(client.generate, messages * 2))  # compiles what is left
        yield fleet, [(one, found.token_ids) for one, found in zip(messages, answers, strict=True)]


@contextlib.contextmanager
def engines(connector: str, *, eager: bool, tier: str) -> Iterator[tuple[Fleet, list[Asked]]]:
    """2P2D on up to two GPUs in bf16, or on CPUs; the answers of a fleet without caches.

    Raises AssertionError at the end if no unit came back from the tier.
    """
    gpus = tuple(gpus_here())[:2]
    device, mode = ("cuda", ("--batch-invariant",)) if gpus else ("cpu", ())
    prompts = [(prompt, params) for prompt, params in requests(200) if params.n != 2]
    found, *_ = answers(replace(BASE, caches=False), prompts, device, mode)
    pages = 160 if tier else 4096
    way = replace(BASE, connector=connector, eager=eager, pages=pages, tier=tier)
    with (
        place_of(tier) as below,
        Fleet(
            replace(
                way.config(device, mode, below),
                prefill=2,
                decode=2,
                gpus=gpus or None,
                gpu_sharing=bool(gpus),
            )
        ) as fleet,
    ):
        messages = [make_request(prompt, params, token_ids=True) for prompt, params in prompts]
        with connect(fleet.address) as client, ThreadPoolExecutor(24) as pool:
            list(pool.map(client.generate, messages))  # compiles what is left
        yield fleet, [(one, tokens[0]) for one, tokens in zip(messages, found, strict=True)]
        moved = {name: loaded_bytes(fleet, name) for name in HOST_GIB}
        print(", ".join(f"{count} bytes by way of {name}" for name, count in moved.items()))
        assert not tier or moved[tier], f"no unit came back from {tier}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def storm(found: argparse.Namespace) -> Ledger:
    """Runs one storm."""
    ledger, roles = Ledger(), ROLES[1:] if found.gpus else ROLES
    if found.engines:
        serves = engines(found.connector, eager=found.eager, tier=found.tier)
    elif found.pool:
        serves = with_pool()
    elif found.gpus:
        serves = on_gpus(found.connector, eager=found.eager)
    else:
        cuts_prompts = found.cut_prompts
        serves = serving(
            found.connector,
            replicas=found.replicas,
            cuts_prompts=cuts_prompts,
            has_stages=found.stages,
        )
    with serves as (fleet, asked), ThreadPoolExecutor(CLIENTS + len(roles)) as pool:
        print("ready", flush=True)
        until = time.monotonic() + found.seconds
        each = found.faults // len(roles)
        asking = [pool.submit(ask, fleet, asked, number, ledger) for number in range(CLIENTS)]
        part = "build" if found.engines else "rank"
        hit = partial(inject, fleet, count=each, ledger=ledger, until=until, part=part)
        faults = [pool.submit(hit, role) for role in roles]
        try:
            for fault in faults:
                fault.result()
        finally:
            ledger.is_over.set()
        for one in asking:
            one.result()
        print(ledger.tell(), flush=True)  # before the checks at the end of a fleet
    return ledger


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a storm; 1 if an answer was wrong or a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--connector", default="nixl", choices=("nixl", "zmq"))
    parser.add_argument("--replicas", action="store_true", help="decode workers of two replicas")
    parser.add_argument("--cut-prompts", action="store_true", help="by ranks of prefill workers")
    parser.add_argument("--stages", action="store_true", help="ranks are stages of a pipeline")
    parser.add_argument("--pool", action="store_true", help="through a pool that loses units")
    parser.add_argument("--gpus", action="store_true", help="on four GPUs")
    parser.add_argument("--engines", action="store_true", help="engines of 2P2D on GPUs")
    parser.add_argument("--tier", default="", choices=("", *HOST_GIB), help="below few pages")
    parser.add_argument("--eager", action="store_true", help="without graphs, on GPUs")
    parser.add_argument("--seconds", type=float, default=1e9, help="no fault begins after them")
    found = parser.parse_args(argv)
    ledger = storm(found)
    for text in (ledger.wrong + ledger.failed)[:5]:
        print(text)
    return int(bool(ledger.wrong or ledger.failed))


if __name__ == "__main__":
    sys.exit(main())
