"""A second router beside a fleet's own, on its own port, as it runs on another machine."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.client import wait_until

from effuse.cli.fleet import Fleet


@dataclass(frozen=True)
class SecondRouter:
    """A running router."""

    child: subprocess.Popen[bytes]
    address: str
    metrics: str  # where they are served; empty where they are not

    def kill(self) -> None:
        """Ends it like a crash, and waits for its end."""
        self.child.kill()
        self.child.wait(30)


@contextmanager
def second_router(fleet: Fleet, *more_flags: str) -> Iterator[SecondRouter]:
    """One that routes for the same fleet, which has no secret; it is killed at the end."""
    with tempfile.TemporaryDirectory() as home:
        ready = Path(home) / "ready"
        flags = ["--port", "0", "--redis-url", fleet.redis_url, "--fleet", fleet.name]
        flags += ["--ready-file", str(ready), *more_flags]
        if fleet.config.model is not None:
            flags += ["--model", str(fleet.config.model)]
        command = [sys.executable, "-P", "-m", "effuse.router", *flags]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
            try:
                wait_until(ready.exists, "the second router does not start")
                facts = json.loads(ready.read_text())
                yield SecondRouter(child, facts["address"], facts.get("metrics", ""))
            finally:
                child.kill()
