"""How clients of other projects are run, and their common questions."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slowness import patient

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
QUESTION = "Find the value of 30 + 561 + 58."
ANSWER = "649"
DEADLINE_S = patient(120.0)


def run(*command: str | Path, cwd: Path = ROOT, status: int = 0) -> str:
    """A client's standard output, and for an expected failure also its standard error."""
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == status, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout + (done.stderr if status else "")


def run_script(*command: str | Path) -> dict[str, Any]:
    """The results of our script for such a client: the JSON that it prints."""
    found: dict[str, Any] = json.loads(run(*command))
    return found


def documents(text: str) -> Sequence[dict[str, Any]]:
    """The JSON documents of a text, one behind the other."""
    decoder, found, rest = json.JSONDecoder(), [], text.strip()
    while rest:
        one, end = decoder.raw_decode(rest)
        found.append(one)
        rest = rest[end:].lstrip()
    return found
