"""grpcurl: reflection, JSON in and out, error details and trailers."""

from __future__ import annotations

import json

import pytest
from clients.conftest import Tool
from clients.running import ANSWER, QUESTION, documents, run
from load.up import Up

pytestmark = pytest.mark.client
SERVICE = "effuse.v1.GenerationService"


def test_what_it_lists_and_describes(tool: Tool, fleet: Up) -> None:
    grpcurl = (tool("grpcurl"), "-plaintext")
    services = run(*grpcurl, fleet.address, "list").split()
    assert {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"} <= set(
        services
    )
    told = run(*grpcurl, fleet.address, "describe", f"{SERVICE}.GenerateStream")
    assert "stream .effuse.v1.GenerateStreamResponse" in told


def test_unary_and_stream(tool: Tool, fleet: Up) -> None:
    grpcurl = (tool("grpcurl"), "-plaintext")
    data = json.dumps({"prompt": QUESTION, "request_id": "grpcurl-1"})
    told = run(*grpcurl, "-v", "-d", data, fleet.address, f"{SERVICE}/Generate")
    assert ANSWER in told and "x-request-id: grpcurl-1" in told
    data = json.dumps({"request": {"prompt": QUESTION}})
    events = documents(run(*grpcurl, "-d", data, fleet.address, f"{SERVICE}/GenerateStream"))
    text = "".join(event["commit"].get("text", "") for event in events[:-1])
    assert text.endswith(ANSWER) and "finished" in events[-1]


def test_an_error_has_details(tool: Tool, fleet: Up) -> None:
    grpcurl = (tool("grpcurl"), "-plaintext", "-format-error")
    data = json.dumps({"model": "nowhere", "prompt": QUESTION})
    told = run(*grpcurl, "-d", data, fleet.address, f"{SERVICE}/Generate", status=69)  # 64 + 5
    error = json.loads(told)
    (info,) = error["details"]
    assert (error["code"], info["reason"], info["domain"]) == (5, "NOT_FOUND", "effuse")
