"""Workers in separate network namespaces, whose network is cut or slowed under load.

Each worker has one interface, on a bridge to this machine, on which routers, Redis and clients
stay. A cut affects everything: calls, leases, metrics, pages and their notes, of UCX or ZMQ. Needs
root, `ip` and `nft`. `python -m chaos.network` is the long form.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from chaos import report
from chaos.clients import CLIENTS, Clients, answer_of, draw_all
from chaos.ledger import FleetState, Injected, Ledger, WorkerState
from chaos.plan import Fault, Kind, Targets
from chaos.verdict import judge, left
from e2e.client import all_at_once, connect, load_of
from e2e.tiny import TINY, tiny_checkpoint
from slowness import patient

from effuse.cli.commands import LOOPBACK, FleetConfig
from effuse.cli.fleet import Fleet
from effuse.protos.fleet_secret import FleetSecret
from effuse.v1 import model_pb2, model_pb2_grpc

TARGETS = Targets(
    prefill=("prefill-0", "prefill-1"), decode=("decode-0", "decode-1"), routers=("router",)
)
LONGEST_CUT_S = 12.0  # longer than a lease
LONGEST_SLOW_S = 4.0
SLOW_KBYTES_S = 64  # each way; connections are set up, and pages take seconds
SEEN_S = patient(30.0)  # for a slow network to lose something
BACK_S = patient(120.0)
SETTLE_S = patient(120.0)
_TOOL_S = patient(30.0)
_TABLE = "chaos"


def why_not(tools: tuple[str, ...] = ("ip", "nft")) -> str:
    """Why there can be no such network here; empty where there can. Without nft its cables can
    only be pulled."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not installed"
    try:
        with Network(("probe",)) as network:
            network.cut("probe") if "nft" in tools else network.pull("probe")
    except subprocess.CalledProcessError as error:
        return f"no network can be made: {error.stderr.strip()}"
    return ""


