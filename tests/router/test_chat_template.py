"""A checkpoint's chat template: its place, its abilities, and its limits."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from router.fake_model import byte_tokenizer

from effuse.client.chat import Chat
from effuse.router.chat_template import ChatTemplate, ChatTemplateError
from effuse.router.tokenizer import Tokenizer

CHAT = Chat().user("hi")
LOOPS = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4


def render(source: str, chat: Chat = CHAT, *, most_bytes: int = 1000) -> str:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    return template.render(chat, mark="\U000f0000", most_bytes=most_bytes)


def load(directory: Path, **config: object) -> ChatTemplate | None:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTemplate.load(directory)


def loaded(directory: Path, chat: Chat = CHAT, **config: object) -> str:
    template = load(directory, **config)
    assert template is not None
    return template.render(chat, mark="\U000f0000", most_bytes=1000)


def origin(directory: Path) -> str:
    found = ChatTemplate.load(directory)
    assert found is not None
    return found.origin


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    assert load(tmp_path, chat_template=None) is None
    assert loaded(tmp_path, chat_template="string") == "string"
    listed = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "tools"}]
    assert loaded(tmp_path, chat_template=listed) == "one"
    with_tools = Chat(CHAT.messages, {"tools": [{"name": "add"}]})
    assert loaded(tmp_path, with_tools, chat_template=listed) == "tools"
    assert origin(tmp_path) == "tokenizer_config.json"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert loaded(tmp_path, with_tools, chat_template=listed) == "file"
    assert origin(tmp_path) == "chat_template.jinja"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert loaded(tmp_path, with_tools) == "more"


def test_where_special_tokens_are_found(tmp_path: Path) -> None:
    """Only tokenizer_config.json if it lists all tokens, otherwise special_tokens_map.json
    first.
    """
    said: dict[str, Any] = {"bos_token": "[b]", "eos_token": {"content": "[e]"}, "pad_token": None}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "[other]"}))
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}"
    assert loaded(tmp_path, chat_template=source, **said) == "[other][e]"
    assert loaded(tmp_path, chat_template=source, added_tokens_decoder={}, **said) == "[b][e]"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"chat_template": "{% if %}"}, "cannot compile"),
        ({"chat_template": [{"name": "rag", "template": ""}]}, r"named default, got \['rag'\]"),
        ({"chat_template": [{"name": "default"}]}, "the files"),
    ],
)
def test_a_template_that_is_none(tmp_path: Path, config: dict[str, object], words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        load(tmp_path, **config)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ChatTemplateError, match=r"expected an object in .*tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
)
@pytest.mark.parametrize("content", [b"\xff", b'{"a":' * 100_000, b'{"a": %b}' % (b"9" * 5000)])
def test_a_bad_file_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    if name.endswith(".jinja") and content != b"\xff":
        return  # text
    with pytest.raises(ChatTemplateError, match=name):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}.", "hi."),
        ("{{ tools is none }} {{ documents is none }} {{ nothing }}", "True True "),
        ("{% if true %}\n  yes\n{% endif %}\n", "  yes\n"),
        ("{{ strftime_now('%Y') }}", time.strftime("%Y")),
    ],
)
def test_what_templates_use(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", r"unsafe|not safe"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% for a in range(10**7) %}{% endfor %}", r"[Rr]ange too big"),
        ("{% for a in range(500) %}ab{% endfor %}", "at most 99 bytes"),
        ("{{ 'é' * 50 }}", "at most 99 bytes"),
    ],
)
def test_what_a_template_cannot_do(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        render(source, most_bytes=99)


def test_a_loop_without_end_is_ended_and_stops_nobody() -> None:
    """By the thread's own time: on a machine that is busy both may take longer."""
    source = "{% if messages|length == 1 %}" + LOOPS + "{% endif %}"
    tokenizer = Tokenizer(byte_tokenizer(), ChatTemplate({"default": source}, {}, limit_s=0.2))

    async def main() -> int:
        turns = 0
        encoding = asyncio.create_task(tokenizer.encode_chat(CHAT, most_bytes=99))
        while not encoding.done():
            turns += 1
            await asyncio.sleep(0)
        with pytest.raises(ChatTemplateError, match=r"rendering took more than 0\.2 s"):
            await encoding
        return turns

    assert asyncio.run(main()) > 10
    tokenizer.close()


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    chat = Chat(CHAT.assistant("yes").messages, continue_last=True)
    assert render("{% for m in messages %}{{ m.content }}|{% endfor %}", chat) == "hi|yes"
    with pytest.raises(ChatTemplateError, match="cannot be continued"):
        render("{{ messages[0].content }}", chat)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content if m.content is string else '' }}|{% endfor %}",
        "{% for m in messages %}{{ m.content | trim }}|{% endfor %}",
        "{% for m in messages %}{{ m.content }}|{% endfor %}",
        "{% for m in messages %}{{ m.content + '|' }}{% endfor %}",
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}|{% endfor %}",
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}|{% endfor %}",
    ],
)
def test_text_in_parts_is_never_lost_or_shown_as_python(source: str) -> None:
    parts = [{"type": "text", "text": "it's "}, {"type": "text", "text": "two"}]
    template = ChatTemplate({"default": source}, {})
    asked = Chat.of([{"role": "user", "content": parts}, {"role": "assistant", "content": parts}])
    assert template.render(asked, mark="\u00a7", most_bytes=999) == "it's two|it's two|"
    going_on = replace(asked, continue_last=True)
    assert template.render(going_on, mark="\u00a7", most_bytes=999) == "it's two|it's two"


