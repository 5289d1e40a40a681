"""A conversation as a value: what was said so far, and what its model's template is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from google.protobuf import struct_pb2

from effuse.v1 import generation_pb2 as pb

ROLES: Final = ("system", "user", "assistant", "tool")


class Message(NamedTuple):
    """What one side said."""

    role: str  # one of ROLES
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that is to go on. `chat.user("..")` is a longer one; none is ever changed.

    `template_arguments` are variables for the template, such as `{"enable_thinking": False}`: what
    JSON can express. `continue_last` goes on with the assistant's last message, where an answer
    would otherwise begin.
    """

    messages: tuple[Message, ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    add_generation_prompt: bool | None = None  # None: unless the last message is continued
    continue_last: bool = False

    @classmethod
    def of(cls, messages: Iterable[Mapping[str, str]], **template_arguments: object) -> Chat:
        """The conversation of such messages as `{"role": "user", "content": ".."}`. Raises
        KeyError where one lacks either, and ValueError where one says more than that."""
        return cls(tuple(map(_message, messages)), template_arguments)

    def system(self, content: str) -> Chat:
        """This, and an instruction."""
        return self._with("system", content)

    def user(self, content: str) -> Chat:
        """This, and what the user says next."""
        return self._with("user", content)

    def assistant(self, content: str) -> Chat:
        """This, and what the model answered."""
        return self._with("assistant", content)

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt is to end with what begins an answer."""
        asked = self.add_generation_prompt
        return not self.continue_last if asked is None else asked

    def to_input(self) -> pb.ChatInput:
        """As it is sent. Raises ValueError for a template argument that JSON cannot express."""
        arguments = None
        if self.template_arguments:
            arguments = struct_pb2.Struct()
            arguments.update(dict(self.template_arguments))
        return pb.ChatInput(
            messages=[pb.ChatMessage(role=one.role, content=one.content) for one in self.messages],
            template_arguments=arguments,
            add_generation_prompt=self.add_generation_prompt,
            continue_last_message=self.continue_last,
        )

    @classmethod
    def from_input(cls, sent: pb.ChatInput) -> Chat:
        """As it was sent, but that whole numbers are ints and objects' keys in order."""
        begins = sent.add_generation_prompt if sent.HasField("add_generation_prompt") else None
        return cls(
            messages=tuple(Message(one.role, one.content) for one in sent.messages),
            template_arguments=_fields(sent.template_arguments),
            add_generation_prompt=begins,
            continue_last=sent.continue_last_message,
        )

    def _with(self, role: str, content: str) -> Chat:
        return replace(self, messages=(*self.messages, Message(role, content)))


def _message(said: Mapping[str, str]) -> Message:
    for name, value in said.items():
        if name not in Message._fields and value:
            raise ValueError(f"{name}: expected messages of role and content alone")
    for name in Message._fields:
        if not isinstance(said[name], str):
            raise ValueError(f"{name}: expected a string, got {said[name]!r}")
    return Message(said["role"], said["content"])


def _fields(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Protobuf's maps have no order, and the same request is to make the same prompt."""
    return {name: _value(struct.fields[name]) for name in sorted(struct.fields)}


def _value(sent: struct_pb2.Value) -> Any:
    match sent.WhichOneof("kind"):
        case "number_value":
            number = sent.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return sent.string_value
        case "bool_value":
            return sent.bool_value
        case "struct_value":
            return _fields(sent.struct_value)
        case "list_value":
            values: Sequence[struct_pb2.Value] = sent.list_value.values
            return [_value(one) for one in values]
        case _:
            return None
