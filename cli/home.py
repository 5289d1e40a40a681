"""A fleet's directory while it runs: where its processes say that they are ready, and its secrets.

All of it is the fleet's user's alone, and goes with the fleet, or with the next one of this user
where its process was killed.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from effuse.cli.addresses import NAME, PAGE, PREFIX, READY, read_facts
from effuse.cli.commands import value_of
from effuse.placement.access import RIGHTS, RedisAccess
from effuse.protos.gate import FleetSecret
from effuse.protos.rpc import write_ready_file
from effuse.worker.engine_home import is_ours, is_running

_LOCK: Final = "in-use"  # locked for as long as the fleet's process lives


class Home:
    """The directory of one fleet; a secret, or how a Redis is reached, may be given as flags."""

    def __init__(self, flags: Sequence[str]) -> None:
        """Raises OSError where there can be none."""
        _sweep()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._lock = (self.path / _LOCK).open("w")
        with suppress(OSError):  # of a file system that has no locks, where nothing is swept
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        given, credentials, ca = (
            value_of(flags, flag)
            for flag in ("--fleet-secret", "--redis-credentials", "--redis-ca")
        )
        self.secret_file = Path(given) if given else None
        self.redis_access = RedisAccess(
            credentials=Path(credentials) if credentials else None, ca=Path(ca) if ca else None
        )

    def make_secret(self) -> None:
        """Makes a secret for the fleet, unless one was given."""
        if self.secret_file is None:
            self.secret_file = self.path / "fleet.secret"
            FleetSecret.make(self.secret_file)

    def make_redis_user(self) -> Path | None:
        """Writes the list of users of a Redis that the fleet starts, and how its processes reach
        it; the password follows from the secret, and without one anybody is a user (None)."""
        if self.secret_file is None:
            return None
        users, credentials = self.path / "redis.users", self.path / "redis.credentials"
        password = FleetSecret.read(self.secret_file).derive("redis").hex()
        for path, text in (
            (users, f"user default off\nuser effuse on >{password} ~* {RIGHTS}\n"),
            (credentials, f"effuse:{password}\n"),
        ):
            path.touch(0o600)
            path.write_text(text)
        self.redis_access = RedisAccess(credentials=credentials)
        return users

    def ready_file(self, name: str) -> Path:
        """Where a process says that it is ready."""
        return self.path / f"{name}{READY}"

    def told(self, name: str) -> dict[str, str]:
        """What a process that is ready has said, its address as host:port among it."""
        return read_facts(self.ready_file(name))

    def tell_page(self, address: str) -> None:
        """Keeps the address of the page about the fleet, for `effuse status`."""
        write_ready_file(self.ready_file(PAGE), address)

    def live_workers(self, router: str) -> tuple[int, int]:
        """Prefill and decode workers that a router knows, by its word."""
        ready = self.ready_file(router)
        if not ready.exists():  # it is being replaced
            return 0, 0
        told = json.loads(ready.read_text())
        return int(told["prefill"]), int(told["decode"])

    def knows(self, router: str, worker_id: str) -> bool:
        """Whether a router lets a worker take part, by its word."""
        try:
            return worker_id in self.told(router)["workers"].split(",")
        except FileNotFoundError:  # it is being replaced
            return False

    def remove(self) -> None:
        """The fleet has ended."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep() -> None:
    """Removes what fleets of this user left whose process was killed.

    No process has its id, and nobody has its lock: the first alone would not do where processes
    that do not see each other share a directory, the second not as one begins."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        found = NAME.fullmatch(left.name)
        if found is None or is_running(int(found[1])) or not is_ours(left):
            continue
        with suppress(OSError), (left / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError where it is in use
            shutil.rmtree(left, ignore_errors=True)
