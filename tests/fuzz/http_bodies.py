"""The drawn inputs of HTTP surfaces: whole requests and pieces of them, as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fuzz.drawing import TEXTS, Draw, bent, garbage, mutated

TOKEN: Final = "a-token"
Headers = list[tuple[bytes, bytes]]

_CHAT: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "how many?"},
]
_SETTINGS: Final[dict[str, Any]] = {
    "max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "seed": 11, "n": 2, "stop": ["zz", "y"],
    "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False},
    "logit_bias": {"65": 2.5}, "user": "a", "response_format": {"type": "text"}, "best_of": 1,
    "model": "fake", "request_id": "one", "priority": 1, "block_size": 4, "confidence": 0.9,
}  # fmt: skip
_CONTENT: Final = [{"type": "text", "text": "how"}, {"type": "text", "text": "many?"}]
_TOOL: Final = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
}
GOODS: Final[Mapping[str, Sequence[dict[str, Any]]]] = {
    "/v1/chat/completions": (
        {"messages": _CHAT},
        {"messages": _CHAT, "stream": True},
        {"messages": _CHAT, "logprobs": True, "top_logprobs": 2, "stream": True},
        {"messages": [{"role": "user", "content": _CONTENT}], "tool_choice": "none"},
        {"messages": _CHAT, "tools": [_TOOL], "documents": [{"text": "a"}]},
        {"messages": _CHAT, "chat_template_kwargs": {"a": [1]}, "continue_final_message": True},
        {"messages": _CHAT, "max_completion_tokens": 5, "add_generation_prompt": False},
    ),
    "/v1/completions": (
        {"prompt": "how many?"},
        {"prompt": "how many?", "stream": True, "logprobs": 2, "echo": True},
        {"prompt": ["one?", "two?"], "n": 2, "stream": True},
        {"prompt": [65, 66, 67]},
        {"prompt": [[65, 66], [67]], "echo": True, "logprobs": 0},
    ),
    "/v1/tokenize": ({"messages": _CHAT}, {"prompt": "how many?"}, {"prompt": "a", "model": "x"}),
}
_PATHS: Final = (
    *("/v1/models", "/v1/models/fake", "/v1/models/", "/v1/models/a%2Fb/%00", "/health", "/"),
    *("/v1/models/%ed%a0%80", "/v1/../health", "//", "*", "http://a/health", "/v1/completions?a=%"),
    *("/v1/models?" + "a" * 3000, "/health#a", "/v1/chat/completions/", "/metrics"),
)
_METHODS: Final = (b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"TRACE", b"CONNECT", b"get", b"A")
_LITERALS: Final = (
    *('"\\ud800"', '"\\udc00a"', '"\\u0000"', '"a\\ud83d"', "NaN", "-Infinity", "1e999", "-1e-999"),
    *("1" * 400, "1" * 5000, "1.0000000000000000000001", "-0", "-0.0", "[" * 2000 + "]" * 2000),
    *('{"a":' * 2000 + "1" + "}" * 2000, "[" * 60_000, '{"a":1,"a":2}', '"' + "é" * 9000 + '"'),
    *("9223372036854775808", "-9223372036854775809", "18446744073709551616", "1E400", "tru", ""),
)
"""JSON that Python's encoder does not write."""
_MARK: Final = "the literal's place"
_ODD: Final[Mapping[bytes, Sequence[bytes]]] = {
    b"Content-Type": (
        *(b"text/plain", b"application/json; charset=utf-16", b"", b"application/JSON ;;"),
        *(b"application/x-www-form-urlencoded", b"\xff\xfe", b"application/json, text/html"),
    ),
    b"Authorization": (b"Bearer", b"Bearer \xff", b"Basic YTpi", b"Bearer " + b"a" * 5000, b""),
    b"X-Request-Id": (b"", b"a", b"\xe9", b"a" * 300, b"a\tb", b"../a", b"\xf0\x9f\x98\x80"),
    b"X-Stainless-Retry-Count": (b"1", b"-1", b"a", b"\xff"),
    b"Content-Encoding": (b"gzip", b"identity", b"\xff", b"br, gzip"),
    b"Expect": (b"100-continue", b"a"),
    b"Connection": (b"close", b"keep-alive", b"Upgrade", b"a, b"),
    b"Upgrade": (b"h2c", b"websocket", b""),
    b"Traceparent": (b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"\xff", b"00-0-0-0"),
    b"Host": (b"", b"b", b"\xff", b"a:99999999"),
    b"Cookie": (b"a=" + b"b" * 9000,),
}
_LENGTHS: Final = (
    *(b"-1", b"+5", b"0x5", b" 5", b"5, 5", b"5, 6", b"99999999999999999999999", b"", b"a"),
    *(b"1" * 5000, b"\xd9\xa5", b"0", b"5_0", b"1000000000"),
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Bytes for one connection. `count`: the responses that they must get, if their framing is
    right; None if it is not, and any number of responses is right."""

    data: bytes
    count: int | None


def drawn_body(draw: Draw, path: str) -> bytes:
    """A body that is nearly good for this path."""
    good = dict(draw.choice(GOODS.get(path) or GOODS["/v1/completions"]))
    for name in draw.sample(sorted(_SETTINGS), draw.choice((0, 0, 1, 2, 5))):
        good[name] = _SETTINGS[name]
    way = draw.random()
    for _ in range(0 if way < 0.1 else draw.choice((1, 1, 1, 2, 4))):
        good = _changed(draw, good)
    data = json.dumps(good, default=lambda given: given.decode("latin-1")).encode()
    if draw.random() < 0.5:
        data = data.replace(json.dumps(_MARK).encode(), draw.choice(_LITERALS).encode())
    if way > 0.9:
        return mutated(draw, data)
    return garbage(draw) if way > 0.88 else data


def _changed(draw: Draw, good: dict[str, Any]) -> dict[str, Any]:
    way = draw.random()
    if way < 0.1:  # a field of any endpoint, or of none
        names = [*_SETTINGS, *(name for each in GOODS.values() for one in each for name in one)]
        name = draw.choice((draw.choice(names), draw.choice(TEXTS)))
        return {**good, name: bent(draw, draw.choice((*good.values(), *_SETTINGS.values())))}
    changed = _marked(draw, good) if way < 0.4 else bent(draw, good)
    return changed if isinstance(changed, dict) else {"prompt": changed}


def _marked(draw: Draw, value: Any) -> Any:
    """The value with a place for a literal, however deep."""
    if isinstance(value, dict) and value:
        name = draw.choice(sorted(value))
        return {**value, name: _marked(draw, value[name])}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], _marked(draw, value[at]), *value[at + 1 :]]
    return _MARK


def drawn_call(draw: Draw, most_calls: int = 3) -> Drawn:
    """Whole requests in one piece of bytes, the last of which ends the connection; or a piece."""
    calls = draw.choice((1, 1, 1, 1, most_calls))
    requests = [_request(draw, is_last=at == calls - 1, is_only=calls == 1) for at in range(calls)]
    data, is_right = b"".join(one for one, _ in requests), all(right for _, right in requests)
    way = draw.random()
    if way < 0.05:
        return Drawn(mutated(draw, data), None)
    if way < 0.1:
        return Drawn(data[: draw.randrange(len(data) + 1)], None)
    return Drawn(garbage(draw), None) if way < 0.11 else Drawn(data, calls if is_right else None)


def _request(draw: Draw, *, is_last: bool, is_only: bool) -> tuple[bytes, bool]:
    """One request, and whether its framing is right."""
    method, path, body, is_right = b"POST", draw.choice(sorted(GOODS)), b"", True
    if draw.random() < 0.85:
        body = drawn_body(draw, path)
    else:
        method, path = draw.choice((b"GET", b"GET", draw.choice(_METHODS))), draw.choice(_PATHS)
        if method == b"HEAD" and not is_only:  # its response has a length and no body
            method = b"GET"
        is_right = method not in (b"CONNECT", b"HEAD")
    headers: Headers = [
        (b"Host", b"a"),
        (b"Content-Type", b"application/json"),
        (b"Authorization", f"Bearer {TOKEN}".encode()),
    ]
    if is_last:
        headers.append((b"Connection", b"close"))
    if draw.random() < 0.2:
        name = draw.choice(sorted(_ODD))
        headers = [one for one in headers if one[0] != name]
        headers.append((name, draw.choice(_ODD[name])))
        is_right = is_right and name not in (b"Connection", b"Upgrade", b"Expect", b"Host")
    way = draw.random()
    if way < 0.1:
        headers.append((b"Transfer-Encoding", b"chunked"))
        body, is_right = _chunked(draw, body), False
    elif way < 0.13:
        headers.append((b"Content-Length", draw.choice(_LENGTHS)))
        is_right = False
    else:
        headers.append((b"Content-Length", b"%d" % len(body)))
    lines = b"".join(b"%b: %b\r\n" % one for one in headers)
    return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, path.encode(), lines, body), is_right


def _chunked(draw: Draw, body: bytes) -> bytes:
    """Chunks, which may be cut, doubled or of a false size."""
    at, pieces = 0, []
    while at < len(body):
        size = draw.choice((1, 7, 100, len(body)))
        piece = body[at : at + size]
        pieces.append(b"%x%b\r\n%b\r\n" % (len(piece), draw.choice((b"", b";a=b")), piece))
        at += max(size, len(body) // 20)
    pieces.append(draw.choice((b"0\r\n\r\n", b"0\r\nA: b\r\n\r\n", b"")))
    data = b"".join(pieces)
    return mutated(draw, data) if draw.random() < 0.3 else data
