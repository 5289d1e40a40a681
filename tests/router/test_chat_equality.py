"""Chats make the ids that transformers' `apply_chat_template` makes, for every form of template."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from chat_checkpoints import ANSWER_ENDS, SPECIAL, TEMPLATES, write_chat_checkpoint
from jinja2 import UndefinedError
from tokenizers import pre_tokenizers
from tokenizers.models import BPE

from effuse.client.chat import Chat
from effuse.router.chat_template import ChatTemplateError
from effuse.router.tokenizer import AnswerText, Tokenizer, TokenizerError

TOOL = {"function": {"name": "add", "parameters": {"of": [0.5, None], "é": 1}}, "type": "function"}
ORDERED = {
    "type": "function",
    "function": {
        "name": "z", "description": "a < b & 'c' \u2028 \u00e9 \U0001f642 \\ \"",
        "parameters": {
            "type": "object", "required": ["b", "a"],
            "properties": {
                "b": {"type": "number", "default": 1.0, "maximum": 12345678901234567},
                "a": {"enum": [1, 1.0, -0.0, 1e22, 1e-7, 0.1, 10**40, True, None, "", [], {}]},
            },
        },
    },
}  # fmt: skip
VALUES = {"b": 2.0, "a": [12345678901234567, "\u00e9"]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "z", "arguments": VALUES}}
CALL_OF_TEXT = {"type": "function", "id": "call_2",
                "function": {"arguments": '{"b": 2.0,  "a": 1}', "name": "z"}}  # fmt: skip
SAID = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL_OF_TEXT]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "z", "content": '{"z": 1.0}'}
PART = {"type": "text", "text": " one "}
ONE = Chat().user("What is the answer?")
ENDS = {*ANSWER_ENDS.values(), "<|endoftext|>"}
CHATS: dict[str, Chat] = {
    "one question": ONE,
    "a system": Chat().system("Be brief.\n").user("How many?"),
    "turns": Chat().system("Be kind.").user("Hi").assistant(" Hello! \n").user("And\n\nnow?"),
    "a late system": ONE.system("Sing.").user("La"),
    "unicode": Chat().user("e\u0301 🙂 漢字 \u202ebidi\u200b \ufeff").assistant("é").user("\x00\t"),
    "space at the ends": Chat().user("  \n two  \n").assistant("\t").user(" "),
    "nothing said": Chat().user("").assistant("").user(""),
    "braces": Chat().user("{{ 7 * 7 }} {% for x in y %} {# no #} '\"\\"),
    "reasoning": Chat().user("a").assistant("<think>\nwhy\n</think>\n\nb").user("c"),
    "reasoning at the end": Chat().user("a").assistant("<think>\nwhy\n</think>\n\nb"),
    "no answer begun": Chat(ONE.messages, add_generation_prompt=False),
    "thinking": Chat(ONE.messages, {"enable_thinking": True}),
    "no thinking": Chat(ONE.messages, {"enable_thinking": False}),
    "tools": Chat(ONE.messages, {"tools": [TOOL, TOOL], "count": 2}),
    "tools in order": Chat(ONE.messages, {"tools": [ORDERED, TOOL]}),
    "documents": Chat(ONE.messages, {"documents": [{"title": "t", "text": "x"}], "given": ORDERED}),
    "a call": ONE.add(SAID).add(RESULT).add({**RESULT, "tool_call_id": "call_2"}),
    "a call, and tools": Chat(ONE.add(SAID).add(RESULT).user("So?").messages, {"tools": [ORDERED]}),
    "a call with words": ONE.add({**SAID, "content": "Let me see."}).add(RESULT),
    "a call of a flat form": ONE.add(
        {"role": "assistant", "content": "", "tool_calls": [CALL["function"]]}
    ),
    "a call without content": ONE.add({**SAID, "content": None}).add(RESULT),
    "content first": Chat.of([{"content": "hi", "role": "user"}, {**RESULT, "more": {"y": 1}}]),
    "reasoning beside": ONE.add(
        {"role": "assistant", "content": "b", "reasoning_content": "why"}
    ).user("c"),
    "reasoning by another name": ONE.add({"role": "assistant", "content": "b", "reasoning": "why"}),
    "parts": Chat().add({"role": "user", "content": [PART, PART]}),
    "parts continued": Chat(
        ONE.add({"role": "assistant", "content": [PART, PART]}).messages, continue_last=True
    ),
    "continued": Chat(ONE.assistant("It is").messages, continue_last=True),
    "continued after space": Chat(ONE.assistant("It is \n").messages, continue_last=True),
}


@pytest.fixture(scope="module", params=TEMPLATES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("chat") / request.param, request.param)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


def expected(reference: Any, chat: Chat) -> list[int]:
    ids: list[int] = reference.apply_chat_template(
        [one.fields() for one in chat.messages],
        add_generation_prompt=chat.begins_answer,
        continue_final_message=chat.continue_last,
        return_dict=False,
        **chat.template_arguments,
    )
    return ids


def encoded(tokenizer: Tokenizer, chat: Chat, *, parses_special: bool = False) -> list[int]:
    received = Chat.from_input(chat.to_input())
    return asyncio.run(
        tokenizer.encode_chat(received, most_bytes=4096, parses_special=parses_special)
    )


@pytest.mark.parametrize("name", CHATS)
def test_ids_are_those_of_transformers(tokenizer: Tokenizer, reference: Any, name: str) -> None:
    """A template that needs content fails in both without; one that fails at parts, or prints the
    list as Python writes it, gets a text."""
    asked = CHATS[name]
    try:
        ids = expected(reference, asked)
    except (TypeError, ValueError, UndefinedError):
        if "parts" not in name:
            assert name == "a call without content"
            with pytest.raises(ChatTemplateError):
                encoded(tokenizer, asked)
            return
        ids = expected(reference, joined(asked))
    if "parts" in name and "'type': 'text'" in reference.decode(ids):
        ids = expected(reference, joined(asked))
    assert encoded(tokenizer, asked) == ids


def joined(chat: Chat) -> Chat:
    """The same with the parts of each message as one text."""
    said = [one.fields() for one in chat.messages]
    for one in said:
        if not isinstance(one["content"], str):
            one["content"] = "".join(part["text"] for part in one["content"])
    return Chat(Chat.of(said).messages, continue_last=chat.continue_last)


def test_what_a_template_gets_is_what_was_sent(tokenizer: Tokenizer, directory: Path) -> None:
    """Each form that knows tools writes them, and each that knows calls writes those."""
    asked = CHATS["a call, and tools"]
    text = asyncio.run(tokenizer.text_of(encoded(tokenizer, asked)))
    knows = directory.name in ("dream", "sdar", "llada2", "parts")
    assert ("12345678901234567" in text) == knows
    assert ("2.0" in text) == knows


@pytest.mark.parametrize("name", ["tools in order", "documents", "a call"])
def test_special_tokens_in_what_a_template_writes_as_json_stay_text(
    tokenizer: Tokenizer, reference: Any, name: str
) -> None:
    """Whether it escapes non-ASCII characters, or writes a list in Python's form."""
    spelled = "<|im_start|>\\U000f0000 \\udb80\\udc00 \U000f0000 \u00e9"
    plain = Chat(CHATS[name].messages, {"tools": [{"name": "x"}], "given": ["x"]})
    asked = Chat(plain.messages, {"tools": [{"name": spelled}], "given": [spelled]})
    ids, of_x = encoded(tokenizer, asked), encoded(tokenizer, plain)
    assert [i for i in ids if not tokenizer.is_text(i)] == [
        i for i in of_x if not tokenizer.is_text(i)
    ]
    kept = [i for i in expected(reference, asked) if tokenizer.is_text(i)]
    text, of_kept = asyncio.run(tokenizer.text_of(ids)), asyncio.run(tokenizer.text_of(kept))
    assert text.replace("<|im_start|>", "") == of_kept.replace("<|im_start|>", "")


