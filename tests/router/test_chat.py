"""Chats from the request to the worker's prompt, and the errors of some."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import tokenizers
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

from effuse.client.chat import Chat, Message
from effuse.client.params import Params, Prompt, make_request
from effuse.protos.errors import FieldViolation, InvalidRequest
from effuse.router.tokenizer import Tokenizer
from effuse.router.validation import encode_prompt, validate
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import model_pb2

HI = Chat().user("hi")
TOLD = {"role": "tool", "content": "2", "tool_call_id": "1"}
CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
MOST = 16 * MAX_MODEL_LEN


def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), chat_template())


def ids(prompt: Prompt, *, parses: bool | None = None, takes_chats: bool = True) -> list[int]:
    """The prompt that a worker computes for a request. Raises InvalidRequest."""
    return asked_ids(prompt, tokenizer(), parses=parses, takes_chats=takes_chats)


def asked_ids(
    prompt: Prompt, by: Tokenizer, *, parses: bool | None = None, takes_chats: bool = True
) -> list[int]:
    request = make_request(prompt, Params(parse_special_tokens=parses))
    model, reserved = model_info(), by.reserved_ids
    asked = validate(request, model, reserved, is_stream=False, takes_chats=takes_chats)
    return asyncio.run(encode_prompt(asked, by))


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
        (
            Chat(HI.messages, {"loud": ["<|mask|>"]}),
            "chat.template_arguments_json",
            "the mask token",
        ),
        (HI.add({**TOLD, "name": "<|mask|>"}), "chat.messages[1].json", "the mask token"),
        (HI.add({**TOLD, "<|pad|>": 1}), "chat.messages[1].json", "the reserved token"),
    ],
)
def test_reserved_tokens_are_not_parsed(prompt: Prompt, field: str, what: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ids(prompt, parses=True)
    (violation,) = caught.value.violations
    assert violation.field == field and what in violation.description
    assert not {MASK, PAD} & set(ids(prompt))


@pytest.mark.parametrize("name", ["<|mask|>", "[MASK]", "|<MASK>|", "<|mdm_mask|>"])
def test_a_mask_that_its_file_does_not_flag_stays_text(name: str) -> None:
    unflagged, spelled = with_mask(name), f"a{name}b"
    assert unflagged.reserved_ids == {MASK, PAD}
    assert unflagged.decode(asked_ids(spelled, unflagged)[1:-1]) == spelled
    assert MASK not in asked_ids(Chat().user(spelled), unflagged)
    with pytest.raises(InvalidRequest, match="the mask token"):
        asked_ids(spelled, unflagged, parses=True)


@pytest.mark.parametrize(("prompt", "field"), [("a[fill]", "prompt"), (HI.user("[fill]"), "chat")])
def test_a_mask_by_another_name_is_refused(prompt: Prompt, field: str) -> None:
    for parses in (False, True):
        with pytest.raises(InvalidRequest, match=f"{field}: .* the mask id {MASK}"):
            asked_ids(prompt, with_mask("[fill]"), parses=parses)
    assert MASK not in asked_ids("unmasked mask", with_mask("[fill]"))


def with_mask(name: str) -> Tokenizer:
    """A tokenizer that calls its mask so, and does not flag it as special."""
    file = byte_tokenizer().to_str().replace("<|mask|>", name)
    at = file.index(f'"content":"{name}"')
    file = file[:at] + file[at:].replace('"special":true', '"special":false', 1)
    return Tokenizer(tokenizers.Tokenizer.from_str(file), chat_template())


BAD: dict[str, tuple[Chat, str, str]] = {
    "no messages": (Chat(), "chat.messages", "from 1 to 256 messages, got 0"),
    "too many": (Chat(HI.messages * 257), "chat.messages", "got 257"),
    "too long": (HI.user("é" * (MOST // 2)), "chat.messages", f"at most {MOST} bytes"),
    "a role": (
        Chat((*HI.assistant("a").messages, Message("admin", "b"))),
        "chat.messages[2].role", "got 'admin'",
    ),
    "a role in capitals": (Chat((Message("User", ""),)), "chat.messages[0].role", "system, user"),
    "an argument too long": (
        Chat(HI.messages, {"a": "b" * MOST}), "chat.template_arguments_json", "bytes"
    ),
    "an argument that is a field": (
        Chat(HI.messages, {"messages": []}), "chat.template_arguments_json", "got messages"
    ),
    "fields too long": (HI.add({**TOLD, "name": "a" * MOST}), "chat.messages", "bytes"),
    "a tool's question continued": (
        Chat(HI.add(TOLD).messages, continue_last=True), "chat.messages[1].role", "got 'tool'"
    ),
    "a call continued": (
        Chat(HI.add(CALLING).messages, continue_last=True), "chat", "it has no text"
    ),
    "a question continued": (
        Chat(HI.messages, continue_last=True), "chat.messages[0].role", "assistant, because"
    ),
    "continued and begun": (
        replace(HI.assistant("a"), continue_last=True, add_generation_prompt=True),
        "chat.add_generation_prompt", "got true",
    ),
    "what the template says": (Chat().system("a"), "chat", "refuses it: 'no system here'"),
    "what it renders": (
        Chat(HI.user("a" * (MOST - 9)).messages), "chat", f"at most {MOST} bytes after"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("chat", "field", "text"), BAD.values(), ids=BAD.keys())
def test_a_bad_chat_names_its_field(chat: Chat, field: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ids(chat)
    (violation,) = caught.value.violations
    assert violation.field == field and text in violation.description


def test_ids_are_not_parsed() -> None:
    with pytest.raises(
        InvalidRequest, match="parse_special_tokens: expected no value with token ids"
    ):
        ids([5, 6], parses=True)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(
        InvalidRequest, match=r"chat: .*model 'fake' has no chat template, got chat"
    ):
        ids(HI, takes_chats=False)


BAD_JSON: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "expected the text of a JSON object, got another text: Expecting"),
    "no object": ("[1]", "expected the text of a JSON object, got a list"),
    "lists in lists": ('{"a":' + "[" * 100 + "]" * 100 + "}", "more than 100 levels"),
    "lists without end": ('{"a":' + "[" * 1900, "expected"),
    "many levels": ('{"a":' + "[" * 1900 + "]" * 1900 + "}", "levels"),
    "a huge integer": ('{"a": 1' + "0" * 1000 + "}", "a number of 1001 characters, more than 1000"),
    "a huge fraction": ('{"a": -1e400}', "'-1e400', which is not a number within a double's range"),
    "no number": ('{"a": NaN}', "'NaN', which is not a number"),
    "half a character": (r'{"a": ["\ud83d"]}', "surro"),
}


@pytest.mark.parametrize(("text", "said"), BAD_JSON.values(), ids=BAD_JSON.keys())
def test_json_that_cannot_be_used_names_its_field(text: str, said: str) -> None:
    message = pb.ChatMessage(json=text)
    for chat, field in (
        (pb.ChatInput(messages=[message]), "chat.messages[0].json"),
        (
            pb.ChatInput(messages=HI.to_input().messages, template_arguments_json=text),
            "chat.template_arguments_json",
        ),
    ):
        assert refusal(chat).field == field and said in refusal(chat).description


def refusal(chat: pb.ChatInput) -> FieldViolation:
    with pytest.raises(InvalidRequest) as caught:
        validate(pb.GenerateRequest(chat=chat), model_info(), is_stream=False)
    (violation,) = caught.value.violations
    return violation


def test_a_field_that_says_the_same_as_another_is_refused() -> None:
    both = Chat(HI.messages, {"a": 1}).to_input()
    both.template_arguments["a"] = 1
    assert refusal(both).field == "chat.template_arguments_json"
    said = pb.ChatMessage(role="user", json='{"role": "user", "content": "hi"}')
    assert refusal(pb.ChatInput(messages=[said])).field == "chat.messages[0].json"
    wrong = pb.ChatMessage(json='{"role": "user", "content": [{"type": "audio"}]}')
    assert refusal(pb.ChatInput(messages=[wrong])).field == "chat.messages[0].content[0]"


def test_what_old_clients_send_arrives_as_json_would_have_it() -> None:
    sent = HI.to_input()
    sent.template_arguments.update({"b": 3, "a": [1.5, None, True, {"y": "z", "x": -2}]})
    found = Chat.from_input(sent).template_arguments
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
