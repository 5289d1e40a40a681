"""Settings of the gRPC library before it is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from effuse.router.__main__ import FEW_THREADS, VARIABLE

ENTRY = """
import sys
sys.argv = ["effuse-router", "--port", "x"]
from effuse.router.__main__ import main
assert "grpc" not in sys.modules, "too late"
try:
    main()
except SystemExit:
    import os
    assert "grpc" in sys.modules, "nothing was run"
    print(os.environ["GRPC_EXPERIMENTS"])
"""


@pytest.mark.parametrize("own", [None, "mine"])
def test_a_router_says_it_before_grpc_is_imported(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment may have chosen before."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if own is not None:
        monkeypatch.setenv(VARIABLE, own)
    done = subprocess.run(
        [sys.executable, "-P", "-c", ENTRY], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (own or FEW_THREADS)
