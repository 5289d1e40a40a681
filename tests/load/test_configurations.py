"""What `make load` asks ghz for exists."""

from __future__ import annotations

import json
from pathlib import Path


def test_the_configurations_call_what_exists() -> None:
    folder = Path(__file__).parent
    calls = {
        json.loads((folder / f"{name}.json").read_text())["call"] for name in ("unary", "stream")
    }
    service = "effuse.v1.GenerationService"
    assert calls == {f"{service}.Generate", f"{service}.GenerateStream"}
