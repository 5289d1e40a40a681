"""Bad input gets the right status with a helpful message, and costs no worker its life."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import grpc
import pytest
from e2e.client import Client, connect, wait_until
from e2e.processes import pids, standing_still
from e2e.tiny import TINY, tiny_fleet

from effuse.cli.fleet import Fleet
from effuse.client.chat import Chat
from effuse.v1 import generation_pb2 as pb

WIDE = pb.DecodingParams(algorithm=pb.ALGORITHM_D2F, window=9)
GENERATE = "/effuse.v1.GenerationService/Generate"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with tiny_fleet("sdar", connector="zmq") as running:
        yield running


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[Client]:
    with connect(fleet.address) as connected:
        yield connected


def good() -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[5, 6, 7, 8, 9]),
        stopping=pb.StoppingParams(max_tokens=8),
    )


def changed(change: Callable[[pb.GenerateRequest], object]) -> pb.GenerateRequest:
    request = good()
    change(request)
    return request


CASES: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, str]] = {
    "empty prompt": (pb.GenerateRequest(prompt=""), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    "no prompt": (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    "a chat without a template": (
        pb.GenerateRequest(chat=Chat().user("hi").to_input()),
        grpc.StatusCode.INVALID_ARGUMENT,
        "has no chat template",
    ),
    "no ids": (
        changed(lambda r: r.prompt_token_ids.ClearField("ids")),
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt_token_ids",
    ),
    "too long": (
        changed(lambda r: r.prompt_token_ids.ids.extend([5] * TINY.max_model_len)),
        grpc.StatusCode.INVALID_ARGUMENT,
        str(TINY.max_model_len - 1),
    ),
    "mask id inside": (
        changed(lambda r: r.prompt_token_ids.ids.append(TINY.mask_token_id)),
        grpc.StatusCode.INVALID_ARGUMENT,
        f"mask id {TINY.mask_token_id}",
    ),
    "id beyond the vocabulary": (
        changed(lambda r: r.prompt_token_ids.ids.append(TINY.vocab_size)),
        grpc.StatusCode.INVALID_ARGUMENT,
        str(TINY.vocab_size),
    ),
    "temperature NaN": (
        changed(lambda r: setattr(r.sampling, "temperature", math.nan)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "temperature",
    ),
    "temperature negative": (
        changed(lambda r: setattr(r.sampling, "temperature", -1.0)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "temperature",
    ),
    "top_p zero": (
        changed(lambda r: setattr(r.sampling, "top_p", 0.0)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "top_p",
    ),
    "threshold NaN": (
        changed(lambda r: setattr(r.decoding, "confidence_threshold", math.nan)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "confidence_threshold",
    ),
    "threshold negative": (
        changed(lambda r: setattr(r.decoding, "block_add_threshold", -0.5)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "block_add_threshold",
    ),
    "window zero": (
        changed(lambda r: setattr(r.decoding, "window", 0)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "window",
    ),
    "window wider than a decode worker's": (
        changed(
            lambda r: r.decoding.MergeFrom(pb.DecodingParams(algorithm=pb.ALGORITHM_D2F, window=9))
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "max_window 8, got 9",
    ),
    "more stop ids than a decode worker's": (
        changed(lambda r: r.stopping.stop_token_ids.extend(range(10, 40))),
        grpc.StatusCode.INVALID_ARGUMENT,
        "max_stop_ids 16, got 31",
    ),
    "max_tokens zero": (
        changed(lambda r: setattr(r.stopping, "max_tokens", 0)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "max_tokens",
    ),
    "unknown model": (
        changed(lambda r: setattr(r, "model", "no-such-model")),
        grpc.StatusCode.NOT_FOUND,
        "no-such-model",
    ),
    "request id with a space": (
        changed(lambda r: setattr(r, "request_id", "a b")),
        grpc.StatusCode.INVALID_ARGUMENT,
        "request_id",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_is_refused_and_the_next_good_request_succeeds(
    fleet: Fleet, client: Client, name: str
) -> None:
    request, code, word = CASES[name]
    before = _all_pids(fleet)
    with pytest.raises(grpc.RpcError) as refused:
        client.generate(request)
    assert refused.value.code() is code, refused.value.details()
    assert word in _details(refused.value)
    assert client.generate(good()).usage.completion_tokens > 0
    assert _all_pids(fleet) == before


@pytest.mark.parametrize(
    ("name", "payload", "code"),
    [
        ("malformed", b"\xff\xff\xff\xff\x0f\x00", grpc.StatusCode.INVALID_ARGUMENT),
        ("truncated", good().SerializeToString()[:-3], grpc.StatusCode.INVALID_ARGUMENT),
        ("invalid UTF-8", b"\x1a\x02\xc3\x28", grpc.StatusCode.INVALID_ARGUMENT),
        (
            "oversized",
            b"\x1a\xff\xff\xff\x02" + b"a" * (6 << 20),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ),
    ],
)
def test_bytes_that_are_no_request(
    fleet: Fleet, client: Client, name: str, payload: bytes, code: grpc.StatusCode
) -> None:
    before = _all_pids(fleet)
    with pytest.raises(grpc.RpcError) as refused:
        send: grpc.UnaryUnaryMultiCallable[bytes, bytes] = client.channel.unary_unary(GENERATE)
        send(payload, timeout=60)
    assert refused.value.code() is code, refused.value.details()
    assert "Traceback" not in _details(refused.value)
    assert "Error parsing" not in _details(refused.value)
    assert client.generate(good()).usage.completion_tokens > 0
    assert _all_pids(fleet) == before


def test_the_id_of_a_running_request(fleet: Fleet, client: Client) -> None:
    """The first request cannot go on while a second one asks for its id."""
    first, second = good(), good()
    first.request_id = second.request_id = "twice"
    before = _all_pids(fleet)
    with standing_still(fleet.processes["decode-0"].pid):
        events = client.stream(first)
        wait_until(lambda: client.attempt_of("twice") == 1, "the first request never ran")
        with pytest.raises(grpc.RpcError) as refused:
            client.generate(second)
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "twice" in _details(refused.value)
    assert list(events)[-1].HasField("finished")
    assert client.generate(second).usage.completion_tokens > 0, "the id is free again"
    assert _all_pids(fleet) == before


def _details(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call)
    return error.details() or ""


def _all_pids(fleet: Fleet) -> dict[str, set[int]]:
    return {name: pids(process.pid) for name, process in fleet.processes.items()}
