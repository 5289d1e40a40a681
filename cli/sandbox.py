"""Runs Python code written by a model in a separate process with limits.

The kernel limits CPU time, memory, and the number and size of files and processes. If the kernel
permits namespaces, there is no network, and other processes are invisible. The process begins in an
empty directory, without the descriptors and environment of this one. It does not stop a determined
attacker, so the user must ask for it (`--run-model-code`).
"""

import contextlib
import ctypes
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from effuse.cli.process import kill_group

NOBODY: Final = 65534
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_CHILD: Final = Path(__file__).with_name("sandbox_child.py")
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_SELF_CHECK: Final = "import colorsys, math, typing\nassert math.gcd(4, 6) == 2\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLimits:
    """Limits of one program."""

    cpu_s: int = 10
    wall_s: float = 20.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20


USUAL: Final = CodeLimits()


def passes(source: str, limits: CodeLimits = USUAL) -> bool:
    """Whether a program runs to its end within the limits, without an exception."""
    word = secrets.token_hex(16)  # a program that exits early does not write it
    with _directory() as home, tempfile.NamedTemporaryFile() as code:
        code.write(f"{word}\n{source}".encode(errors="surrogatepass"))
        code.seek(0)
        if os.geteuid() == 0:
            os.chown(home, NOBODY, NOBODY)
        reader, writer = os.pipe()
        try:
            child = _start(home, code.fileno(), writer, limits)
            os.close(writer)
            with hidden_environment():
                _await(child, limits.wall_s)
            os.set_blocking(reader, False)
            with contextlib.suppress(BlockingIOError):
                return os.read(reader, len(word) + 1) == word.encode()
            return False
        finally:
            os.close(reader)


def works() -> bool:
    return passes(_SELF_CHECK) and not passes(f"{_SELF_CHECK}assert False\n")


@contextlib.contextmanager
def hidden_environment() -> Iterator[None]:
    """Other processes of this user cannot read this one's environment (/proc/PID/environ), which
    may have a token. Root's can."""
    libc = ctypes.CDLL(None)
    before = libc.prctl(_PR_GET_DUMPABLE)
    libc.prctl(_PR_SET_DUMPABLE, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_DUMPABLE, before)


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    """An empty directory until the context ends, whatever a program leaves in it."""
    made = tempfile.TemporaryDirectory(prefix="effuse-code-", ignore_cleanup_errors=True)
    try:
        yield made.name
    finally:
        try:
            made.cleanup()
        except RecursionError:  # it is too deep for Python's own removal
            subprocess.run(["rm", "-rf", "--", made.name], check=False, stderr=subprocess.DEVNULL)


def _start(home: str, code: int, writer: int, limits: CodeLimits) -> "subprocess.Popen[bytes]":
    numbers = (writer, limits.cpu_s, limits.memory_bytes, limits.file_bytes, NOBODY)
    return subprocess.Popen(
        [sys.executable, "-I", str(_CHILD), *map(str, numbers)],
        stdin=code,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=home,
        env={"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", **_ONE_THREAD},
        pass_fds=(writer,),
        start_new_session=True,
    )


def _await(child: "subprocess.Popen[bytes]", wall_s: float) -> None:
    """Wait this long for its end, then kill it together with its children."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(wall_s)
    finally:
        kill_group(child)
