"""A fleet whose workers have ranks on two hosts, which are network namespaces of this machine.

Each worker's leader has a namespace of its own, and one other holds the far ranks of both. Without
root all of them are on loopback, where no cable can be pulled. The long form kills far ranks and
hosts, freezes hosts, and pulls cables under load.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.hosts --faults 20
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from chaos import network
from chaos.network import Network, SpreadFleet
from e2e.client import connect, wait_until
from e2e.degrees import Asked
from e2e.rank_faults import Ledger, ask
from e2e.test_detection import lives
from e2e.tiny import TINY, tiny_checkpoint
from slowness import patient

import effuse
from effuse.cli.commands import LOOPBACK, FleetConfig
from effuse.client.params import make_request
from effuse.placement.records import Role

FAR = "far"
LEADERS: dict[Role, str] = {"prefill": "prefill-0", "decode": "decode-0"}
HANG_S = patient(3.0)
CLIENTS = 3
_FAR_LOOPBACK = "127.0.0.2"
_QUESTIONS = ("ab", "the second prompt, which is longer", "c" * 40, "one more")
_PARAMS = effuse.Params(max_tokens=24, ignore_eos=True)


class HostsFleet(SpreadFleet):
    """A fleet of workers with ranks on a far host, whose processes it starts, too."""

    def __init__(self, config: FleetConfig, network: Network) -> None:
        super().__init__(config, network)
        self.far: dict[str, subprocess.Popen[bytes]] = {}  # by the leader's name

    def stop(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Ends the far hosts with the fleet."""
        for process in self.far.values():
            process.terminate()
        super().stop(is_hurried)
        for process in self.far.values():
            process.wait(patient(30.0))

    def start_far(self, name: str) -> None:
        """Starts the far host of a worker; the same command, with another number of the host."""
        words = list(self._commands[name])
        prefix = words.index(sys.executable)
        inside = self._network.within(FAR) if self._network.addresses else []
        host = self._network.addresses.get(FAR, _FAR_LOOPBACK)
        words[words.index("--host") + 1] = host
        log = (self.log_dir / f"{name}-far.log").open("ab")
        own = ("--port", "0", "--node-rank", "1", "--ready-file", str(self.ready_of(name)))
        with log:
            self.far[name] = subprocess.Popen(
                [*inside, *words[prefix:], *own],
                stdout=log,
                stderr=log,
                env={**os.environ, **self.config.env},
            )

    def ready_of(self, name: str) -> Path:
        """The ready file of a worker's far host."""
        return self.log_dir / f"{name}-far.json"

    def ranks_of(self, name: str) -> list[psutil.Process]:
        """Processes of the far ranks of a worker."""
        return psutil.Process(self.far[name].pid).children()

    def _spawn(self, name: str) -> None:
        super()._spawn(name)
        if name in LEADERS.values() and name not in self.far:
            self.start_far(name)


class _Loopback(Network):
    """No network at all."""

    def __init__(self) -> None:
        self.hub, self.addresses = LOOPBACK, {}

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@contextlib.contextmanager
def serving(
    connector: str, why_no_network: str
) -> Iterator[tuple[HostsFleet, Network, list[Asked]]]:
    """1P1D with two ranks in each worker, on two hosts; and requests with the answers of one
    process."""
    names = (*LEADERS.values(), FAR)
    with (
        tempfile.TemporaryDirectory(prefix="effuse-hosts-") as home,
        _Loopback() if why_no_network else Network(names) as spread,
    ):
        config = _config(Path(home), connector)
        with effuse.LLM(config.model, device="cpu", num_pages=64) as llm:
            answers = llm.generate(_QUESTIONS, _PARAMS)
        messages = [make_request(prompt, _PARAMS, token_ids=True) for prompt in _QUESTIONS]
        with HostsFleet(config, spread) as fleet:
            asked = zip(messages, (one.token_ids for one in answers), strict=True)
            yield fleet, spread, list(asked)


