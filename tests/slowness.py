"""How much slower than two quiet cores this machine is, so that tests wait for longer on it.

`measured` is taken once, when the tests start; processes that tests start inherit it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Final

VARIABLE: Final = "EFFUSE_TESTS_SLOWNESS"
_ROUNDS = 5_000_000
_WORK_S = 0.2  # for so many rounds on a quiet core
_START_S = 0.1  # for an interpreter that imports a few modules
_MOST = 20.0


def slowness(work_s: float, start_s: float) -> float:
    """1 or more: the worse ratio of two measured times, in seconds, to those of quiet cores."""
    return min(max(1.0, work_s / _WORK_S, start_s / _START_S), _MOST)


def measured() -> float:
    """The slowness of this machine when the tests started."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{slowness(_seconds_to_work(), _seconds_to_start()):.2f}"
    return float(os.environ[VARIABLE])


def patient(seconds: float) -> float:
    """So many seconds on quiet cores, and more on a slow or busy machine."""
    return seconds * measured()


def _seconds_to_work() -> float:
    began = time.monotonic()
    total = 0
    for number in range(_ROUNDS):
        total += number
    return time.monotonic() - began


def _seconds_to_start() -> float:
    began = time.monotonic()
    command = [sys.executable, "-I", "-c", "import asyncio, json"]
    subprocess.run(command, check=True, timeout=120)
    return time.monotonic() - began
