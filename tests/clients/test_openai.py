"""The openai package against SMG, a gateway that has nothing but a router behind it."""

from __future__ import annotations

import contextlib
import subprocess
import time
import urllib.request
from collections.abc import Generator
from pathlib import Path

import pytest
from clients.conftest import Tool
from clients.running import ANSWER, HERE, QUESTION, run_script
from load.up import Up
from slowness import patient

from effuse.cli.ports import free_port

pytestmark = pytest.mark.client
START_S = patient(60.0)


def test_openai_through_a_gateway(tool: Tool, fleet: Up, tmp_path: Path) -> None:
    folder = tool("smg") / "bin"
    with gateway(folder / "smg", fleet.address, tmp_path) as url:
        found = run_script(folder / "python", HERE / "openai_client.py", url, QUESTION)
    assert found["models"] == ["bundled"]
    assert found["text"].endswith(ANSWER) and found["reason"] == "stop"
    first_line, text = found["stopped"], found["text"]
    assert first_line and text.startswith(first_line) and "\n" not in first_line
    streamed = found["streamed"]
    assert "".join(streamed["texts"]) == text and len(streamed["texts"]) > 1
    assert (streamed["reason"], streamed["completion_tokens"]) == ("stop", found["usage"][1])
    assert found["completion_tokens"] == 8
    assert (
        found["too_long"].startswith("400:") and "sampling_params.max_tokens" in found["too_long"]
    )
    assert found["schema"].startswith("400:") and "sampling_params.json" in found["schema"]
    tokens, logprobs, tops = zip(*found["logprobs"], strict=True)
    assert "".join(tokens).strip() and max(logprobs) <= 0.0 and set(tops) == {2}
    assert found["hung_up"] and fleet.held() == []


@contextlib.contextmanager
def gateway(smg: Path, worker: str, folder: Path) -> Generator[str, None, None]:
    """The address of a gateway that knows the model, as long as the context lasts."""
    ports = free_port(), free_port()
    command = [
        str(smg), "launch", "--host", "127.0.0.1", "--port", str(ports[0]),
        "--worker-urls", f"grpc://{worker}", "--log-level", "warn",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports[1]),
    ]  # fmt: skip
    url = f"http://127.0.0.1:{ports[0]}"
    with (
        (folder / "gateway.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as process,
    ):
        try:
            wait_until_ready(url, process)
            yield url
        finally:
            process.terminate()
            process.wait(30)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    models, deadline = f"{url}/v1/models", time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the gateway has ended"
        with contextlib.suppress(OSError), urllib.request.urlopen(models, timeout=5) as told:
            if b"bundled" in told.read():
                return
        time.sleep(0.2)
    raise AssertionError("the gateway knows no model")