def _config(home: Path, connector: str) -> FleetConfig:
    group = ("--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", LOOPBACK)
    return FleetConfig(
        prefill=1,
        decode=1,
        connector=connector,
        model=tiny_checkpoint(home / "model", "sdar"),
        worker_flags=(
            *("--device", "cpu", "--page-size", str(TINY.page_size), "--num-pages", "256"),
            *("--max-model-len", str(TINY.max_model_len), "--hang-timeout-s", str(HANG_S)),
            *("--allow-plaintext", "all", *group),
        ),
        prefill_flags=("--master-port", str(_free_port())),
        decode_flags=("--master-port", str(_free_port())),
        router_flags=("--prefill", "remote", "--recovery-s", str(patient(100.0))),
        log_dir=home / "logs",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


class Faults:
    """Faults of the far host of a worker."""

    def __init__(self, fleet: HostsFleet, spread: Network) -> None:
        self.fleet = fleet
        self._spread = spread

    def kinds(self) -> list[str]:
        """Those that are possible here."""
        return ["rank", "host", "freeze", *(["cable"] if self._spread.addresses else [])]

    def hit(self, kind: str, name: str) -> float:
        """Carries a fault out, and returns once the worker serves in another life. Returns the
        seconds until the old far ranks had ended. Raises AssertionError if they do not."""
        before, ranks = self._life(name), self.fleet.ranks_of(name)
        others = [other for other in LEADERS.values() if other != name]
        lost = [*ranks, *(one for o in others for one in self.fleet.ranks_of(o) if kind == "cable")]
        far, began = self.fleet.far[name], time.monotonic()
        match kind:
            case "rank":
                ranks[0].kill()
            case "host":
                far.kill()
                far.wait()
            case "freeze":  # of the whole host
                for pid in (far.pid, *(one.pid for one in ranks)):
                    os.kill(pid, signal.SIGSTOP)
                wait_until(lambda: self._life(name) != before, "a frozen host stays in its group")
                for pid in (far.pid, *(one.pid for one in ranks)):
                    os.kill(pid, signal.SIGCONT)
            case "cable":
                self._spread.pull(FAR)
        wait_until(lambda: not any(one.is_running() for one in lost), f"{kind}: a rank lives on")
        gone_s = time.monotonic() - began
        if kind == "host":
            self.fleet.start_far(name)
        if kind == "cable":
            time.sleep(HANG_S)
            self._spread.pull(FAR, out=False)
        wait_until(lambda: self._life(name) not in ("", before), f"{kind}: {name} is not back", 120)
        return gone_s

    def _life(self, name: str) -> str:
        """The incarnation of a worker that can work; empty while it cannot."""
        with connect(self.fleet.address) as client:
            return lives(client).get(self.fleet.address_of(name), "")


def storm(found: argparse.Namespace) -> Ledger:
    """Asks without a pause while far hosts fail one after another."""
    ledger = Ledger()
    with (
        serving(found.connector, network.why_not(("ip",))) as (fleet, spread, asked),
        asking(fleet, asked, ledger),
    ):
        faults = Faults(fleet, spread)
        pairs = itertools.cycle(itertools.product(faults.kinds(), LEADERS.values()))
        for kind, name in itertools.islice(pairs, found.faults):
            goes_on(ledger)
            gone_s = faults.hit(kind, name)
            ledger.faults[kind] = ledger.faults.get(kind, 0) + 1
            print(f"{kind} of {name}: gone after {gone_s:.1f} s; {ledger.tell()}", flush=True)
        goes_on(ledger)
    return ledger


def goes_on(ledger: Ledger) -> None:
    """Returns once a request was answered that began before the last one was."""
    least = ledger.right + CLIENTS
    wait_until(lambda: ledger.right >= least, f"no more answers: {ledger.tell()}", 120.0)


@contextlib.contextmanager
def asking(fleet: HostsFleet, asked: Sequence[Asked], ledger: Ledger) -> Iterator[None]:
    """Clients that ask without a pause meanwhile."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(ask, fleet, asked, number, ledger) for number in range(CLIENTS)]
        try:
            yield
        finally:
            ledger.is_over.set()
        for one in clients:
            one.result()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a storm; 1 if an answer was wrong or a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=16)
    parser.add_argument("--connector", default="nixl", choices=("nixl", "zmq"))
    ledger = storm(parser.parse_args(argv))
    print(ledger.tell())
    for text in (ledger.wrong + ledger.failed)[:5]:
        print(text)
    return int(bool(ledger.wrong or ledger.failed))


if __name__ == "__main__":
    sys.exit(main())