def test_so_they_are_with_special_tokens_that_are_to_be_parsed(
    tokenizer: Tokenizer, reference: Any
) -> None:
    chat = Chat().user("a<|endoftext|>b <|mask|>").assistant("</think>c").user("<|endoftext|>")
    assert encoded(tokenizer, chat, parses_special=True) == expected(reference, chat)
    assert encoded(tokenizer, chat) != expected(reference, chat)
    text = chat.messages[0].content
    parsed = asyncio.run(tokenizer.encode(text, parses_special=True))
    assert parsed == reference(text)["input_ids"] != asyncio.run(tokenizer.encode(text))


def test_no_words_add_to_the_special_tokens(tokenizer: Tokenizer, directory: Path) -> None:
    """For any text, in any pieces, they are those of a chat without spelled tokens."""
    rng = random.Random(directory.name)
    pieces = [*SPECIAL[directory.name], "<|", "|>", "<", ">", "im_end", "role", "/", " ", "\n", "é"]

    def structure(first: str, *others: str) -> list[int]:
        chat = Chat(template_arguments={"tools": [first]}).system(others[0])
        ids = encoded(tokenizer, chat.user(others[1]).assistant(others[2]).user(others[3]))
        return [i for i in ids if not tokenizer.is_text(i)]

    plain, spelled = structure(*"abcde"), 0
    for _ in range(200):
        said = ["".join(rng.choices(pieces, k=rng.randrange(8))) for _ in range(5)]
        assert structure(*said) == plain
        spelled += any(name in "".join(said) for name in SPECIAL[directory.name])
    assert spelled > 100


