"""Shows the log files of a fleet's processes as one stream, each line led by its process's name.

Not here: who writes them, where they lie.
"""

import threading
from pathlib import Path
from typing import Self, TextIO

_POLL_S = 0.1


class LogFollower:
    """Copies what is appended to `*.log` in a directory to `out`, until the context ends."""

    def __init__(self, directory: Path, out: TextIO) -> None:
        self._directory = directory
        self._out = out
        # What an earlier fleet has left there is not shown again.
        self._read = {log: log.stat().st_size for log in directory.glob("*.log")}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def copy_new(self) -> None:
        """Copy every whole line that was added since the last time."""
        for log in sorted(self._directory.glob("*.log")):
            with log.open("rb") as file:
                file.seek(self._read.get(log, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[log] = self._read.get(log, 0) + len(whole) + len(newline)
            if newline:
                for line in whole.decode(errors="replace").split("\n"):
                    print(f"{log.stem:<10} | {line}", file=self._out)
        self._out.flush()

    def _run(self) -> None:
        while not self._over.wait(_POLL_S):
            self.copy_new()
        self.copy_new()
