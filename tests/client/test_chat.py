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


def test_what_is_said_later_keeps_what_the_template_is_told() -> None:
    chat = effuse.Chat(template_arguments={"enable_thinking": False}).user("hi")
    assert chat.template_arguments == {"enable_thinking": False}
    assert len({chat, HI, effuse.Chat().user("hi")}) == 2  # a value may be a key


def test_a_chat_of_messages_as_others_write_them() -> None:
    listed = [{"role": "user", "content": "hi"}]
    assert effuse.Chat.of(listed) == HI
    assert effuse.Chat.of(listed, tools=[]).template_arguments == {"tools": []}
    with pytest.raises(KeyError, match="content"):
        effuse.Chat.of([{"role": "user"}])
    unsaid: dict[str, Any] = {"refusal": None, "annotations": []}
    assert effuse.Chat.of([{"role": "user", "content": "hi", **unsaid}]) == HI


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tool_calls": [{"id": "1"}]}, "tool_calls: expected messages of role and content alone"),
        ({"content": None}, "content: expected a string, got None"),
        ({"content": [{"type": "text", "text": "hi"}]}, "content: expected a string, got"),
    ],
)
def test_nothing_of_a_message_is_left_out_in_silence(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        effuse.Chat.of([{"role": "assistant", "content": "hi", **more}])


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