def test_an_answer_ends_where_the_template_ends_it(tokenizer: Tokenizer, directory: Path) -> None:
    """Models write that token first and fill up with the one that ends a sequence: no text is made
    of either."""
    names = {part.text: part.id for part in tokenizer.special_tokens.cut("".join(ENDS))
             if not isinstance(part, str)}  # fmt: skip
    end = ANSWER_ENDS[directory.name]
    assert tokenizer.chat_end_ids == {names[end]}
    said = asyncio.run(tokenizer.encode("Yes."))
    answer = AnswerText(tokenizer, ())
    told = answer.push([*said, names[end], names["<|endoftext|>"]])
    assert told + answer.flush() == "Yes."


OWN = "<|endoftext|>"


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_special_tokens": {"image_token": OWN}},
        {"model_specific_special_tokens": {"image_token": OWN}},
        {"image_token": OWN, "extra_special_tokens": ["<|im_end|>"], "add_bos_token": True},
        {"image_token": {"__type": "AddedToken", "content": OWN, "special": True}},
        {"extra_special_tokens": {"image": OWN, "image_token": OWN}},
    ],
)
def test_a_template_gets_the_special_tokens_of_its_model(
    fields: dict[str, object], tmp_path: Path
) -> None:
    source = "{{ image_token }}{{ image }}{{ add_bos_token }}{{ messages[0].content }}"
    path = write_chat_checkpoint(tmp_path, "sdar", changes={"chat_template": source, **fields})
    reference = transformers.AutoTokenizer.from_pretrained(path)
    ids = asyncio.run(Tokenizer.load(path).encode_chat(ONE, most_bytes=9999))
    assert ids == expected(reference, ONE)
    assert ids[0] == reference.convert_tokens_to_ids(OWN)


def added(content: str, **flags: bool) -> dict[str, object]:
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": content, "special": True, **plain, **flags}


def test_a_chat_has_the_tokens_that_only_its_tokenizers_config_adds(tmp_path: Path) -> None:
    source = "[n]{{ eos_token }}[x]{{ unk_token }} [l] {{ messages[0].content }}[e]"
    size = len(Tokenizer.load(write_chat_checkpoint(tmp_path, "sdar"))._backend.get_vocab())
    more = {str(size + 1): added("[l]", lstrip=True, special=False), str(size): added("[n]")}
    named = {"unk_token": "[u]", "eos_token": "[e]", "extra_special_tokens": ["[x]", "[n]"]}
    for listed in (more, {}):
        changes = {"chat_template": source, **named, "added_tokens_decoder": listed}
        path = write_chat_checkpoint(tmp_path, "sdar", changes=changes)
        tokenizer = Tokenizer.load(path)
        reference = transformers.AutoTokenizer.from_pretrained(path)
        assert expected(reference, ONE) == asyncio.run(tokenizer.encode_chat(ONE, most_bytes=9999))
        spelled = asyncio.run(tokenizer.encode_chat(Chat().user("[e][x]"), most_bytes=9999))
        assert [spelled.count(reference.vocab[name]) for name in ("[e]", "[x]")] == [2, 1]


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ({"9999": added("[n]")}, r"expected id \d+ for '\[n\]', .* got 9999"),
        ({"a": added("[n]")}, "invalid literal"),
        ([1], "items"),
        ({"1": "[n]"}, "indices"),
    ],
)
def test_an_added_token_that_does_not_follow_on_is_named(
    listed: object, words: str, tmp_path: Path
) -> None:
    write_chat_checkpoint(tmp_path, "sdar", changes={"added_tokens_decoder": listed})
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: .*{words}"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_space_comes_before_the_words_before_which_the_tokenizer_puts_one(
    scheme: str, tmp_path: Path
) -> None:
    words = {word: at for at, word in enumerate(["<unk>", *"hi▁|:", "▁h", "user", "[B]"])}
    backend = tokenizers.Tokenizer(BPE(words, [("▁", "h")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.add_special_tokens(["[B]"])
    source = "{% for m in messages %}h:[B]{{ m.content }}{% endfor %}[B]h"
    write_chat_checkpoint(tmp_path, "sdar", changes={"chat_template": source})
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer, reference = (
        Tokenizer.load(tmp_path),
        transformers.AutoTokenizer.from_pretrained(tmp_path),
    )
    for chat in (Chat().user("hi"), Chat().user(" hi h").assistant("h|i")):
        ids = asyncio.run(tokenizer.encode_chat(chat, most_bytes=99))
        assert ids == expected(reference, chat)
    for text in ("h[B]h", "[B]h", "h", "[B]"):
        assert asyncio.run(tokenizer.encode(text, parses_special=True)) == reference(text).input_ids
    assert not set(asyncio.run(tokenizer.encode("[B]h"))) & set(reference("[B]").input_ids)
