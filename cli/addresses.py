"""The addresses of a fleet that this user started here, found by the address of its router.

A fleet keeps them in its directory while it runs (`home.py`). Clients import this module, so it
needs no server code.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Final

from effuse.config.checks import is_loopback
from effuse.worker.engine_home import homes

PREFIX: Final = "effuse-fleet-"
"""With the id of its process, this begins the name of a fleet's directory."""
READY: Final = ".ready.json"
"""Suffix of the file that a process writes once it is ready."""
PAGE: Final = "page"
SECRET: Final = "fleet.secret"
"""Name of the file with a secret that was made for the fleet."""


def addresses(target: str) -> list[str]:
    """A line for each address of the fleet behind `target`, as host:port: gRPC, HTTP and page, and
    metrics. Only fleets that this user started on this machine have more than the first."""
    home = _home_of(target)
    processes = {} if home is None else _facts_in(home)
    served = {name: facts["metrics"] for name, facts in processes.items() if "metrics" in facts}
    http = dict.fromkeys(facts["http"] for facts in processes.values() if "http" in facts)
    lines = {
        "gRPC": target,
        "HTTP": ", ".join(http),
        "page": processes[PAGE]["address"] if PAGE in processes else "",
        "metrics": ", ".join(f"{name} {at}" for name, at in sorted(served.items())),
    }
    return [f"{name}: {at}" for name, at in lines.items() if at]


def secret_of(target: str) -> Path | None:
    """The file with the secret that was made for this user's fleet at `target`, if there is one."""
    home = _home_of(target)
    return home / SECRET if home is not None and (home / SECRET).exists() else None


def _facts_in(home: Path) -> dict[str, dict[str, str]]:
    """The facts in the ready files of a fleet, by process."""
    found: dict[str, dict[str, str]] = {}
    for file in home.glob(f"*{READY}"):
        with suppress(OSError, ValueError):  # it is being replaced
            found[file.name.removesuffix(READY)] = read_facts(file)
    return found


def _home_of(target: str) -> Path | None:
    """The directory of this user's fleet at `target`; None if there is no such fleet here."""
    host, _, port = target.rpartition("://")[2].strip("/").rpartition(":")
    for home in homes(PREFIX, are_running=True):
        for name, facts in _facts_in(home).items():
            theirs, _, at = facts["address"].rpartition(":")
            is_near = host == theirs or is_loopback(host)
            if name.startswith("router") and at == port and is_near:
                return home
    return None


def read_facts(ready: Path) -> dict[str, str]:
    """The facts that a process wrote once it was ready. Raises OSError and ValueError."""
    return {key: str(value) for key, value in json.loads(ready.read_text()).items()}
