"""A checkpoint's chat template: found in its directory, and rendered like transformers renders it.

Templates are programs that a checkpoint brings, in Jinja. They run in Jinja's sandbox, where they
cannot change their input or reach anything else, within bounds of time and size. Not here: the
words of a client that may become special tokens, and encoding (`tokenizer.py`)."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from os.path import commonprefix
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from effuse.client.chat import Chat

RENDER_S: Final = 1.0
"""A long chat takes a few milliseconds."""

_COMMON: Final = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
"""Names of special tokens, in the order in which transformers adds them."""

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")

_TRACED: Final = "<template>"  # what Jinja calls the file of a template's code
_Trace = Any  # a trace function returns one like itself, which types cannot express


class ChatTemplateError(Exception):
    """A template cannot be used, or refuses this chat; the text is the template's own, if it has
    any."""


class ChatTemplate:
    """The templates of one checkpoint. May be used by several threads."""

    def __init__(
        self,
        sources: Mapping[str, str],
        variables: Mapping[str, str],
        limit_s: float = RENDER_S,
        origin: str = "",
    ) -> None:
        """sources: Jinja by name, "default" and perhaps "tool_use" among them. variables: texts of
        special tokens, by their names in templates. limit_s: time of a processor that rendering may
        take. origin: the file that it was read from. Raises ChatTemplateError."""
        if "default" not in sources:
            raise ChatTemplateError(f"expected a chat template named default, got {[*sources]}")
        self._limit_s = limit_s
        self._variables = {"tools": None, "documents": None, **variables}
        self.source = "".join(sources.values())
        self.origin = origin
        self._templates = {name: _compile(source) for name, source in sources.items()}

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """A checkpoint directory's, or None if it has none. Raises ChatTemplateError."""
        config = read_config(directory)
        try:
            origin, sources = _sources_of(directory, config)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ChatTemplateError(
                f"cannot read the files of the chat template: {error}"
            ) from error
        if not sources:
            return None
        return cls(sources, named_tokens(config), origin=origin)

    def render(
        self,
        chat: Chat,
        *,
        mark: str,
        most_bytes: int,
        hide: Callable[[Any], Any] = lambda value: value,
    ) -> str:
        """The prompt of a chat. `mark` is a character outside ASCII that stands neither in it nor
        in `source`; `hide` changes what JSON holds before the template gets it.

        A template that fails at parts of text, leaves them out or prints the list gets one text.
        Raises ChatTemplateError if the template refuses the chat, and if the prompt is longer
        than `most_bytes` of UTF-8 or takes too long.
        """
        arguments: Mapping[str, Any] = hide(chat.template_arguments)
        wants_tools = "tool_use" in self._templates and arguments.get("tools") is not None
        template = self._templates["tool_use" if wants_tools else "default"]
        messages = [_with_reasoning(hide(one.fields())) for one in chat.messages]
        last = _open_last(messages[-1], f"{mark} ") if chat.continue_last else ""
        values = {**self._variables, **arguments, "messages": messages}
        values["add_generation_prompt"] = chat.begins_answer

        text = self._with_parts(template, values, most_bytes)
        return _cut_open(text, last, mark) if chat.continue_last else text

    def _with_parts(self, template: Template, values: dict[str, Any], most_bytes: int) -> str:
        """Renders, and once more with parts as one text if the template does not show these."""
        messages = values["messages"]
        joined = values | {"messages": [_with_one_text(one) for one in messages]}
        if joined == values:
            return self._generate(template, values, most_bytes)
        try:
            text = self._generate(template, values, most_bytes)
        except ChatTemplateError:
            return self._generate(template, joined, most_bytes)
        if self._shows_parts(text, messages):
            return text
        try:
            other = self._generate(template, joined, most_bytes)
        except ChatTemplateError:
            return text
        return other if self._shows_parts(other, messages) else text

    def _generate(self, template: Template, values: Mapping[str, Any], most_bytes: int) -> str:
        with self._bounded():
            return _joined(template.generate(values), most_bytes)

    def _shows_parts(self, text: str, messages: Sequence[Mapping[str, Any]]) -> bool:
        with self._bounded() as check:
            return _shows_parts(text, messages, check)

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[Callable[[], None]]:
        """Raises ChatTemplateError for any exception, and for more than the time limit: within the
        template's code, and at calls of what it returns."""
        try:
            with _limited(self._limit_s) as check:
                yield check
        except Exception as error:  # whatever an expression of the template may raise
            why = str(error) or type(error).__name__
            raise ChatTemplateError(why) from error


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training; it is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except Exception as error:  # a text that is no template may break Jinja anywhere
        raise ChatTemplateError(f"cannot compile the chat template: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@contextlib.contextmanager
def _limited(limit_s: float) -> Iterator[Callable[[], None]]:
    """Raises TimeoutError from within a template's code, at the next of its lines, once this thread
    has computed for so long. Threads cannot be ended, and loops of loops may run for years. Other
    code calls what it returns."""
    end = time.thread_time() + limit_s

    def check() -> None:
        if time.thread_time() > end:
            raise TimeoutError(f"rendering took more than {limit_s:g} s of computing")

    def trace(frame: FrameType, event: str, argument: object) -> _Trace:
        if frame.f_code.co_filename != _TRACED:
            return None
        check()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield check
    finally:
        sys.settrace(before)


def _joined(pieces: Iterator[str], most_bytes: int) -> str:
    texts: list[str] = []
    left = most_bytes
    for piece in pieces:
        left -= len(piece.encode())
        if left < 0:
            raise ValueError(f"expected a chat of at most {most_bytes} bytes after rendering")
        texts.append(piece)
    return "".join(texts)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read a model's reasoning as `reasoning_content` or as `thinking`, and clients have
    three names for it; transformers offers both, in this order."""
    reasoning = [message[name] for name in _REASONING if name in message]
    if not reasoning:
        return message
    return {"thinking": reasoning[0]} | message | {"reasoning_content": reasoning[0]}


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """For a template that fails at a list of parts: its parts as one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "".join(part["text"] for part in content)}


