"""`buf curl`, which knows a server only by its reflection, and also with our .proto files."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path

import pytest
from clients.conftest import Tool
from clients.running import ANSWER, QUESTION, documents, run
from google.rpc import error_details_pb2
from load.up import Up

pytestmark = pytest.mark.client
SERVICE = "effuse.v1.GenerationService"


@pytest.fixture
def curl(tool: Tool, fleet: Up) -> tuple[Path | str, ...]:
    return (tool("buf"), "curl", "--http2-prior-knowledge", "--protocol", "grpc")


def test_reflection_describes_every_service(curl: tuple[str, ...], fleet: Up) -> None:
    methods = run(*curl, "--list-methods", f"http://{fleet.address}").split()
    for one in (
        f"{SERVICE}/GenerateStream",
        "effuse.v1.ModelService/ListWorkers",
        "vllm.grpc.engine.VllmEngine/Generate",
        "inference.GRPCInferenceService/ModelStreamInfer",
        "grpc.health.v1.Health/List",
        "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ):
        assert one in methods


@pytest.mark.parametrize("schema", [(), ("--schema", ".")], ids=["reflection", "files"])
def test_unary_and_stream(schema: tuple[str, ...], curl: tuple[str, ...], fleet: Up) -> None:
    def ask(method: str, data: dict[str, object]) -> str:
        url = f"http://{fleet.address}/{SERVICE}/{method}"
        return run(*curl, *schema, "--data", json.dumps(data), url)

    (whole,) = documents(ask("Generate", {"prompt": QUESTION}))
    assert whole["text"].endswith(ANSWER) and whole["finishReason"] == "FINISH_REASON_STOP"
    assert whole["stats"]["totalDuration"].endswith("s")
    events = documents(ask("GenerateStream", {"request": {"prompt": QUESTION}}))
    texts = [event["commit"].get("text", "") for event in events[:-1]]
    assert "".join(texts) == whole["text"]
    assert events[-1]["finished"]["finishReason"] == "FINISH_REASON_STOP"


def test_an_error_names_field_reason_and_domain(curl: tuple[str, ...], fleet: Up) -> None:
    url = f"http://{fleet.address}/{SERVICE}/Generate"
    bad = json.dumps({"prompt": QUESTION, "stopping": {"max_tokens": 0}})
    told = run(*curl, "--data", bad, url, status=24)  # 8 times the code, 3
    error = json.loads(told)
    assert error["code"] == "invalid_argument"
    details = {one["type"]: b64decode(one["value"] + "==") for one in error["details"]}
    info = error_details_pb2.ErrorInfo.FromString(details["google.rpc.ErrorInfo"])
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "effuse")
    bad = error_details_pb2.BadRequest.FromString(details["google.rpc.BadRequest"])
    assert [one.field for one in bad.field_violations] == ["stopping.max_tokens"]


def test_health_lists_what_serves(curl: tuple[str, ...], fleet: Up) -> None:
    (told,) = documents(run(*curl, f"http://{fleet.address}/grpc.health.v1.Health/List"))
    assert told["statuses"][SERVICE] == {"status": "SERVING"}
