"""Mistakes of clients: every message of our own services, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from bad_input.case import INVALID, NOT_FOUND, Case
from bad_input.requests import Facts, wrong_requests
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from effuse.v1 import generation_pb2 as pb
from effuse.v1 import model_pb2, monitor_pb2

GENERATION = "/effuse.v1.GenerationService"
MODELS = "/effuse.v1.ModelService"
WATCH = "/effuse.v1.MonitorService/WatchRequests"
ANOTHERS = "of-another-tenant"
"""Id of a request that another tenant has asked and that was answered."""

BAD_IDS = {
    "empty": "",
    "with a space": "a b",
    "too long": "a" * 129,
    "not ASCII": "é",
    "path": "a/b",
}
BAD_NAMES = {"empty": "", "up": "../etc/passwd", "slashes": "a//b", "too long": "m" * 257}


def good() -> pb.GenerateRequest:
    """A request that is answered."""
    return pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[5, 6, 7, 8, 9]), stopping=pb.StoppingParams(max_tokens=8)
    )


def client_cases(at: Facts) -> Iterator[tuple[str, Case]]:
    """All of them, by name."""
    for table in (_settings, _generation, _chats, _models):
        yield from table(at)


def _settings(at: Facts) -> Iterator[tuple[str, Case]]:
    for name, (change, field, said) in wrong_requests(at).items():
        request = pb.GenerateRequest(prompt="how many?")
        change(request)
        yield f"generate: {name}", _generate(request, field, said)
    for name in ("max_tokens 0", "top_p nan", "the mask id"):
        change, field, said = wrong_requests(at)[name]
        change(request := good())
        sent = pb.GenerateStreamRequest(request=request)
        method = f"{GENERATION}/GenerateStream"
        yield f"stream: {name}", Case(method=method, sent=[sent], field=field, said=said)


def _generate(request: pb.GenerateRequest, field: str, said: str = "", **more: Any) -> Case:
    return Case(method=f"{GENERATION}/Generate", sent=[request], field=field, said=said, **more)


def _asking(**fields: Any) -> pb.GenerateRequest:
    request = good()
    request.MergeFrom(pb.GenerateRequest(**fields))
    return request


def _generation(at: Facts) -> Iterator[tuple[str, Case]]:
    room = at.max_model_len - 5
    yield (
        "generate: drafts",
        _generate(
            _asking(output=pb.OutputOptions(drafts=True)), "output.drafts", "only GenerateStream"
        ),
    )
    yield "generate: prompt and answer together too long", _generate(
        _asking(stopping=pb.StoppingParams(max_tokens=at.max_model_len - 1)),
        "stopping.max_tokens", f"at most {room}: the prompt has 5 tokens",
    )  # fmt: skip
    yield "generate: min_tokens beyond the room", _generate(
        pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=[5] * 200), stopping=pb.StoppingParams(min_tokens=57)
        ),
        "stopping.min_tokens", "at most 56",
    )  # fmt: skip
    yield (
        "generate: text of too many tokens",
        _generate(
            pb.GenerateRequest(prompt="a" * at.max_model_len),
            "prompt",
            f"{at.max_model_len} tokens",
        ),
    )
    yield (
        "generate: reserved token spelled",
        _generate(
            pb.GenerateRequest(prompt="a<|mask|>b", parse_special_tokens=True),
            "prompt",
            "mask token",
        ),
    )
    wide = pb.DecodingParams(algorithm=pb.ALGORITHM_D2F, window=9)
    yield (
        "generate: window beyond a worker's",
        _generate(_asking(decoding=wide), "decoding.window", "max_window 8, got 9"),
    )
    yield "generate: stop ids beyond a worker's", _generate(
        _asking(stopping=pb.StoppingParams(stop_token_ids=range(10, 40))),
        "stopping.stop_token_ids", "max_stop_ids 16, got 31",
    )  # fmt: skip
    for algorithm in ("LLADA", "DREAM", "FAST_DLLM"):
        decoding = pb.DecodingParams(algorithm=f"ALGORITHM_{algorithm}")
        yield (
            f"generate: {algorithm} for another kind of model",
            _generate(
                _asking(decoding=decoding), "decoding.algorithm", "does not attend to all of itself"
            ),
        )
    yield (
        "stream: no request",
        Case(
            method=f"{GENERATION}/GenerateStream", sent=[pb.GenerateStreamRequest()], field="prompt"
        ),
    )
    for name, bad in BAD_IDS.items():
        yield f"generate: id {name}", _generate(_asking(request_id=bad), "request_id", "1 to 128")
        for method, kind in (
            ("GetRequest", pb.GetRequestRequest), ("CancelRequest", pb.CancelRequestRequest)
        ):  # fmt: skip
            path = f"{GENERATION}/{method}"
            yield (
                f"{method}: id {name}",
                Case(method=path, sent=[kind(request_id=bad)], field="request_id"),
            )
    for name, bad in BAD_NAMES.items():
        yield f"generate: model {name}", _generate(_asking(model=bad), "model", "1 to 256")
    yield (
        "generate: unknown model",
        _generate(_asking(model="nowhere"), "", "'nowhere'", code=NOT_FOUND),
    )
    for whose, name in (("nobody's", "nobody"), ("another tenant's", ANOTHERS)):
        for method, kind in (
            ("GetRequest", pb.GetRequestRequest), ("CancelRequest", pb.CancelRequestRequest)
        ):  # fmt: skip
            path = f"{GENERATION}/{method}"
            yield (
                f"{method}: {whose} id",
                Case(method=path, sent=[kind(request_id=name)], code=NOT_FOUND, said=name),
            )


_BAD_JSON = {
    "no JSON": ("{", "the text of a JSON object"),
    "nested": ('{"a":' + "[" * 1000 + "]" * 1000 + "}", "levels"),
    "a huge number": ('{"a": 1e999}', "not a number within a double's range"),
    "many digits": ('{"a": ' + "9" * 3000 + "}", "3000 characters"),
    "half a character": (r'{"a": "\udc00"}', "surro"),
}


def _chats(at: Facts) -> Iterator[tuple[str, Case]]:
    """Inputs that are chats, of Generate and of Tokenize."""
    said = pb.ChatMessage(role="user", content="how many?")
    wrong: dict[str, tuple[pb.ChatInput, str, str]] = {
        "no messages": (pb.ChatInput(), "chat.messages", "from 1 to"),
        "too many messages": (
            pb.ChatInput(messages=[said] * (at.max_model_len + 1)), "chat.messages", "got 257"
        ),
        "unknown role": (
            pb.ChatInput(messages=[said, pb.ChatMessage(role="root", content="a")]),
            "chat.messages[1].role", "'root'",
        ),
        "no role": (pb.ChatInput(messages=[pb.ChatMessage(content="a")]),
            "chat.messages[0].role", "''"),
        "too many bytes": (
            pb.ChatInput(messages=[pb.ChatMessage(role="user", content="a" * 5000)]),
            "chat.messages", "5000 bytes",
        ),
        "continues the user": (
            pb.ChatInput(messages=[said], continue_last_message=True),
            "chat.messages[0].role", "assistant",
        ),
        "continues and begins": (
            pb.ChatInput(
                messages=[pb.ChatMessage(role="assistant", content="a")],
                continue_last_message=True, add_generation_prompt=True,
            ),
            "chat.add_generation_prompt", "got true",
        ),
        "the template refuses": (
            pb.ChatInput(messages=[pb.ChatMessage(role="system", content="a")]),
            "chat", "no system here",
        ),
    }  # fmt: skip
    for name in ("messages", "add_generation_prompt"):
        chat = pb.ChatInput(messages=[said])
        chat.template_arguments[name] = "mine"
        wrong[f"argument {name}"] = (chat, "chat.template_arguments", name)
    large = pb.ChatInput(messages=[said])
    large.template_arguments["loud"] = "a" * 5000
    wrong["large arguments"] = (large, "chat.template_arguments", "bytes")
    for name, (text, words) in _BAD_JSON.items():
        arguments = pb.ChatInput(messages=[said], template_arguments_json=text)
        wrong[f"arguments, {name}"] = (arguments, "chat.template_arguments_json", words)
        message = pb.ChatInput(messages=[said, pb.ChatMessage(json=text)])
        wrong[f"message, {name}"] = (message, "chat.messages[1].json", words)
    for name, (chat, field, text) in wrong.items():
        yield f"generate: chat, {name}", _generate(pb.GenerateRequest(chat=chat), field, text)
    for name in ("no messages", "unknown role"):
        chat, field, text = wrong[name]
        sent = model_pb2.TokenizeRequest(chat=chat)
        yield (
            f"Tokenize: chat, {name}",
            Case(method=f"{MODELS}/Tokenize", sent=[sent], field=field, said=text),
        )


def _models(at: Facts) -> Iterator[tuple[str, Case]]:
    def case(
        method: str, sent: Message, field: str, said: str = "", code: grpc.StatusCode = INVALID
    ) -> Case:
        return Case(method=f"{MODELS}/{method}", sent=[sent], field=field, said=said, code=code)

    for name, bad in BAD_NAMES.items():
        yield f"GetModel: {name}", case("GetModel", model_pb2.GetModelRequest(name=bad), "name")
    unknown = model_pb2.GetModelRequest(name="nowhere")
    yield "GetModel: unknown", case("GetModel", unknown, "", "nowhere", NOT_FOUND)
    tokenize, detokenize = model_pb2.TokenizeRequest, model_pb2.DetokenizeRequest
    yield "Tokenize: nothing", case("Tokenize", tokenize(), "prompt", "neither")
    yield "Tokenize: empty", case("Tokenize", tokenize(prompt=""), "prompt")
    yield "Tokenize: too long", case("Tokenize", tokenize(prompt="a" * 5000), "prompt", "5000")
    yield "Tokenize: bad model", case("Tokenize", tokenize(prompt="a", model=".."), "model")
    yield (
        "Tokenize: unknown model",
        case("Tokenize", tokenize(prompt="a", model="nowhere"), "", "nowhere", NOT_FOUND),
    )
    spelled = tokenize(prompt="<|mask|>", parse_special_tokens=True)
    yield "Tokenize: reserved token", case("Tokenize", spelled, "prompt", "mask token")
    yield (
        "Detokenize: too many",
        case(
            "Detokenize", detokenize(token_ids=[5] * (at.max_model_len + 1)), "token_ids", "257 ids"
        ),
    )
    yield (
        "Detokenize: beyond the vocabulary",
        case("Detokenize", detokenize(token_ids=[5, at.vocab_size]), "token_ids[1]"),
    )
    yield "Detokenize: bad model", case("Detokenize", detokenize(model="-"), "model")
    yield (
        "Detokenize: unknown model",
        case("Detokenize", detokenize(model="nowhere"), "", "nowhere", NOT_FOUND),
    )
    intervals = {
        "negative": Duration(seconds=-1), "too short": Duration(nanos=1_000_000),
        "too long": Duration(seconds=61), "endless": Duration(seconds=2**62),
        "of two signs": Duration(seconds=1, nanos=-5), "of much": Duration(nanos=2**31 - 1),
    }  # fmt: skip
    for name, interval in intervals.items():
        yield (
            f"watch: interval {name}",
            Case(
                method=WATCH,
                sent=[monitor_pb2.WatchRequestsRequest(interval=interval)],
                field="interval",
            ),
        )
