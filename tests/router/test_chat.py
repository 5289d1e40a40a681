"""Chats from the request to the prompt that a worker is given, and what is wrong with some."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from router.asking import failure
from router.fake_model import (
    ANSWER,
    EOS,
    MASK,
    MAX_MODEL_LEN,
    PAD,
    PROMPT,
    byte_tokenizer,
    chat_template,
    ids_of,
    model_info,
)
from router.fakes import FakeFleet, run

from effuse.client.chat import Chat
from effuse.client.params import Params, Prompt, make_request
from effuse.protos.errors import InvalidRequest
from effuse.router.prompt import encode_prompt
from effuse.router.tokenizer import Tokenizer
from effuse.router.validation import validate
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import model_pb2

HI = Chat().user("hi")
MOST = 16 * MAX_MODEL_LEN


def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), chat_template())


def ids(prompt: Prompt, *, parses: bool | None = None, takes_chats: bool = True) -> list[int]:
    """What a request for `prompt` has a worker compute. Raises InvalidRequest."""
    request = make_request(prompt, Params(parse_special_tokens=parses))
    reserved = tokenizer().reserved_ids
    asked = validate(request, model_info(), reserved, is_stream=False, takes_chats=takes_chats)
    return asyncio.run(encode_prompt(asked, tokenizer()))


def test_a_chat_is_what_its_template_writes() -> None:
    assert ids(HI) == [PROMPT, *ids_of("hi"), ANSWER]
    assert ids(HI.assistant("so").user("é")) == [
        *(PROMPT, *ids_of("hi"), ANSWER, PROMPT, *ids_of("so"), ANSWER),
        *(PROMPT, *ids_of("é"), ANSWER),
    ]
    assert ids(Chat(HI.assistant("so").messages, continue_last=True))[-2:] == ids_of("so")


@pytest.mark.parametrize("spelled", ["<|answer|><|eos|>", "a<|prompt|>b", "<|mask|>", "<|answer"])
def test_special_tokens_that_are_spelled_stay_text(spelled: str) -> None:
    """In a message, in an argument, and as an argument's name in an object."""
    plain = as_text(spelled)
    assert ids(Chat().user(spelled)) == [PROMPT, *plain, ANSWER]
    assert ids(Chat(HI.messages, {"loud": spelled}))[4:] == plain
    assert not {EOS, MASK} & set(ids(Chat(HI.messages, {"loud": {spelled: [spelled]}})))
    assert ids(spelled) == [PROMPT, *plain, ANSWER]


def as_text(text: str) -> list[int]:
    backend = byte_tokenizer()
    backend.encode_special_tokens = True
    found: list[int] = backend.encode(text, add_special_tokens=False).ids
    return found


def test_special_tokens_are_parsed_where_that_is_asked_for() -> None:
    spelled = "a<|answer|><|eos|>b"
    parsed = [*ids_of("a"), ANSWER, EOS, *ids_of("b")]
    assert ids(spelled, parses=True) == [PROMPT, *parsed, ANSWER]
    assert ids(spelled * 200, parses=True) == [PROMPT, *parsed * 200, ANSWER]
    assert ids(Chat().user(spelled), parses=True) == [PROMPT, *parsed, ANSWER]
    assert ids(Chat(HI.messages, {"loud": spelled}), parses=True)[4:] == parsed


@pytest.mark.parametrize(
    ("prompt", "field", "what"),
    [
        ("a<|mask|>", "prompt", "the mask token '<|mask|>'"),
        (HI.assistant("<|pad|>"), "chat.messages[1].content", "the reserved token '<|pad|>'"),
        (Chat(HI.messages, {"loud": ["<|mask|>"]}), "chat.template_arguments", "the mask token"),
    ],
)
def test_reserved_tokens_are_not_parsed(prompt: Prompt, field: str, what: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ids(prompt, parses=True)
    (violation,) = caught.value.violations
    assert violation.field == field and what in violation.description
    assert not {MASK, PAD} & set(ids(prompt))


BAD: dict[str, tuple[Chat, str, str]] = {
    "no messages": (Chat(), "chat.messages", "from 1 to 256 messages, got 0"),
    "too many": (Chat(HI.messages * 257), "chat.messages", "got 257"),
    "too long": (HI.user("é" * (MOST // 2)), "chat.messages", f"at most {MOST} bytes"),
    "a role": (HI.assistant("a")._with("admin", "b"), "chat.messages[2].role", "got 'admin'"),
    "a role in capitals": (Chat()._with("User", ""), "chat.messages[0].role", "system, user"),
    "an argument too long": (
        Chat(HI.messages, {"a": "b" * MOST}), "chat.template_arguments", "bytes"
    ),
    "an argument that is a field": (
        Chat(HI.messages, {"messages": []}), "chat.template_arguments", "got messages"
    ),
    "a question continued": (
        Chat(HI.messages, continue_last=True), "chat.messages[0].role", "assistant, whose"
    ),
    "continued and begun": (
        replace(HI.assistant("a"), continue_last=True, add_generation_prompt=True),
        "chat.add_generation_prompt", "got true",
    ),
    "what the template says": (Chat().system("a"), "chat", "does not take it: 'no system here'"),
    "what it renders": (
        Chat(HI.user("a" * (MOST - 9)).messages), "chat", f"at most {MOST} bytes once"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("chat", "field", "text"), BAD.values(), ids=BAD.keys())
def test_a_bad_chat_names_its_field(chat: Chat, field: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ids(chat)
    (violation,) = caught.value.violations
    assert violation.field == field and text in violation.description


def test_ids_are_not_parsed() -> None:
    with pytest.raises(InvalidRequest, match="parse_special_tokens: expected it unset with ids"):
        ids([5, 6], parses=True)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(
        InvalidRequest, match=r"chat: .*model 'fake' has no chat template, got chat"
    ):
        ids(HI, takes_chats=False)


def test_numbers_and_names_arrive_as_json_would_have_them() -> None:
    told = {"b": 3, "a": [1.5, None, True, {"y": "z", "x": -2}]}
    found = Chat.from_input(Chat(HI.messages, told).to_input()).template_arguments
    assert repr(found) == "{'a': [1.5, None, True, {'x': -2, 'y': 'z'}], 'b': 3}"


def test_a_chat_over_the_wire() -> None:
    async def body(fleet: FakeFleet) -> None:
        request = pb.GenerateRequest(chat=HI.to_input())
        answer = await fleet.generation.Generate(request, timeout=30)
        assert (answer.text, answer.usage.prompt_tokens) == ("the answer is three", 4)
        assert fleet.prefill[0].prompts == [[PROMPT, *ids_of("hi"), ANSWER]]
        assert [*fleet.decode[0].requests[0].stop_token_ids] == [EOS, ANSWER]
        text = pb.GenerateRequest(prompt="hi")
        await fleet.generation.Generate(text, timeout=30)
        assert [*fleet.decode[0].requests[1].stop_token_ids] == [EOS]
        bad = pb.GenerateRequest(chat=Chat().system("a").to_input())
        error = await failure(fleet.generation.Generate(bad, timeout=30))
        assert isinstance(error, InvalidRequest) and error.violations[0].field == "chat"
        assert len(fleet.prefill[0].prompts) == 2
        models = await fleet.models.ListModels(model_pb2.ListModelsRequest(), timeout=30)
        (model,) = models.models
        assert model.has_chat_template
        (told,) = [one for one in model.defaults.sources if one.knob == "chat_template"]
        assert told.source == "chat_template.jinja"

    run(body)
