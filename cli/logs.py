"""`effuse logs`: the logs of a fleet's processes on this machine, even after it has ended.

`effuse up` has a directory for each fleet below `$XDG_STATE_HOME/effuse`, which is
`~/.local/state/effuse` by default, with one file for each process, or a link to the directory of
its `--log-dir`. Directories of running fleets and of the last ten ended ones stay.
"""

import argparse
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, TextIO

from effuse.cli.arguments import command, directory, whole
from effuse.cli.commands import FleetConfig, new_name
from effuse.cli.process import LogFollower, last_lines, logs_in, with_name
from effuse.config.flags import CommandError

KEPT: Final = 10
"""Ended fleets whose logs stay."""

_LOCK = "in-use"  # a file in a directory, locked while its fleet runs
_LINK = "elsewhere"  # a link in a directory, to that of --log-dir
_POLL_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises CommandError if there is no such log."""
    parser = make_parser()
    found = parser.parse_args(argv)
    if found.log_dir and found.fleet:
        parser.error("--fleet: expected without --log-dir, which names the directory itself")
    where = found.log_dir or _latest_of_user(found.fleet)
    names = sorted(log.stem for log in logs_in(where))
    if not (names or found.follow):
        raise CommandError(f"{where} has no logs")
    if found.process is not None and found.process not in names:
        listed = ", ".join(names) or "none"
        raise CommandError(f"{where} has no log of {found.process!a}, only those of: {listed}")
    show(where, found.process or "*", found.lines, sys.stdout, follow=found.follow)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = command("logs", "Show the logs of the fleet that you started last on this machine.")
    add = parser.add_argument
    about = "show only the log of this process, such as decode-0"
    add("process", nargs="?", metavar="NAME", help=about)
    add("--fleet", metavar="NAME", help="the fleet's name (default: the last one)")
    add("--log-dir", type=directory, metavar="DIR",
        help="the directory of `effuse up --log-dir` (default: the fleet's own)")  # fmt: skip
    add("--lines", type=whole(1), default=100, metavar="N", help="show this many lines of each log")
    add("--follow", action="store_true", help="keep printing new lines, until Ctrl-C")
    return parser


def _latest_of_user(fleet: str | None) -> Path:
    """The logs of this user's last fleet, or the last one of this name; names it on stderr."""
    try:
        home = logs_home()
    except RuntimeError as error:  # a user without a home
        raise CommandError(f"{error}; --log-dir names the logs' directory") from error
    if (found := latest(home, fleet)) is None:
        name = f" {fleet!r}" if fleet else ""
        raise CommandError(f"{home} has no logs of a fleet{name}")
    where = _logs_of(found)
    print(f"effuse logs: fleet {_name_of(found)}, in {where}", file=sys.stderr)
    return where


def show(where: Path, process: str, lines: int, out: TextIO, *, follow: bool) -> None:
    """Writes the last lines of each log that `process` matches, and then new lines."""
    follower = LogFollower(where, out, process)
    for log in logs_in(where, process):
        for line in last_lines(log, lines):
            print(with_name(log.stem, line), file=out)
    out.flush()
    while follow:
        follower.copy_new()
        time.sleep(_POLL_S)


def logs_home() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    # The specification ignores relative paths.
    home = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return home / "effuse" / "logs"


def latest(home: Path, fleet: str | None) -> Path | None:
    """The directory of the fleet that started last, or the last one of this name; fleets that ended
    before their first line come last."""
    found = [one for one in _started(home) if fleet is None or _name_of(one) == fleet]
    found = [one for one in found if any(_logs_of(one).glob("*.log")) or _is_in_use(one)] or found
    return found[-1] if found else None


def _name_of(directory: Path) -> str:
    return directory.name.partition("_")[2]


def _logs_of(directory: Path) -> Path:
    """Where a fleet with this directory writes its logs."""
    link = directory / _LINK
    return link.readlink() if link.is_symlink() else directory


def _started(home: Path) -> list[Path]:
    """All directories, in the order in which their fleets were started."""
    return sorted(one for one in home.glob("*_*") if one.is_dir())


@contextmanager
def kept_logs(home: Path, fleet: str, now: float, elsewhere: Path | None = None) -> Iterator[Path]:
    """A directory for a fleet's logs, in use as long as the context. Of ended fleets, the last KEPT
    stay. now: seconds since the epoch. elsewhere: the directory of its logs, if another one. Raises
    OSError if the directory cannot be made."""
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    directory = home / f"{moment}.{int(now * 1000) % 1000:03d}_{fleet}"
    directory.mkdir(mode=0o700, parents=True)
    if elsewhere is not None:
        (directory / _LINK).symlink_to(elsewhere.absolute())
    # NFS gives a shared lock only to a reader, and an exclusive one only to a writer.
    with (directory / _LOCK).open("w+") as lock:
        with suppress(OSError):  # a file system without locks, on which nothing is cleaned up
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        ended = [one for one in _started(home) if one != directory and not _is_in_use(one)]
        for old in ended[: max(0, len(ended) - KEPT)]:
            shutil.rmtree(old, ignore_errors=True)
        yield directory


def _is_in_use(where: Path) -> bool:
    """Whether its fleet runs, or may run because no lock can be tried."""
    try:
        with (where / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # BlockingIOError if it runs
        return True
    return False


def keep_logs(config: FleetConfig, stack: ExitStack) -> FleetConfig:
    """Writes the logs to the directory of `effuse logs`, or has it link to the one that a flag
    names. If it cannot be made, the logs end with the fleet unless a flag names another one."""
    name, given = config.name or new_name(), config.log_dir
    try:
        directory = stack.enter_context(kept_logs(logs_home(), name, time.time(), given))
    except (OSError, RuntimeError) as error:  # the latter without a home
        shown = "`effuse logs` shows this fleet only with --log-dir"
        lost = shown if given else "logs are not written to files"
        print(f"effuse up: {lost}: {error}", file=sys.stderr)
        return config
    return replace(config, name=name, log_dir=given or directory)