class Network:
    """A bridge with one namespace for each name; a context, nothing of which is left."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._tag = secrets.token_hex(3)
        subnet = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(256)}"
        self.hub = f"{subnet}.1"  # this machine's address on the bridge
        self.addresses = {name: f"{subnet}.{at}" for at, name in enumerate(names, 2)}
        self._namespaces = {name: f"ef{self._tag}-{name}" for name in names}

    def __enter__(self) -> Network:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("address", "add", f"{self.hub}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for at, name in enumerate(self._namespaces):
                self._add(name, f"ef{self._tag}v{at}")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._remove()

    def within(self, name: str) -> list[str]:
        """Prefix of a command that runs in a namespace."""
        return [str(shutil.which("ip")), "netns", "exec", self._namespaces[name]]

    def cut(self, name: str) -> None:
        """Nothing comes in or goes out any more."""
        self._drop(name, "counter drop")

    def pull(self, name: str, *, out: bool = True) -> None:
        """Pulls its cable out, or puts it in again."""
        outside = f"{self._bridge}v{list(self._namespaces).index(name)}"
        _ip("link", "set", outside, "down" if out else "up")

    def slow(self, name: str) -> None:
        """Packets above a rate are lost, each way."""
        self._drop(name, f"limit rate over {SLOW_KBYTES_S} kbytes/second counter drop")

    def dropped(self, name: str) -> int:
        """How many packets were dropped since it was cut or slowed."""
        command = [*self.within(name), "nft", "--json", "list", "table", "inet", _TABLE]
        listed = json.loads(_run(command))
        return sum(packets for one in listed["nftables"] for packets in _counted(one))

    def mend(self, name: str) -> None:
        """All is as before."""
        _run([*self.within(name), "nft", "delete", "table", "inet", _TABLE])

    @property
    def _bridge(self) -> str:
        return f"ef{self._tag}"

    def _add(self, name: str, outside: str) -> None:
        namespace, inside = self._namespaces[name], f"{outside}i"
        _ip("netns", "add", namespace)
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", namespace)
        _ip("link", "set", outside, "master", self._bridge, "up")
        for words in (
            ("address", "add", f"{self.addresses[name]}/24", "dev", inside),
            ("link", "set", inside, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", namespace, *words)

    def _drop(self, name: str, statement: str) -> None:
        chains = "; ".join(
            f"chain {hook} {{ type filter hook {hook} priority 0; {way} != lo {statement}; }}"
            for hook, way in (("input", "iifname"), ("output", "oifname"))
        )
        _run([*self.within(name), "nft", f"table inet {_TABLE} {{ {chains}; }}"])

    def _remove(self) -> None:
        for namespace in self._namespaces.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", namespace)  # and the interface in it
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._bridge)


class SpreadFleet(Fleet):
    """A fleet whose workers are in the namespaces with their names."""

    def __init__(self, config: FleetConfig, network: Network) -> None:
        super().__init__(config)
        self._network = network

    def secret(self) -> FleetSecret:
        """The credentials that its workers accept."""
        assert self.home.secret_file is not None
        return FleetSecret.read(self.home.secret_file)

    def _spawn(self, name: str) -> None:
        command, hub = self._commands[name], self._network.hub
        if name == "redis" and hub not in command:
            command.insert(command.index(LOOPBACK) + 1, hub)
        elif (address := self._network.addresses.get(name)) and LOOPBACK in command:
            own = [address if word == LOOPBACK else word for word in command]
            own = [word.replace(f"redis://{LOOPBACK}:", f"redis://{hub}:") for word in own]
            self._commands[name] = [*self._network.within(name), *own]
        super()._spawn(name)


def draw_faults(seed: int, count: int, longest_cut_s: float = LONGEST_CUT_S) -> list[Fault]:
    """So many cuts and slow whiles, dealt by kind and worker in turn."""
    chance = random.Random(f"{seed} network")
    longest = {Kind.NETWORK_CUT: longest_cut_s, Kind.NETWORK_SLOWED: LONGEST_SLOW_S}
    faults: list[Fault] = []
    while len(faults) < count:
        deck = [(kind, name) for kind in longest for name in TARGETS.workers]
        chance.shuffle(deck)
        for kind, name in deck:
            hold_s = chance.uniform(0.5, longest[kind])
            faults.append(Fault(kind, name, chance.expovariate(2.0), hold_s))
    return faults[:count]


def carry_out(
    ledger: Ledger, faults: list[Fault], home: Path, tell: Callable[[str], object]
) -> None:
    """One run, recorded in `ledger`. Raises FleetError if no fleet starts."""
    jobs, ledger.planned = draw_all(ledger.seed), len(faults)
    ledger.epoch_s = time.time() - time.monotonic()
    with (
        Network(tuple(TARGETS.workers)) as network,
        SpreadFleet(_config(ledger, home), network) as fleet,
        connect(fleet.address, alone=True) as client,
    ):
        ledger.expected = all_at_once(partial(answer_of, client), jobs, CLIENTS)
        ledger.before = _settled(fleet)
        with Clients(fleet.address, jobs, ledger).sending():
            for fault in faults:
                time.sleep(fault.lull_s)
                ledger.injected.append(_inject(fleet, network, fault))
                tell(_told(ledger))
        ledger.after = _settled(fleet)
        ledger.later = all_at_once(partial(answer_of, client), jobs, CLIENTS)


def _config(ledger: Ledger, home: Path) -> FleetConfig:
    return FleetConfig(
        prefill=len(TARGETS.prefill),
        decode=len(TARGETS.decode),
        connector=ledger.connector,
        model=tiny_checkpoint(home / "model", "sdar"),
        worker_flags=(
            *("--device", "cpu", "--page-size", str(TINY.page_size), "--num-pages", "512"),
            *("--max-model-len", str(TINY.max_model_len), "--allow-plaintext", "all"),
        ),
        env={"UCX_TLS": "tcp,self"},  # not through shared memory, which no network carries
        log_dir=home / "logs",
    )


def _inject(fleet: SpreadFleet, network: Network, fault: Fault) -> Injected:
    injected = Injected(fault=fault, at_s=time.monotonic(), evidence="")
    (network.cut if fault.kind is Kind.NETWORK_CUT else network.slow)(fault.target)
    time.sleep(fault.hold_s)
    while not network.dropped(fault.target) and time.monotonic() < injected.at_s + SEEN_S:
        time.sleep(0.1)
    dropped = network.dropped(fault.target)
    network.mend(fault.target)
    mended_s = time.monotonic()
    if dropped:
        held_s = mended_s - injected.at_s
        injected.evidence = f"{dropped} packets were dropped in {held_s:.1f} s"
    while time.monotonic() < mended_s + BACK_S:
        if fault.target in _ready(fleet):
            injected.recovered_s = time.monotonic() - mended_s
            break
        time.sleep(0.1)
    return injected


def _ready(fleet: SpreadFleet) -> dict[str, model_pb2.Worker]:
    """The workers that the router takes for ready, by name."""
    with grpc.insecure_channel(fleet.address) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        listed = stub.ListWorkers(model_pb2.ListWorkersRequest(), timeout=30.0)
    ready = model_pb2.WORKER_STATE_READY
    return {one.worker_id: one for one in listed.workers if one.state == ready}


def _settled(fleet: SpreadFleet) -> FleetState | None:
    """The fleet once it holds nothing, or its state at the end of its time; None if a worker is not
    ready at all.
    """
    deadline, found = time.monotonic() + SETTLE_S, None
    while time.monotonic() < deadline:
        ready = _ready(fleet)
        found = _state(fleet, ready) if len(ready) == len(TARGETS.workers) else None
        if found is not None and not left(found):
            break
        time.sleep(0.5)
    return found


def _state(fleet: SpreadFleet, ready: dict[str, model_pb2.Worker]) -> FleetState:
    secret = fleet.secret()
    workers = {name: _worker(one.address, secret) for name, one in ready.items()}
    return FleetState(
        workers=workers, router_descriptors=0, router_bytes=0, running_keys=(), lasting_keys=()
    )


def _worker(address: str, secret: FleetSecret) -> WorkerState:
    load = load_of(address, secret)
    return WorkerState(
        is_ready=True,
        held_pages=load.total_pages - load.free_pages - load.quarantined_pages,
        quarantined_pages=load.quarantined_pages,
        requests=load.running + load.waiting,
        tasks=load.tasks,
        descriptors=0,
    )


def _told(ledger: Ledger) -> str:
    injected = ledger.injected[-1]
    failed = sum(one.status not in ("", "OK", "CANCELLED") for one in list(ledger.exchanges))
    return (
        f"{len(ledger.injected)} of {ledger.planned} faults, {len(ledger.exchanges)} requests, "
        f"{failed} failed; {injected.fault.kind.value}, {injected.fault.target}: "
        f"{injected.evidence or 'NOT SEEN'}"
    )


def _counted(one: dict[str, Any]) -> Iterator[int]:
    """Packets that a rule counted, of one entry of nft's list."""
    for part in one.get("rule", {}).get("expr", ()):
        if "counter" in part:
            yield int(part["counter"]["packets"])


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TOOL_S)
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.network", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--connector", choices=("nixl", "zmq"), default="nixl")
    asked = parser.parse_args()
    if reason := why_not():
        print(f"no fault was tried: {reason}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the network would outlive it
    home = Path("build/chaos") / f"network-{asked.connector}-{asked.seed}"
    shutil.rmtree(home, ignore_errors=True)
    ledger = Ledger(seed=asked.seed, connector=asked.connector)
    try:
        carry_out(ledger, draw_faults(asked.seed, asked.faults), home, partial(print, flush=True))
    finally:
        findings = judge(ledger)
        print(report.write(ledger, findings, home).read_text(), end="")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
