"""A fleet's directory while it runs: ready files of its processes, and its secrets.

Only the fleet's user can read it. It is removed with the fleet. If the fleet's process was killed,
the user's next fleet removes it.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from effuse.cli.addresses import PAGE, PREFIX, READY, SECRET, read_facts
from effuse.cli.commands import value_of
from effuse.placement.access import RIGHTS, RedisAccess
from effuse.protos.fleet_secret import FleetSecret
from effuse.protos.rpc import write_ready_file
from effuse.worker.engine_home import homes

_LOCK: Final = "in-use"  # locked as long as the fleet's process lives


class Home:
    """The directory of one fleet; flags may replace its secret and the credentials of Redis."""

    def __init__(self, flags: Sequence[str]) -> None:
        """Raises OSError if it cannot be made."""
        _sweep()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._lock = (self.path / _LOCK).open("w")
        # systemd-tmpfiles removes old files of /tmp, except below a directory that is locked.
        self._directory: int | None = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks, on which nothing is cleaned up
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.secret_file, credentials, sentinel_credentials, ca = (
            Path(given) if (given := value_of(flags, flag)) else None
            for flag in (
                *("--fleet-secret", "--redis-credentials"),
                *("--sentinel-credentials", "--redis-ca"),
            )
        )
        self.redis_access = RedisAccess(
            credentials=credentials, sentinel_credentials=sentinel_credentials, ca=ca
        )

    def make_secret(self) -> None:
        """Makes a secret for the fleet, unless a flag has given one."""
        if self.secret_file is None:
            self.secret_file = self.path / SECRET
            FleetSecret.make(self.secret_file)

    def make_redis_user(self) -> Path | None:
        """Writes the list of users of the embedded Redis, and the credentials of its processes. The
        password is derived from the secret; without a secret every client has access (None)."""
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
        return self.path / f"{name}{READY}"

    def facts(self, name: str) -> dict[str, str]:
        """Facts of a ready process, including its address as host:port."""
        return read_facts(self.ready_file(name))

    def write_page(self, address: str) -> None:
        """Stores the address of the page about the fleet, for `effuse status`."""
        write_ready_file(self.ready_file(PAGE), address)

    def live_workers(self, router: str) -> tuple[int, int]:
        """Prefill and decode workers that a router knows, from its ready file."""
        try:
            facts = self.facts(router)
        except FileNotFoundError:  # it is being replaced
            return 0, 0
        return int(facts["prefill"]), int(facts["decode"])

    def knows(self, router: str, worker_id: str) -> bool:
        try:
            return worker_id in self.facts(router)["workers"].split(",")
        except FileNotFoundError:  # it is being replaced
            return False

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        if self._directory is not None:
            os.close(self._directory)
        self._directory = None


def hold(directory: Path) -> int:
    """Locks a directory against other fleets, until the descriptor is closed. Raises OSError."""
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise OSError(errno.EBUSY, "another fleet writes there") from error
    except OSError:  # a file system without locks, which keeps no fleet out
        pass
    return held


def _sweep() -> None:
    """Removes the directories of this user's fleets whose process was killed.

    No process has its id, and none has its lock. The id is not enough if processes that do not see
    each other share a directory. The lock is not enough while a fleet begins.
    """
    for left in homes(PREFIX, are_running=False):
        with suppress(OSError), (left / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if it is in use
            shutil.rmtree(left, ignore_errors=True)
