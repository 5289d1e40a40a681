"""grpc-js against a router: pure JavaScript, with an HTTP/2 implementation of its own."""

from __future__ import annotations

import pytest
from clients.conftest import Tool
from clients.running import ANSWER, HERE, QUESTION, ROOT, run_script
from load.up import Up

pytestmark = pytest.mark.client


def test_grpc_js(tool: Tool, fleet: Up) -> None:
    folder = tool("grpc-js")
    script = (HERE / "grpc_js.cjs", folder, ROOT / "protos")
    found = run_script(folder / "node", *script, fleet.address, QUESTION)
    whole, bad = found["whole"], found["bad"]
    assert whole["text"].endswith(ANSWER) and whole["finish_reason"] == "FINISH_REASON_STOP"
    assert whole["request_id"] == whole["named"] == "js-1"
    assert whole["stats"]["total_duration"]["nanos"] > 0
    assert (bad["code"], bad["has_status"]) == (3, True) and bad["named"]
    assert bad["details"].startswith("stopping.max_tokens: expected")
    assert "".join(found["streamed"]["texts"]) == whole["text"]
    assert (found["streamed"]["reason"], found["streamed"]["code"]) == ("FINISH_REASON_STOP", 0)
    assert found["cancelled"]["code"] == 1 and found["cancelled"]["reason"] is None
