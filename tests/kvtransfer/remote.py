"""The test's side of receiver_process.py: has it forked, sends commands, reads answers, and always
ends it.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eventually import is_readable
from kvtransfer.fixtures import DEADLINE_S, LEASE_S

from effuse.kvtransfer.messages import Reservation, decode_reservation, encode

TESTS = Path(__file__).parents[1]


@functools.cache
def forker() -> socket.socket:
    """Takes orders to a process that has imported torch, which takes two seconds, and forks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvtransfer.receiver_process", str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    atexit.register(process.wait, DEADLINE_S)
    atexit.register(ours.close)  # which ends it
    ours.settimeout(DEADLINE_S)
    return ours


class Forked:
    """A process that another one has forked, which does not wait for its end."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        (its_stdin, stdin), (stdout, its_stdout) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        order = json.dumps([arguments, environment]).encode()
        socket.send_fds(forker(), [order], [its_stdin, its_stdout])
        os.close(its_stdin)
        os.close(its_stdout)
        self.pid = int(forker().recv(64))
        self._descriptor = os.pidfd_open(self.pid)

    def has_ended(self, within_s: float = 0.0) -> bool:
        return is_readable(self._descriptor, within_s)

    def wait(self) -> None:
        assert self.has_ended(DEADLINE_S), "it does not end"

    def send_signal(self, number: signal.Signals) -> None:
        """Unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def end(self) -> None:
        """For certain; its last output can still be read."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        """Once it has ended."""
        with contextlib.suppress(BrokenPipeError):  # an order that it did not read
            self.stdin.close()
        self.stdout.close()
        os.close(self._descriptor)


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
        self.process = Forked([kind, layout, str(num_pages), incarnation], os.environ | environment)
        self._is_closed = False
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
        """Ends it for certain. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self.process.end()
            self._reader.join(DEADLINE_S)
            self.process.close()

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
        for line in self.process.stdout:
            if line.startswith(b"{"):
                self._heard.put(json.loads(line))
