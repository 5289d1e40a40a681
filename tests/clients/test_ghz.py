"""ghz: the load test's two configurations, with fewer calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clients.conftest import Tool
from clients.running import run
from load.run import HERE
from load.up import Up

from effuse.cli import check_ghz

pytestmark = pytest.mark.client


@pytest.mark.parametrize("name", ["unary", "stream"])
def test_ghz(name: str, tool: Tool, fleet: Up, tmp_path: Path) -> None:
    config, told = tmp_path / "config.json", tmp_path / "told.json"
    fewer = json.loads((HERE / f"{name}.json").read_text()) | {"total": 12, "timeout": "60s"}
    config.write_text(json.dumps(fewer))
    run(tool("ghz"), "--config", config, "--format", "json", "--output", told, fleet.address)
    assert check_ghz.main([str(told), "--count", "12"]) == 0
