"""The methods and fields that `make load` gives to ghz exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.json_format import ParseDict
from google.protobuf.message_factory import GetMessageClass

from effuse.v1 import generation_pb2  # noqa: F401  registers the messages


@pytest.mark.parametrize("name", ["unary", "stream"])
def test_the_configurations_call_what_exists(name: str) -> None:
    told = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    method = descriptor_pool.Default().FindMethodByName(told["call"])
    assert method.server_streaming == (name == "stream")
    for data in told["data"]:
        assert ParseDict(data, GetMessageClass(method.input_type)()).ByteSize()