def test_parts_that_a_template_changes_stay_parts() -> None:
    source = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text | upper }}{% endfor %}{% endfor "
        "%}"
    )
    asked = Chat.of([{"role": "user", "content": [{"type": "text", "text": "two"}]}])
    assert (
        ChatTemplate({"default": source}, {}).render(asked, mark="\u00a7", most_bytes=99) == "TWO"
    )


AS_PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"


def in_parts(*messages: list[str]) -> Chat:
    parts = ([{"type": "text", "text": text} for text in texts] for texts in messages)
    return Chat.of([{"role": "user", "content": one} for one in parts])


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (AS_PARTS, (["a", "b "], [" a", "", "ba"]), "ab  aba"),
        (AS_PARTS, ([], ["a"]), "a"),
        (AS_PARTS.replace("messages", "messages | reverse"), (["a"], ["b"], ["c"]), "cba"),
        (AS_PARTS.replace("p.text", "p.text[1:]"), (["aa", "ba"], ["ab"]), "aab"),
        (AS_PARTS.replace("p.text", "p.text | upper"), (["a"], ["b"]), "AB"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", (["a"], ["b", "c"]), "abc"),
        (AS_PARTS, (["[{'type': 'text', 'text': '"], ["a"]), "[{'type': 'text', 'text': 'a"),
    ],
)
def test_what_is_shown_of_parts(source: str, messages: tuple[list[str], ...], text: str) -> None:
    template = ChatTemplate({"default": source}, {})
    assert template.render(in_parts(*messages), mark="\u00a7", most_bytes=999) == text


def test_many_parts_are_looked_for_from_one_to_the_next() -> None:
    """By the thread's own time: to look for each in the whole text takes much more."""
    number = 60_000
    template = ChatTemplate({"default": AS_PARTS}, {}, limit_s=2)
    one = [f"{at:08d}" for at in range(number)]
    for chat in (in_parts(one), in_parts(*([text] for text in one))):
        begin = time.thread_time()
        assert template.render(chat, mark="\u00a7", most_bytes=8 * number) == "".join(one)
        assert time.thread_time() - begin < 4


def test_looking_for_parts_has_the_time_of_rendering() -> None:
    """A client may choose a text in which each search takes long."""
    texts = [f"{at:08d}" for at in range(60_000)]
    source = "{{ joined }}"
    asked = replace(in_parts(texts), template_arguments={"joined": "".join(reversed(texts))})
    template = ChatTemplate({"default": source}, {}, limit_s=0.2)
    with pytest.raises(ChatTemplateError, match=r"rendering took more than 0\.2 s"):
        template.render(asked, mark="\u00a7", most_bytes=1 << 20)
