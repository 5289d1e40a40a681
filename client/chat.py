"""A conversation as a value: its messages, and variables for the model's template."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, NoReturn, TypeGuard

from google.protobuf import struct_pb2
from google.protobuf.json_format import MessageToJson

from effuse.config.decoding import SettingError
from effuse.v1 import generation_pb2 as pb

ROLES: Final = ("system", "user", "assistant", "tool")
MOST_LEVELS: Final = 100  # of nested lists and objects; code that renders them recurses
MOST_DIGITS: Final = 1000  # of a number
_TEXTS: Final = ("tool_call_id", "name", "reasoning_content")


class Message(NamedTuple):
    """One message."""

    role: str  # one of ROLES
    content: str  # the text; "" if `json` has parts or no text
    json: str = ""  # the whole message as the text of a JSON object, if it has more fields

    @classmethod
    def of(cls, given: Mapping[str, Any], name: str = "message") -> Message:
        """The message with these fields, as in OpenAI's API and chat templates. None means no
        value. Raises SettingError with `name` as the beginning of the path.
        """
        if not isinstance(given, Mapping):
            raise SettingError(name, "an object with role and content", _shown(given))
        fields = _without_none(given)
        text = _check_message(fields, name)
        is_plain = [*fields] == ["role", "content"] and fields["content"] is text
        return cls(fields["role"], text, "" if is_plain else to_json(fields, name))

    def fields(self) -> dict[str, Any]:
        """All fields for the template."""
        if not self.json:
            return {"role": self.role, "content": self.content}
        return _without_none(json.loads(self.json))


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to continue. `chat.user("..")` returns a longer one; a chat never changes.

    `template_arguments` are variables for the template, such as `{"enable_thinking": False}`, with
    any values of JSON. `continue_last` continues the assistant's last message instead of beginning
    an answer. Raises ValueError for values of other types.
    """

    messages: tuple[Message, ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    add_generation_prompt: bool | None = None  # None: true unless the last message is continued
    continue_last: bool = False

    def __post_init__(self) -> None:
        if not _is_listed(self.messages):
            raise SettingError("messages", "a list of messages", _shown(self.messages))
        for at, one in enumerate(self.messages):
            if not isinstance(one, Message):
                form = "a Message (Chat.of takes objects)"
                raise SettingError(f"messages[{at}]", form, _shown(one))
        if not isinstance(self.template_arguments, Mapping):
            found = _shown(self.template_arguments)
            raise SettingError("template_arguments", "values by name", found)
        # Copies, because the caller may change its own.
        object.__setattr__(self, "messages", tuple(self.messages))
        object.__setattr__(self, "template_arguments", dict(self.template_arguments))

    @classmethod
    def of(cls, messages: Iterable[Mapping[str, Any]], **template_arguments: object) -> Chat:
        """The conversation of messages such as `{"role": "user", "content": ".."}`, which may have
        tool calls and parts of text. `tools=[..]` gives the template tools. Raises ValueError that
        names the first wrong field.
        """
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
            raise SettingError("messages", "a list of objects", _shown(messages))
        listed = (Message.of(one, f"messages[{at}]") for at, one in enumerate(messages))
        return cls(tuple(listed), template_arguments)

    def system(self, content: str) -> Chat:
        """This chat with another instruction."""
        return self._with("system", content)

    def user(self, content: str) -> Chat:
        """This chat with another message of the user."""
        return self._with("user", content)

    def assistant(self, content: str) -> Chat:
        """This chat with another answer of the model."""
        return self._with("assistant", content)

    def add(self, message: Mapping[str, Any]) -> Chat:
        """This chat with a message of any fields, such as a tool's. Raises ValueError like `of`."""
        more = Message.of(message, f"messages[{len(self.messages)}]")
        return replace(self, messages=(*self.messages, more))

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt ends with the tokens that begin an answer."""
        asked = self.add_generation_prompt
        return not self.continue_last if asked is None else asked

    def to_input(self) -> pb.ChatInput:
        """The message for the wire. Raises ValueError for arguments that JSON cannot express."""
        arguments = dict(self.template_arguments)
        return pb.ChatInput(
            messages=map(_sent, self.messages),
            template_arguments_json=to_json(arguments, "template_arguments") if arguments else "",
            add_generation_prompt=self.add_generation_prompt,
            continue_last_message=self.continue_last,
        )

    @classmethod
    def from_input(cls, sent: pb.ChatInput) -> Chat:
        """From the message of the wire. Raises SettingError that names the field, for invalid JSON
        and for JSON beyond the limits.
        """
        begins = sent.add_generation_prompt if sent.HasField("add_generation_prompt") else None
        return cls(
            messages=tuple(_received(one, at) for at, one in enumerate(sent.messages)),
            template_arguments=_arguments(sent),
            add_generation_prompt=begins,
            continue_last=sent.continue_last_message,
        )

    def _with(self, role: str, content: str) -> Chat:
        if not isinstance(content, str):
            name = f"messages[{len(self.messages)}].content"
            raise SettingError(name, "a string", _shown(content))
        return self.add({"role": role, "content": content})


def to_json(value: Mapping[str, Any], name: str) -> str:
    """`value` as the text of a JSON object, in its order. Raises SettingError for values that JSON
    cannot express or that `from_json` would refuse.
    """
    try:
        _check(value)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SettingError(name, "values that JSON can express", f"another: {error}") from error


def from_json(text: str, name: str) -> dict[str, Any]:
    """The object in `text`, in its order; 1.0 stays a float, and integers are exact. Raises
    SettingError for other text, and for values beyond MOST_LEVELS, MOST_DIGITS or a double.
    """
    form = "the text of a JSON object"
    try:
        found = json.loads(text, parse_int=_whole, parse_float=_fraction, parse_constant=_no_number)
        _check(found)
    except RecursionError as error:
        raise SettingError(name, f"at most {MOST_LEVELS} levels", "more") from error
    except ValueError as error:
        raise SettingError(name, form, f"another text: {error}") from error
    if not isinstance(found, dict):
        raise SettingError(name, form, f"a {type(found).__name__}")
    return found


def _sent(message: Message) -> pb.ChatMessage:
    if message.json:
        return pb.ChatMessage(json=message.json)
    return pb.ChatMessage(role=message.role, content=message.content)


def _received(sent: pb.ChatMessage, at: int) -> Message:
    name = f"messages[{at}]"
    if not sent.json:
        return Message(sent.role, sent.content)
    if sent.role or sent.content:
        raise SettingError(f"{name}.json", "no value if role or content is set", "a value")
    fields = _without_none(from_json(sent.json, f"{name}.json"))
    text = _check_message(fields, name)
    return Message(fields["role"], text, sent.json)


def _arguments(sent: pb.ChatInput) -> dict[str, Any]:
    if not sent.template_arguments_json:
        return _fields(sent.template_arguments)
    name = "template_arguments_json"
    if sent.HasField("template_arguments"):
        raise SettingError(name, "no value if template_arguments is set", "a value")
    return from_json(sent.template_arguments_json, name)


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _check_message(fields: Mapping[str, Any], name: str) -> str:
    """Returns the message's text; "" if it has parts or none. Raises SettingError."""
    role, content = fields.get("role"), fields.get("content")
    if role not in ROLES:
        raise SettingError(f"{name}.role", f"one of {', '.join(ROLES)}", _shown(role))
    if content is None and len(fields) < 2:
        raise SettingError(f"{name}.content", "a string or parts of text", "none")
    if isinstance(content, str):
        check_whole(f"{name}.content", content)
    if content is not None and not isinstance(content, str):
        _check_parts(content, f"{name}.content")
    for key in _TEXTS:
        if not isinstance(fields.get(key, ""), str):
            raise SettingError(f"{name}.{key}", "a string", _shown(fields[key]))
    calls = fields.get("tool_calls", ())
    if not _is_listed(calls) or not all(isinstance(one, Mapping) for one in calls):
        raise SettingError(f"{name}.tool_calls", "a list of objects", _shown(calls))
    return content if isinstance(content, str) else ""


def _check_parts(parts: object, name: str) -> None:
    if not _is_listed(parts):
        raise SettingError(name, "a string or a list of parts", _shown(parts))
    for at, part in enumerate(parts):
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not (is_text and isinstance(part.get("text"), str)):
            form = 'a part of text, {"type": "text", "text": ".."}'
            raise SettingError(f"{name}[{at}]", form, _shown(part))


def check_whole(name: str, text: str) -> None:
    """Raises SettingError for half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SettingError(name, "whole characters", _shown(text[error.start])) from None


def _is_listed(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _shown(value: object) -> str:
    """A value for an error: in ASCII, shortened."""
    try:
        text = ascii(value)
    except RecursionError:
        text = "lists and objects on too many levels"
    return text if len(text) <= 60 else f"{text[:60]}..."


def _check(value: object, level: int = 0) -> None:
    """Raises ValueError for more than MOST_LEVELS levels, and for half of a surrogate pair."""
    if isinstance(value, str):
        value.encode()  # UTF-8 cannot encode half of a surrogate pair, but an escape can spell it
    elif isinstance(value, Mapping | list | tuple):
        if level == MOST_LEVELS:
            raise ValueError(f"lists and objects on more than {MOST_LEVELS} levels")
        inner = (*value, *value.values()) if isinstance(value, Mapping) else value
        for one in inner:
            _check(one, level + 1)


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} characters, more than {MOST_DIGITS}")
    return int(text)


def _fraction(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{_shown(text)}, which is not a number within a double's range")


def _fields(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Sorts keys: protobuf's maps have no order, but equal requests must have equal prompts."""
    try:
        text = MessageToJson(struct, sort_keys=True)
    except ValueError as error:  # JSON has no infinity
        raise SettingError("template_arguments", "numbers of JSON", f"another: {error}") from error
    found: dict[str, Any] = json.loads(text, parse_float=_shortest)
    return found


def _shortest(text: str) -> int | float:
    """Every number of a Struct is a double, and templates print 1 and 1.0."""
    number = float(text)
    return int(number) if number.is_integer() else number
