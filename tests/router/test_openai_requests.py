"""Bodies of OpenAI's API that do not fit: the message has the accepted form, once a field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from effuse.client.chat import Chat
from effuse.protos.errors import InvalidRequest
from effuse.router.findings import Findings
from effuse.router.openai_requests import (
    _FIELDS,
    _NEUTRAL,
    Endpoint,
    _prompts,
    parse_body,
    request_of,
)

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}
HALF = "\ud800"  # of a surrogate pair


@pytest.mark.parametrize(
    ("endpoint", "body", "told"),
    [
        (
            *("completion", {"prompt": 5}),
            "prompt: expected a string or a list of strings, integers or lists of integers, "
            "got an integer",
        ),
        (
            *("completion", {"prompt": [1, True]}),
            "prompt[1]: expected a string, an integer or a list of integers, got true",
        ),
        ("completion", {"prompt": [[1, "a"]]}, "prompt[0][1]: expected an integer, got a string"),
        ("completion", {"prompt": ["a", HALF]}, "prompt[1]: expected whole characters, got"),
        ("completion", {"prompt": [[1], [-1]]}, "prompt[1]: expected token ids from 0 to"),
        ("completion", {"prompt": [1, -1]}, "prompt: expected token ids from 0 to"),
        (
            "completion",
            TEXT | {"max_tokens": HALF},
            "max_tokens: expected an integer, got a string",
        ),
        ("completion", TEXT | {"n": "2"}, "n: expected an integer, got a string"),
        ("completion", TEXT | {"n": {}}, "n: expected an integer, got an object"),
        ("completion", TEXT | {"top_p": HALF}, "top_p: expected a number, got a string"),
        ("completion", TEXT | {"top_p": [1]}, "top_p: expected a number, got a list"),
        ("completion", TEXT | {"echo": "yes"}, "echo: expected true or false, got a string"),
        ("completion", TEXT | {"stop": [1]}, "stop[0]: expected a string, got an integer"),
        ("completion", TEXT | {"stop": [HALF]}, "stop[0]: expected whole characters, got"),
        ("completion", TEXT | {"stop_token_ids": "a"}, "expected a list of integers, got a string"),
        (
            *("completion", TEXT | {"logit_bias": {"1": "a"}}),
            "logit_bias['1']: expected a number, got a string",
        ),
        (
            *("completion", TEXT | {"logit_bias": {"1" * 5000: 1}}),
            "logit_bias: expected token ids as names, got",
        ),
        (
            *("completion", TEXT | {"logit_bias": {"20": 1, "020": 5}}),
            "logit_bias: expected token ids as names, got '020'",
        ),
        (
            *("completion", TEXT | {"stream": True, "stream_options": {"include_usage": 1}}),
            "stream_options['include_usage']: expected true or false, got an integer",
        ),
        ("chat", {"messages": "hi"}, "messages: expected a list of objects, got a string"),
        ("chat", {"messages": [None]}, "messages[0]: expected an object, got null"),
        ("completion", {}, "prompt: expected a string, token ids, or a list of either, got none"),
        ("completion", TEXT | {"n": 1.5}, "n: expected an integer, got 1.5"),
        ("chat", CHAT | {"tool_choice": "required"}, "expected one of none, auto, got 'required'"),
        ("chat", CHAT | {"algorithm": "x" * 3000}, "block_diffusion, llada, dream, fast_dllm"),
        ("chat", CHAT | {"algorithm": "x" * 3000}, "... (3000 characters)"),
        (
            "chat",
            CHAT | {"tool_choice": {"a": 1}},
            "expected one of none, auto, got an object",
        ),
    ],
)
def test_a_misfit_is_told_once_and_cut(endpoint: Endpoint, body: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        request_of(body, endpoint)
    (one,) = refused.value.violations
    text = f"{one.field}: {one.description}"
    assert told in text and text.count("expected") == 1 and len(text) < 300


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"prompt": ', "Expecting value"),
        (b'{"prompt": "\xe9"}', "can't decode byte 0xe9"),
        (b'{"top_p": NaN}', "got the number NaN, which JSON does not have"),
        (b'{"n": 1%b}' % (b"0" * 5000), "got a number of more than 4300 digits"),
        (b"[" * 200_000, "got too many lists and objects within each other"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_in_words(body: bytes, told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_body(body)
    assert "expected a body of JSON, got" in refused.value.message
    assert told in refused.value.message and "sys." not in refused.value.message


@pytest.mark.parametrize("at", range(9))
def test_the_first_of_several_misfits_is_named(at: int) -> None:
    for count in range(at + 1, 10):
        parts: list[object] = ["x"] * at + [1] * (count - at)
        with pytest.raises(
            InvalidRequest, match=rf"stop\[{at}\]: expected a string, got an integer"
        ):
            request_of(TEXT | {"stop": parts}, "completion")
        biases = {f"{key}": 1 if part == "x" else "x" for key, part in enumerate(parts)}
        with pytest.raises(InvalidRequest, match=rf"logit_bias\['{at}'\]: expected a number"):
            request_of(TEXT | {"logit_bias": biases}, "completion")


def test_a_text_is_not_looked_at_by_its_characters() -> None:
    class Text(str):
        __slots__ = ()

        def __iter__(self) -> Iterator[str]:
            raise AssertionError("a prompt may have millions of them")

    prompt = Text("how many?")
    assert _prompts({"prompt": prompt}, Findings()) == [prompt]


def test_no_more_than_some_unknown_names_are_told() -> None:
    many = {f"{at:x}": True for at in range(100_000)}
    with pytest.raises(InvalidRequest) as refused:
        request_of(TEXT | many | {"n": "2"}, "completion")
    assert len(refused.value.violations) <= 33
    assert any(one.field == "n" for one in refused.value.violations)
    assert refused.value.message.endswith("and 99969 more")
    with pytest.raises(InvalidRequest) as refused:
        request_of(TEXT | {"stream": True, "stream_options": many}, "completion")
    (one,) = refused.value.violations
    assert one.field == "stream_options" and one.description.endswith("got '0'")


def test_a_null_among_stream_options_is_not_set() -> None:
    for options in ({"include_usage": None}, {"include_usage": None, "include_obfuscation": True}):
        sent = TEXT | {"stream": True, "stream_options": options}
        assert not request_of(sent, "completion").adds_usage
    assert not request_of(
        TEXT | {"stream_options": {"include_usage": None}}, "completion"
    ).is_stream


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"b": 2.0, "a": 12345678901234567}', {"b": 2.0, "a": 12345678901234567}),
        ("{}", {}),
        ({"a": 1}, {"a": 1}),
        *((text, text) for text in ("", "a = 1", "[1]", '"x"', '{"a": NaN}', "[" * 100_000)),
    ],
)
def test_a_template_gets_the_object_that_a_calls_text_means(text: object, taken: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": text}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    (asked,) = request_of({"messages": [said]}, "chat").requests
    (message,) = Chat.from_input(asked.chat).messages
    (found,) = message.fields()["tool_calls"]
    assert found["function"] == {"name": "add", "arguments": taken}
    assert list(found) == list(call)
    if isinstance(taken, dict):
        assert list(found["function"]["arguments"]) == list(taken)


@pytest.mark.parametrize("calls", [5, [5], [{}], [{"function": 5}], [{"function": {"name": "a"}}]])
def test_calls_of_another_form_are_left_to_the_template(calls: object) -> None:
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        (asked,) = request_of({"messages": [said]}, "chat").requests
    except InvalidRequest as error:
        assert all(one.field.startswith("messages[0].tool_calls") for one in error.violations)
    else:
        (message,) = Chat.from_input(asked.chat).messages
        assert message.fields()["tool_calls"] == calls


ODD: tuple[object, ...] = (
    *(True, 0, -1, 1.5, 1e308, 2**63, 10**30, "", "x", HALF, "\x00", "a" * 20_000, [], {}),
    *(
        [HALF],
        [[1, HALF]],
        [None],
        [1, "a"],
        {"a": {}},
        {HALF: 1},
        {"role": HALF},
        [{"role": HALF}],
    ),
)


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_every_field_takes_or_refuses_every_value(endpoint: Endpoint) -> None:
    good = (
        {"messages": [{"role": "user", "content": "a"}]} if endpoint == "chat" else {"prompt": "a"}
    )
    outcomes = set()
    for name in (*_FIELDS[endpoint], *_NEUTRAL):
        for value in ODD:
            try:
                request_of({**good, name: value}, endpoint)
            except InvalidRequest as error:
                assert all(one.field for one in error.violations), (name, value)
                outcomes.add("refused")
            else:
                outcomes.add("taken")
    assert outcomes == {"refused", "taken"}
