"""tritonclient against a router: KServe's protocol as Triton's users speak it."""

from __future__ import annotations

import pytest
from clients.conftest import Tool
from clients.running import ANSWER, HERE, QUESTION, run_script
from load.up import Up

pytestmark = pytest.mark.client


def test_tritonclient(tool: Tool, fleet: Up) -> None:
    python = tool("triton") / "bin" / "python"
    found = run_script(python, HERE / "triton_client.py", fleet.address, QUESTION)
    assert found["live"] and found["ready"] and found["model_ready"]
    assert found["inputs"] == ["text_input"]
    assert found["text"].endswith(ANSWER)
    assert (found["reason"], found["id"]) == ("stop", "7")
    assert (found["short"], found["tokens"]) == ("length", 3)
    streamed = found["stream"]
    assert "".join(streamed["texts"]) == found["text"] and len(streamed["texts"]) > 1
    assert (streamed["reason"], streamed["id"]) == ("stop", "8")
    assert "NOT_FOUND: model 'nowhere' does not exist" in found["stream_error"]["error"]
    assert found["unknown_model"].startswith("StatusCode.NOT_FOUND: model 'nowhere' does not exist")
    assert found["bad_setting"].startswith("StatusCode.INVALID_ARGUMENT: parameters['temperature']")
