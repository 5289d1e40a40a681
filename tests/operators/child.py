"""Runs the programs beside this file in processes of their own and reads their JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TypeAlias

from eventually import is_readable
from slowness import patient

TESTS = Path(__file__).resolve().parents[1]
LINE_S = patient(200.0)  # for one case, or to start and the first case
Line: TypeAlias = dict[str, object]


def environment_of() -> dict[str, str]:
    """This process's environment, for a program that imports from the tests' folder."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path}


class Program:
    """``python -m module group``; its lines are read on demand.

    It also fails if a launch leaves Triton a choice that a later Triton will make otherwise.
    """

    def __init__(self, module: str, group: str, **environment: str) -> None:
        self._name = f"{module} {group}"
        self._lines: list[Line] = []
        self._begun = b""
        self._told: list[bytes] = []  # other output, such as a traceback
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, group],
            env={
                **environment_of(),
                "PYTHONWARNINGS": "error:TRITON_DEFAULT_FP_FUSION",
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def line(self, name: str) -> Line:
        """The line of this name, without waiting for later ones.

        AssertionError with its other output if it failed before, or prints nothing for LINE_S.
        """
        while True:
            for line in self._lines:
                if line["name"] == name:
                    return line
            assert self._read(), f"{self._name} has no line {name}"

    def all(self) -> list[Line]:
        """Every line, once the program has ended. AssertionError as by `line`."""
        while self._read():
            pass
        return self._lines

    def close(self) -> None:
        """Ends the program for certain."""
        self._process.kill()
        self._process.wait(LINE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> bool:
        """Reads the next output; False at the program's end."""
        assert self._process.stdout is not None
        if not is_readable(self._process.stdout.fileno(), LINE_S):
            self._process.kill()
            raise AssertionError(f"{self._name} printed nothing for {LINE_S:.0f} s")
        read = os.read(self._process.stdout.fileno(), 1 << 20)
        *lines, self._begun = (self._begun + read).split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                self._lines.append(json.loads(line))
            else:
                self._told.append(line)
        if not read and (status := self._process.wait(LINE_S)):
            told = b"\n".join(self._told).decode(errors="replace")[-4000:]
            raise AssertionError(f"{self._name} ended with {status}:\n{told}")
        return bool(read)


def json_lines(module: str, group: str, **environment: str) -> list[Line]:
    """All lines of ``python -m module group``; AssertionError if it fails."""
    with contextlib.closing(Program(module, group, **environment)) as program:
        return program.all()
