"""Tools of `.ci/tool` that tests use if they are there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def installed(name: str) -> Path:
    """The path of a tool. Skips the test, with the reason, if it is not installed."""
    found = subprocess.run(
        [ROOT / ".ci" / "tool", name],
        env=os.environ | {"ONLY_INSTALLED": "1"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if found.returncode:
        pytest.skip(found.stderr.strip())
    return Path(found.stdout.strip())