def _shows_parts(
    text: str, messages: Sequence[Mapping[str, Any]], check: Callable[[], None]
) -> bool:
    """Whether the text of each part is in `text`, and no list of parts as Python writes it. Most
    templates keep the order of parts, and most texts have nothing that all lists begin with, so
    that one pass is enough. Otherwise it searches all of `text` again and again, and calls `check`.
    """
    listed = [one["content"] for one in messages if isinstance(one.get("content"), list)]
    written = [str(parts) for parts in listed if parts]
    if commonprefix([one[:100] for one in written]) in text:  # noqa: RUF071  # not of paths
        for one in written:
            check()
            if one in text:
                return False
    end = 0
    for part in itertools.chain.from_iterable(listed):
        words = part["text"].strip()
        at = text.find(words, end)
        if at >= 0:
            end = at + len(words)
        elif words not in text:
            return False
        else:
            check()
    return True


def _open_last(message: dict[str, Any], tail: str) -> str:
    """Adds `tail` to the last text of a message, and returns that text. Raises ChatTemplateError
    if it has none."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + tail
        return content
    if not content:
        raise ChatTemplateError("the last message cannot be continued, because it has no text")
    text: str = content[-1]["text"]
    content[-1] = {**content[-1], "text": text + tail}
    return text


def escapes_of(character: str) -> tuple[str, str]:
    """A character outside ASCII, written as templates may write it in a list, or in JSON with only
    ASCII."""
    return ascii(character)[1:-1], json.dumps(character)[1:-1]


def _cut_open(text: str, last: str, mark: str) -> str:
    """The rendered chat up to the end of its last message, whose text is `last`, at `mark`. If the
    template has trimmed the space behind that, it would have trimmed the message's own, too."""
    last = last.strip()
    for escape in escapes_of(mark):
        text = text.replace(escape, mark)
    if last not in text or mark not in text:
        raise ChatTemplateError(
            "the last message cannot be continued, because the template changes it"
        )
    open_text, behind = text[: text.rindex(mark)], text[text.rindex(mark) + 1 :]
    return open_text if behind.startswith(" ") else open_text.rstrip()


def _sources_of(directory: Path, config: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Where templates are, and templates by name. Files of their own come before what stands in
    tokenizer_config.json."""
    origin = "additional_chat_templates"
    files = {path.stem: path for path in (directory / "additional_chat_templates").glob("*.jinja")}
    if (directory / "chat_template.jinja").is_file():
        origin = "chat_template.jinja"
        files["default"] = directory / origin
    if files:
        return origin, {name: _read_text(path) for name, path in files.items()}
    origin = "tokenizer_config.json"
    found = config.get("chat_template")
    if isinstance(found, list):
        return origin, {str(one["name"]): str(one["template"]) for one in found}
    return origin, {"default": found} if isinstance(found, str) else {}


def read_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, behind special_tokens_map.json unless it lists all tokens and so is
    newer. Raises ChatTemplateError."""
    try:
        config = _read_json(directory / "tokenizer_config.json")
        if "added_tokens_decoder" in config:
            return config
        return config | _read_json(directory / "special_tokens_map.json")
    except (OSError, ValueError) as error:
        raise ChatTemplateError(f"cannot read the files of the chat template: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path) if path.is_file() else "{}"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"expected an object in {path}, got {type(found).__name__}")
    return found


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of special tokens by the names that templates know: common ones and the model's own."""
    named = {name: config.get(name) for name in _COMMON}
    named |= {name: token for name, token in config.items() if name.endswith("_token")}
    for group in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(own := config.get(group), dict):
            named |= own
    texts = {name: text_of(token) for name, token in named.items()}
    return {name: text for name, text in texts.items() if text is not None}


def text_of(token: object) -> str | None:
    """A special token is written as its text, or as an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
