"""The test's side of receiver_process.py: starts it, sends commands, reads answers, and always ends
it.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtransfer.fixtures import DEADLINE_S, LEASE_S

from effuse.kvtransfer.messages import Reservation, decode_reservation, encode

TESTS = Path(__file__).parents[1]


class RemoteReceiver:
    """A pool in another process; receives, or pushes on command."""

    def __init__(
        self,
        kind: str,
        layout: str,
        num_pages: int,
        incarnation: str = "decode-1",
        **environment: str,
    ) -> None:
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "kvtransfer.receiver_process"),
                *(kind, layout, str(num_pages), incarnation),
            ],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._numbers = itertools.count(1)
        self._heard: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, **command: object) -> None:
        """Sends one command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, transfer_id: str | None = None) -> dict[str, Any]:
        """Its next line, of this transfer if one is named."""
        while True:
            words = self._heard.get(timeout=DEADLINE_S)
            if transfer_id is None or words.get("transfer") == transfer_id:
                return words

    def digests(self) -> list[str]:
        """Digests of all its pages, in hexadecimal."""
        self.ask(do="digests")
        while True:
            words = self.hear()
            if "event" not in words:
                found: list[str] = words["digests"]
                return found

    def forget(self, transfer_id: str) -> None:
        """Has it refuse a transfer from now on."""
        self.ask(do="forget", transfer=transfer_id)
        while self.hear() != {"forgotten": transfer_id}:
            pass

    def push(self, reservation: Reservation, pages: Sequence[int], value: float | None) -> None:
        """Has it fill its pool with a value, if one is given, and push pages of it."""
        given = base64.b64encode(encode(reservation)).decode()
        self.ask(do="push", reservation=given, pages=list(pages), value=value)

    def close(self) -> None:
        """Ends it for certain."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def reserve(
        self,
        pages: Sequence[int],
        *,
        number: int | None = None,
        writer: str | None = "prefill-1",
        lease_s: float = LEASE_S,
    ) -> Reservation:
        """Makes it expect a transfer into these pages, with its own number unless one is given."""
        number = next(self._numbers) if number is None else number
        refs = [(page, 1) for page in pages]
        self.ask(do="reserve", pages=refs, number=number, writer=writer, lease_s=lease_s)
        while True:
            words = self.hear()
            if "reservation" in words:
                return decode_reservation(base64.b64decode(words["reservation"]))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{"):
                self._heard.put(json.loads(line))
