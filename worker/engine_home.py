"""Private directories of sockets, of fronts and of leaders: removed after those that were killed.

A front removes its own when its engine ends. The socket is in `supervisor.py`.
"""

import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOG = logging.getLogger(__name__)

SOCKET = "s"  # of a front
ANSWERS_SOCKET = "a"  # of a leader
_PREFIX = "effuse-engine-"
_OWNED = re.compile(r"(\d{1,10})-.+")  # what follows a prefix begins with the id of a process
_MOST_SOCKET_PATH_BYTES = 107  # sockaddr_un

kept_open: list[int] = []
"""Descriptors of this process's listening socket that its ranks keep open too: the closed port of
an engine proves that nothing of it writes any more, so it must outlive the last rank."""


def make_home() -> Path:
    """Returns a new directory that only this user can enter, with a path short enough for a socket;
    raises OSError if there is none.
    """
    home = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    if len(bytes(home / SOCKET)) > _MOST_SOCKET_PATH_BYTES:
        home.rmdir()
        raise OSError(
            "TMPDIR: expected a shorter path, so that a socket's path has at most "
            f"{_MOST_SOCKET_PATH_BYTES} bytes, got {str(home.parent)!r}"
        )
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(home / SOCKET))
        (home / SOCKET).unlink()
    except OSError as error:
        shutil.rmtree(home, ignore_errors=True)
        where = f"expected a directory in which sockets work, got {str(home.parent)!r}"
        raise OSError(f"TMPDIR: {where}: {error}") from error
    return home


def sweep() -> int:
    """Removes directories of this user's killed fronts and leaders; returns their number.

    Two conditions: no process has the owner's id, and no process listens at the socket. The id
    alone would not suffice if processes that do not see each other share a directory.
    """
    num_swept = 0
    for home in homes(_PREFIX, are_running=False):
        if not (_is_listening(home / SOCKET) or _is_listening(home / ANSWERS_SOCKET)):
            shutil.rmtree(home, ignore_errors=True)
            num_swept += 1
    if num_swept:
        LOG.info("removed %d directories of processes that were killed", num_swept)
    return num_swept


def homes(prefix: str, *, are_running: bool) -> Iterator[Path]:
    """This user's directories of this prefix whose process runs, or those whose does not."""
    for home in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        found = _OWNED.fullmatch(home.name.removeprefix(prefix))
        if found is not None and _is_running(int(found[1])) is are_running and _is_ours(home):
            yield home


def _is_running(pid: int) -> bool:
    """Whether a process has this id, among those that this process can see."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _is_ours(home: Path) -> bool:
    try:
        return home.is_dir() and not home.is_symlink() and home.stat().st_uid == os.getuid()
    except OSError:  # another process was faster
        return False


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
