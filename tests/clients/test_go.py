"""grpc-go against a router, with stubs that Go's generators make of our .proto files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from clients.conftest import Tool
from clients.running import ANSWER, HERE, QUESTION, run, run_script
from load.up import Up

pytestmark = pytest.mark.client


@pytest.fixture
def program(tool: Tool, tmp_path: Path) -> Path:
    """The client of `go_client.go`, built in a module named effuse, as `go_package` has it."""
    folder, buf = tool("go-client"), tool("buf")
    for name in ("go.mod", "go.sum"):
        shutil.copy(folder / name, tmp_path)
    shutil.copy(HERE / "go_client.go", tmp_path)
    plugins = [
        f'{{"local": "{folder}/bin/{name}", "out": "{tmp_path}", "opt": "module=effuse"}}'
        for name in ("protoc-gen-go", "protoc-gen-go-grpc")
    ]
    template = f'{{"version": "v2", "plugins": [{", ".join(plugins)}]}}'
    run(buf, "generate", "--template", template)
    made = tmp_path / "go_client"
    run(folder / "bin" / "go", "build", "-mod=mod", "-o", made, ".", cwd=tmp_path)
    return made


def test_grpc_go(program: Path, fleet: Up) -> None:
    found = run_script(program, fleet.address, QUESTION)
    whole = found["whole"]
    assert whole["text"].endswith(ANSWER) and whole["reason"] == "FINISH_REASON_STOP"
    assert whole["duration"] > 0 and whole["named"] == [whole["id"]]
    assert found["streamed"] == {"text": whole["text"], "reason": "FINISH_REASON_STOP"}
    assert found["bad"] == {
        "code": "InvalidArgument", "reason": "INVALID_REQUEST", "domain": "effuse",
        "field": "stopping.max_tokens",
    }  # fmt: skip
    assert found["late"] == "DeadlineExceeded"
