"""Settings of the gRPC library before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from effuse.protos import library

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


def test_the_environments_choice_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "mine")
    library.settle()
    assert os.environ[library.VARIABLE] == "mine"


def test_a_router_says_it_before_grpc_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    done = subprocess.run(
        [sys.executable, "-P", "-c", ENTRY], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == library.FEW_THREADS
