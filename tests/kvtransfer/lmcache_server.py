"""The real server of LMCache on this machine. LMCache needs other versions of torch's libraries, so
it has an environment of its own, whose Python `EFFUSE_LMCACHE_PYTHON` names.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from kvtransfer.mooncake_master import await_port, free_ports

VARIABLE = "EFFUSE_LMCACHE_PYTHON"


class LMCacheServer:
    """Its process, which listens only on this machine. Without it the test is skipped."""

    def __init__(self, home: Path) -> None:
        python = os.environ.get(VARIABLE)
        if not python:
            pytest.skip(f"{VARIABLE} names no Python that has LMCache")
        (self.port,) = free_ports(1)
        self.url = f"lmcache://127.0.0.1:{self.port}/tests"
        command = [python, "-P", "-m", "lmcache.v1.server", "127.0.0.1", str(self.port)]
        hidden = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        with (home / "lmcache.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=home, env=hidden)
        await_port(self.port, self.process)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
