"""`make chaos`: a fleet of the tiny model under constant load while its processes are killed,
stopped and emptied and its calls cut off, and a verdict over every request. With `--bundled` it is
the bundled model, asked problems. The report is left in build/chaos/.
"""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from chaos import report
from chaos.clients import CLIENTS, JOBS, MEAN_THINK_S, Clients, answer_of, draw_all, draw_problems
from chaos.injector import Injector
from chaos.ledger import FleetState, Injected, Ledger
from chaos.plan import KILLS, Fault, Kind, Targets, draw_plan, targets_of
from chaos.subject import NotThere, Subject
from chaos.verdict import judge, left
from e2e.client import all_at_once, connect
from e2e.tiny import TINY, tiny_checkpoint
from fault_proxy import FaultProxy
from load.up import running
from slowness import patient

HOME = Path("build/chaos")
SETTLE_S = patient(120.0)  # for everything to be let go of

Tell = Callable[[str], object]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1, help="draws requests and faults")
    parser.add_argument("--requests", type=int, default=20_000, help="least number to send")
    parser.add_argument("--kills", type=int, default=1000, help="kills among the faults")
    parser.add_argument("--only", type=_kind, nargs="+", default=(), metavar="KIND",
        help=f"only these faults, --kills of them: {', '.join(map(_name, Kind))}")  # fmt: skip
    parser.add_argument("--hold", type=float, metavar="S", help="length of lasting faults")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no fault begins later")
    parser.add_argument("--prefill", type=int, default=2, help="workers, at least two")
    parser.add_argument("--decode", type=int, default=3, help="workers, at least two")
    parser.add_argument("--overlap", action="store_true", help="no fault waits for another's end")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="that send without pauses")
    parser.add_argument("--connector", choices=("nixl", "zmq"), default="nixl")
    parser.add_argument("--all-cancel", action="store_true", help="every client cancels")
    parser.add_argument("--bundled", action="store_true", help="the bundled model, not a tiny one")
    found = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the fleet would outlive it
    model = "bundled" if found.bundled else "tiny"
    what = "cancels" if found.all_cancel else model
    home = HOME / f"{what}-{found.connector}-{found.seed}"
    shutil.rmtree(home, ignore_errors=True)
    ledger = Ledger(
        seed=found.seed, connector=found.connector, model=model, all_cancel=found.all_cancel
    )
    targets = targets_of(found.prefill, found.decode)
    plan = draw_plan(found.seed, found.kills, targets, only=found.only, hold_s=found.hold)
    ledger.fault_s = found.seconds
    try:
        tell = partial(print, flush=True)
        carry_out(
            ledger, targets, plan, found.requests, home, tell,
            clients=found.clients, overlaps=found.overlap,
        )  # fmt: skip
    finally:  # a run that broke off is also reported
        findings = judge(ledger)
        print(report.write(ledger, findings, home).read_text(), end="")
    return 1 if findings else 0


def _name(kind: Kind) -> str:
    """In the command's form: engine-killed."""
    return kind.name.lower().replace("_", "-")


def _kind(text: str) -> Kind:
    """Raises ValueError for any other."""
    for kind in Kind:
        if _name(kind) == text:
            return kind
    raise ValueError(text)


def carry_out(
    ledger: Ledger,
    targets: Targets,
    plan: Sequence[Fault],
    requests: int,
    home: Path,
    tell: Tell,
    *,
    clients: int = CLIENTS,
    think_s: float = MEAN_THINK_S,
    num_jobs: int = JOBS,
    overlaps: bool = False,
) -> None:
    """One run, recorded in `ledger`; its logs and its checkpoint are in `home`. Raises UpError if
    no fleet starts.
    """
    jobs, ledger.solutions = draw_all(ledger.seed, num_jobs), []
    if ledger.model == "bundled":
        jobs, ledger.solutions = draw_problems(ledger.seed)
    ledger.planned = len(plan)
    ledger.epoch_s = time.time() - time.monotonic()
    with (
        FaultProxy() as proxy,
        running(_flags(home, ledger, targets), complains=True, environment=_through(proxy)) as up,
        connect(up.address, alone=True) as client,
    ):
        subject = Subject(up, targets)
        ledger.expected = all_at_once(partial(answer_of, client), jobs, CLIENTS)
        ledger.before = _settled(subject)
        senders = Clients(up.address, jobs, ledger, count=clients, think_s=think_s)
        injector = Injector(subject, proxy, client, ledger, overlaps=overlaps)
        with senders.sending():
            injector.carry_out(_in_time(plan, ledger), partial(_progress, ledger, tell))
            senders.wait_for(requests)
        ledger.after = _settled(subject)
        ledger.later = all_at_once(partial(answer_of, client), jobs, CLIENTS)
        subject.close()


def _in_time(plan: Sequence[Fault], ledger: Ledger) -> Iterator[Fault]:
    """The faults that begin soon enough; no others are missed."""
    ends = time.monotonic() + ledger.fault_s
    for fault in plan:
        if time.monotonic() > ends:
            ledger.planned = len(ledger.injected)
            return
        yield fault


def _flags(home: Path, ledger: Ledger, targets: Targets) -> list[str]:
    flags = [
        *("--prefill", str(len(targets.prefill)), "--decode", str(len(targets.decode))),
        *("--routers", str(len(targets.routers)), "--connector", ledger.connector),
        *("--device", "cpu", "--log-dir", str(home / "logs")),
    ]
    if ledger.model == "bundled":
        return flags
    model = tiny_checkpoint(home / "model", "sdar")
    return [
        *flags,
        *("--model", str(model), "--page-size", str(TINY.page_size), "--num-pages", "512"),
        *("--max-model-len", str(TINY.max_model_len)),
    ]


def _through(proxy: FaultProxy) -> dict[str, str]:
    """Has the gRPC library of each process take its calls through the proxy."""
    return {"grpc_proxy": f"http://{proxy.address}", "no_grpc_proxy": "", "no_proxy": ""}


def _settled(subject: Subject) -> FleetState | None:
    """The fleet once it holds nothing, or its state at the end of its time; None if a worker is
    missing.
    """
    deadline, found = time.monotonic() + SETTLE_S, None
    while time.monotonic() < deadline:
        try:
            found = subject.state()
        except NotThere:
            found = None
        if found is not None and not left(found):
            break
        time.sleep(0.5)
    return found


def _progress(ledger: Ledger, tell: Tell, injected: Injected) -> None:
    kills = sum(one.fault.kind in KILLS for one in ledger.injected)
    failed = sum(one.status not in ("", "OK", "CANCELLED") for one in list(ledger.exchanges))
    tell(
        f"{kills} kills, {len(ledger.exchanges)} requests, {failed} failed; "
        f"{injected.fault.kind.value}, {injected.fault.target}: {injected.evidence or 'NOT SEEN'}"
    )


if __name__ == "__main__":
    sys.exit(main())
