"""One fleet of the bundled model for all clients, and the tools that each of them needs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from installed import installed
from load.run import FLEET
from load.up import Up, running

from effuse.cli.ports import free_port

HTTP_PORT = free_port()
Tool = Callable[[str], Path]


@pytest.fixture(scope="session")
def tool() -> Tool:
    """Path of a tool of `.ci/tool`; skips the test if it is not installed."""
    return installed


@pytest.fixture(scope="session")
def fleet() -> Generator[Up, None, None]:
    """The fleet that `effuse up` starts. Once all clients have left it holds nothing of theirs."""
    with running((*FLEET, "--http-port", str(HTTP_PORT))) as up:
        yield up
        assert up.held() == []


@pytest.fixture(scope="session")
def http(fleet: Up) -> str:
    """The URL of the fleet's HTTP API."""
    return f"http://127.0.0.1:{HTTP_PORT}"
