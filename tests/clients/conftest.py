"""One fleet of the bundled model for all clients, and what each of them needs to run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from load.run import FLEET
from load.up import Up, running

ROOT = Path(__file__).parent.parent.parent
Tool = Callable[[str], Path]


@pytest.fixture(scope="session")
def tool() -> Tool:
    """Where a tool of `.ci/tool` is; skips the test where it is not installed."""

    def find(name: str) -> Path:
        found = subprocess.run(
            [ROOT / ".ci" / "tool", name],
            env=os.environ | {"ONLY_INSTALLED": "1"}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        if found.returncode:
            pytest.skip(found.stderr.strip())
        return Path(found.stdout.strip())

    return find


@pytest.fixture(scope="session")
def fleet() -> Generator[Up, None, None]:
    """What `effuse up` starts. Once all clients have left it holds nothing of theirs."""
    with running(FLEET) as up:
        yield up
        assert up.held() == []
