"""The listening addresses of a running fleet according to the kernel: only the configured ones."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from e2e.processes import tree
from e2e.tiny import tiny_checkpoint

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet

OPEN = "0.0.0.0"
EVERYWHERE = "::"  # gRPC's addresses for it: IPv6 and IPv4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "sdar", "sdar")


def listening(fleet: Fleet) -> dict[str, set[str]]:
    """Listening addresses of each process of the fleet, and of its children."""
    found: dict[str, set[str]] = {}
    for name, process in fleet.processes.items():
        sockets = [one for each in tree(process.pid) for one in each.net_connections("inet")]
        found[name] = {
            one.laddr.ip.removeprefix("::ffff:")  # IPv4 on a socket of IPv6
            for one in sockets
            if one.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)  # the latter is UDP's
        }
    return found


@pytest.mark.parametrize("connector", ["zmq", "nixl"])
def test_an_open_host_opens_the_router_alone(model: Path, connector: str) -> None:
    config = FleetConfig(
        connector=connector,
        model=model,
        host=OPEN,
        worker_flags=("--device", "cpu", "--num-pages", "64", "--metrics-port", "0"),
        router_flags=("--allow-plaintext", "all", "--metrics-port", "0"),
    )
    with Fleet(config) as fleet:
        found = listening(fleet)
    assert found.pop("router") == {EVERYWHERE, "127.0.0.1"}  # the latter are its metrics
    assert set(found) == {"redis", "prefill-0", "decode-0"}
    assert all(addresses == {"127.0.0.1"} for addresses in found.values()), found
