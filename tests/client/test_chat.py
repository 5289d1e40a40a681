"""A conversation as a value, and as it is sent."""

from __future__ import annotations

from typing import Any

import pytest

import effuse
from effuse.client.chat import Message
from effuse.client.params import make_request
from effuse.v1 import generation_pb2 as pb

HI = effuse.Chat().user("hi")


def test_a_chat_grows_and_is_not_changed() -> None:
    longer = HI.assistant("hello").user("and?")
    assert longer.messages[:2] == (*HI.messages, Message("assistant", "hello"))
    assert [one.role for one in longer.system("Be kind.").messages[2:]] == ["user", "system"]
    assert HI.messages == (Message("user", "hi"),)


def test_a_chat_copies_the_values_of_its_caller() -> None:
    messages, arguments = [Message("user", "hi")], {"enable_thinking": False}
    chat = effuse.Chat(messages, arguments)  # type: ignore[arg-type]  # a list serves, too
    messages.clear()
    arguments.clear()
    assert chat == effuse.Chat((Message("user", "hi"),), {"enable_thinking": False})


def test_what_is_said_later_keeps_what_the_template_is_told() -> None:
    chat = effuse.Chat(template_arguments={"enable_thinking": False}).user("hi")
    assert chat.template_arguments == {"enable_thinking": False}
    assert len({chat, HI, effuse.Chat().user("hi")}) == 2  # a value may be a key


def test_a_chat_of_messages_as_others_write_them() -> None:
    listed = [{"role": "user", "content": "hi"}]
    assert effuse.Chat.of(listed) == HI
    assert effuse.Chat.of(listed, tools=[]).template_arguments == {"tools": []}
    assert effuse.Chat.of([{"role": "user", "content": "hi", "refusal": None}]) == HI


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"role": "root"}, r"^messages\[0\].role: expected one of system, .*, got 'root'"),
        ({"role": None}, r"role: .* got None"),
        ({"content": None}, r"messages\[0\].content: expected a string or parts of text, got none"),
        ({"content": 5}, r"content: expected a string or a list of parts, got 5"),
        (
            {"content": [{"type": "image_url", "image_url": {}}]},
            r"content\[0\]: expected a part of t",
        ),
        ({"content": [{"type": "text"}]}, r"content\[0\]: expected a part of text"),
        ({"content": ["hi"]}, r"content\[0\]: expected a part of text"),
        ({"tool_calls": {"id": 1}}, r"tool_calls: expected a list of objects"),
        ({"tool_calls": ["add"]}, r"tool_calls: expected a list of objects"),
        ({"name": 5}, r"name: expected a string, got 5"),
        ({"more": {1, 2}}, r"^messages\[0\]: expected values that JSON can express"),
        ({"more": float("nan")}, r"^messages\[0\]: expected values that JSON can express"),
        ({"more": "\ud800"}, r"^messages\[0\]: expected values that JSON can express"),
    ],
)
def test_a_message_that_is_wrong_names_its_field(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        effuse.Chat.of([{"role": "assistant", "content": "hi", **more}])


@pytest.mark.parametrize("field", ["role", "content"])
def test_a_value_on_many_levels_is_named_as_any_other(field: str) -> None:
    """Python itself cannot write it. JSON in a body may have almost as many levels."""
    value: object = 1
    for level in range(1, 1200):
        value = {"a": value} if level % 2 else [value]
        if level > 800 and level % 2:
            with pytest.raises(ValueError, match=rf"^messages\[0\].{field}: expected .*, got "):
                effuse.Chat.of([{"role": "user", "content": "hi", field: value}])


@pytest.mark.parametrize(
    ("chat", "begins"),
    [
        (HI, True),
        (effuse.Chat(HI.messages, add_generation_prompt=False), False),
        (effuse.Chat(HI.messages, continue_last=True), False),
    ],
)
def test_it_arrives_as_it_was_sent(chat: effuse.Chat, begins: bool) -> None:
    request = make_request(chat, effuse.Params(parse_special_tokens=True))
    assert request.WhichOneof("input") == "chat" and request.parse_special_tokens
    received = effuse.Chat.from_input(pb.ChatInput.FromString(request.chat.SerializeToString()))
    assert received == chat and received.begins_answer == begins


def test_what_json_cannot_express_is_no_argument() -> None:
    with pytest.raises(ValueError, match="type"):
        effuse.Chat(HI.messages, {"when": object()}).to_input()


CALLS = [{"id": "1", "function": {"name": "add", "arguments": {"b": 1.0, "a": 12345678901234567}}}]
SAID = {"role": "assistant", "content": None, "tool_calls": CALLS, "refusal": None}
RESULT = {"role": "tool", "tool_call_id": "1", "name": "add", "content": [
    {"type": "text", "text": "2.0"}]}  # fmt: skip


def test_all_of_a_message_arrives_in_order() -> None:
    chat = effuse.Chat.of([{"role": "user", "content": "hi"}, SAID, RESULT])
    assert chat == HI.add(SAID).add(RESULT)
    received = effuse.Chat.from_input(pb.ChatInput.FromString(chat.to_input().SerializeToString()))
    assert received == chat
    said, result = (one.fields() for one in received.messages[1:])
    assert repr(said) == repr({"role": "assistant", "tool_calls": CALLS})
    assert repr(result) == repr(RESULT)


def test_template_arguments_arrive_as_they_are() -> None:
    told = {"b": 1.0, "a": [12345678901234567, 10**30, 0.1, None, True, {"y": "\u00e9", "x": -2}]}
    chat = effuse.Chat(HI.messages, told)
    assert repr(effuse.Chat.from_input(chat.to_input()).template_arguments) == repr(told)


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "wrong", [nested(100), nested(100_000), float("inf"), {"x": {1}}, b"x", "\udc80"]
)
def test_an_argument_that_json_cannot_express_is_named(wrong: object) -> None:
    assert effuse.Chat(HI.messages, {"tools": nested(99)}).to_input()
    with pytest.raises(ValueError, match=r"^template_arguments: expected values that JSON can"):
        effuse.Chat(HI.messages, {"tools": wrong}).to_input()


def test_an_infinite_number_in_a_struct_is_named() -> None:
    sent = effuse.Chat().user("hi").to_input()
    sent.template_arguments.update({"a": float("inf")})
    with pytest.raises(ValueError, match=r"^template_arguments: expected numbers of JSON, got"):
        effuse.Chat.from_input(sent)
