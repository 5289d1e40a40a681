"""A Redis that answers and refuses: full, read-only, without enough replicas, closed to the fleet.

Chaos kills, freezes and empties Redis. Here it stays and returns errors, each for longer than a
lease lasts. No request may fail.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.redis_refusals
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import redis
import redis_server
from e2e.upgrade import HERE, WORKERS, Ledger, MixedFleet, asking

REFUSALS: Final = ("full", "read-only", "few replicas", "no rights", "password")
HOLD_S: Final = 12.0  # four leases
_ADMIN: Final = ("admin", "of-the-test")


@contextlib.contextmanager
def refusing(url: str, refusal: str) -> Iterator[None]:
    """Makes Redis refuse, and proves that it does."""
    name, password = _ADMIN
    admin: Any = redis.Redis.from_url(url, username=name, password=password)
    settings = {"full": ("maxmemory", "1"), "few replicas": ("min-replicas-to-write", "1")}
    denied: tuple[str, ...] = ("resetpass", ">new")
    granted = "nopass"
    if refusal == "no rights":
        denied, granted = ("-@all", "+ping", "+auth", "+hello"), "+@all"
    if refusal in settings:
        setting, value = settings[refusal]
        admin.config_set(setting, value)
    elif refusal == "read-only":
        admin.execute_command("REPLICAOF", "127.0.0.1", "1")
    else:
        admin.execute_command("ACL", "SETUSER", "default", *denied)
        admin.execute_command("CLIENT", "KILL", "USER", "default")
    try:
        with redis.Redis.from_url(url) as stranger, contextlib.suppress(redis.RedisError):
            stranger.set("written", 1)
            raise AssertionError(f"{refusal}: Redis refuses nothing")
        yield
    finally:
        if refusal in settings:
            admin.config_set(settings[refusal][0], "0")
        elif refusal == "read-only":
            admin.execute_command("REPLICAOF", "NO", "ONE")
        else:
            admin.execute_command("ACL", "SETUSER", "default", granted)
        admin.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what clients saw; 1 if a request failed or an answer differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connector", choices=("nixl", "zmq"), default="nixl")
    connector, ledger = parser.parse_args(argv).connector, Ledger()
    with (
        redis_server.running() as server,
        tempfile.TemporaryDirectory(prefix="effuse-refusals-") as home,
        contextlib.closing(MixedFleet(server.connection_url, Path(home), connector)) as fleet,
    ):
        url, (name, password) = server.connection_url, _ADMIN
        first: Any
        with redis.Redis.from_url(url) as first:
            first.execute_command("ACL", "SETUSER", name, "on", f">{password}", "~*", "&*", "+@all")
        for kind in ("decode", "prefill"):
            for number in range(WORKERS):
                fleet.start(HERE, kind, f"{kind}-{number}")
        fleet.start(HERE, "router", "router-0")
        with asking(fleet, ledger):
            for refusal in REFUSALS:
                ledger.phase = refusal
                with refusing(url, refusal):
                    time.sleep(HOLD_S)
                ledger.phase = f"after {refusal}"
                time.sleep(HOLD_S / 2)
    ledger.print()
    return int(bool(ledger.failed or ledger.wrong) or len(ledger.longest_s) < 2 * len(REFUSALS))


if __name__ == "__main__":
    sys.exit(main())
