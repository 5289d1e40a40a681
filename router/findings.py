"""The findings against a request, the checks of names that several calls share, and the check that
a text, a chat or ids have a form that can be encoded.

Each finding names the field, the accepted form and the value that was found. Pure, and before
anything has a cost. Not here: faults that only the encoding of an input shows (`tokenizer.py`), the
settings (`validation.py`)."""

import heapq
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import GenericAlias, NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import msgspec
from google.protobuf import struct_pb2

from effuse.client.chat import ROLES, Chat
from effuse.client.params import Params, misfits
from effuse.config.checks import MODEL_NAME_FORM, is_model_name
from effuse.config.decoding import Bounds, SettingError
from effuse.placement.records import ModelInfo
from effuse.protos.errors import FieldViolation, InvalidRequest
from effuse.v1 import generation_pb2 as pb

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
SEEDS: Final = 1 << 64
"""How many seeds effuse knows. Other protocols have more, which count modulo this."""
REQUEST_ID_FORM: Final = "1 to 128 characters of A-Z a-z 0-9 . _ : -"
MAX_BYTES_PER_TOKEN: Final = 16
"""No prose comes near it; text above it cannot fit the context and is refused before it costs."""

MOST_FINDINGS: Final = 32
"""Nobody reads more, and a request of a few megabytes may have a million."""

NOT_ARGUMENTS: Final = frozenset({"messages", "add_generation_prompt"})
"""Variables of a template that are fields of their own."""


@dataclass(slots=True)
class Findings:
    """The findings against one request so far; those above MOST_FINDINGS are only counted."""

    violations: list[FieldViolation] = field(default_factory=list)
    num_more: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.violations) >= MOST_FINDINGS

    @property
    def num_found(self) -> int:
        return len(self.violations) + self.num_more

    def add(self, name: str, expected: str, found: object) -> None:
        self.note(name, f"expected {expected}, got {found}")

    def note(self, name: str, description: str) -> None:
        if self.is_full:
            self.num_more += 1
        else:
            self.violations.append(FieldViolation(name, description))

    def add_each(
        self, names: Collection[str], path: Callable[[str], str], expected: str, found: str
    ) -> None:
        """The same for each of `names`, of which there may be a million: those that are only
        counted need no text."""
        named = heapq.nsmallest(MOST_FINDINGS - len(self.violations), names)
        for name in named:
            self.add(path(name), expected, found)
        self.num_more += len(names) - len(named)

    def misfit(self, name: str, kind: Any, value: object) -> None:
        """A value that msgspec cannot convert to `kind`, a type of Python; names the part of a list
        or an object that is at fault."""
        name, kind, value = _fault(name, kind, value)
        kinds = _kinds(kind)
        names = [get_origin(one) or one for one in kinds]
        if (isinstance(value, str) and str in kinds) or (isinstance(value, dict) and dict in names):
            self.add(name, "whole characters", shown(json.dumps(value)))  # half of a surrogate pair
        elif isinstance(value, str) and Literal in names:
            self.add(name, _form_of(kind), shown(value))
        else:
            self.add(name, _form_of(kind), kind_of(value))

    def raise_any(self) -> None:
        """Raises `InvalidRequest` with all of them, if there are any."""
        if self.violations:
            raise InvalidRequest(self.violations, self.num_more)

    def settings(self, given: Mapping[str, object], path: Callable[[str], str]) -> bool:
        """Adds the settings that every router refuses, each with its `path`; whether there are
        any."""
        found = misfits(given)
        for name, why in found.items():
            self.note(path(name), why)
        return bool(found)

    def params(self, settings: dict[str, Any], path: Callable[[str], str] = str) -> Params:
        """The settings of a request of another protocol. Raises `InvalidRequest` with those that
        every router refuses, and with all earlier findings."""
        self.settings(settings, path)
        self.raise_any()
        return Params(**settings)

    def number(self, name: str, value: float, bounds: Bounds, *, most: float | None = None) -> None:
        """A number within `bounds`, whose upper end is `most` if that is given."""
        if value not in bounds or (most is not None and value > most):
            bounds = bounds if most is None else replace(bounds, high=most)
            self.add(name, bounds.form, f"{value:g}" if isinstance(value, float) else value)

    def choice(self, name: str, value: int, names: Sequence[str]) -> None:
        """An enum value that has a name; protobuf lets unknown numbers pass."""
        if not 0 <= value < len(names):
            self.add(name, f"one of {', '.join(names)}", f"the unknown value {value}")

    def token_ids(
        self, name: str, ids: Sequence[int], vocab_size: int, refused: Mapping[int, str]
    ) -> None:
        """Ids of the vocabulary except those in `refused`, which maps ids to their kinds; the first
        bad one is named."""
        if max(ids, default=0) >= vocab_size:
            at, bad = next((at, i) for at, i in enumerate(ids) if i >= vocab_size)
            self.add(f"{name}[{at}]", f"an id below the vocabulary size {vocab_size}", bad)
        elif not refused.keys().isdisjoint(ids):
            at, bad = next((at, i) for at, i in enumerate(ids) if i in refused)
            self.add(f"{name}[{at}]", "an id that stands for text", f"the {refused[bad]} id {bad}")


@contextmanager
def naming(path_of: Callable[[str], str]) -> Iterator[None]:
    """A refusal of a request becomes one with the fields of another protocol's message, whose paths
    `path_of` returns."""
    try:
        yield
    except InvalidRequest as error:
        named = [replace(one, field=path_of(one.field)) for one in error.violations]
        raise InvalidRequest(named, error.num_more, labels=error.labels) from error


def check_request_id(request_id: str, findings: Findings) -> None:
    if not REQUEST_ID.fullmatch(request_id):
        findings.add("request_id", REQUEST_ID_FORM, shown(request_id))


def check_model_name(name: str, field_name: str) -> None:
    """Raises `InvalidRequest` for a name that no model has; others may have no model either."""
    if not is_model_name(name):
        raise InvalidRequest.of(field_name, f"expected {MODEL_NAME_FORM}, got {shown(name)}")


_FORMS: Final[Mapping[Any, tuple[str, str]]] = {
    bool: ("true or false", "true or false"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    list: ("a list", "lists"),
    dict: ("an object", "objects"),
}
"""Types of JSON: one value, and several."""


def _kinds(kind: Any) -> Sequence[Any]:
    """The types of a union without None, or one type."""
    is_union = get_origin(kind) in (Union, UnionType)
    return [one for one in get_args(kind) if one is not NoneType] if is_union else [kind]


def _fault(name: str, kind: Any, value: object) -> tuple[str, Any, object]:
    """The first part of a list or an object that is at fault, with its path and its type; else the
    value itself."""
    for one in _kinds(kind):
        origin, inner = get_origin(one), get_args(one)
        if isinstance(value, list) and origin in (list, Sequence):
            if (at := _misfit(value, inner[0])) is not None:
                return _fault(f"{name}[{at}]", inner[0], value[at])
        elif isinstance(value, dict) and origin is dict:
            keys = list(value)
            if (
                _misfit(keys, str) is None
                and (at := _misfit([*value.values()], inner[1])) is not None
            ):
                return _fault(f"{name}[{shown(keys[at])}]", inner[1], value[keys[at]])
    return name, kind, value


def _misfit(parts: Sequence[object], kind: Any) -> int | None:
    """The first part that is not of this kind; None if all are. A body may have a million parts,
    and msgspec looks at each twice."""
    kind = GenericAlias(list, kind)
    if _fits(parts, kind):
        return None
    low, high = 0, len(parts)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(parts[low:middle], kind) else (low, middle)
    return low


def _form_of(kind: Any, number: int = 0) -> str:
    """A type in words; `number` is 1 for several values of it."""
    forms = []
    for one in _kinds(kind):
        origin, inner = get_origin(one), get_args(one)
        if origin is Literal:
            forms.append(f"one of {', '.join(inner)}")
        elif origin in (list, Sequence):
            forms.append(f"{_FORMS[list][number]} of {_form_of(inner[0], 1)}")
        else:
            forms.append(_FORMS[origin or one][number])
    return " or ".join(filter(None, (", ".join(forms[:-1]), forms[-1])))


def kind_of(value: object) -> str:
    """A value of JSON by its type, in words."""
    if value is None or isinstance(value, bool | float):
        return json.dumps(value)
    return _FORMS[type(value)][0]


def _fits(value: object, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return False
    return True


def shown(text: str, most: int = 40) -> str:
    """`text` as it may stand in an error: quoted, in ASCII, cut."""
    tail = "" if len(text) <= most else f"... ({len(text)} characters)"
    return ascii(text[:most]) + tail


def most_prompt_bytes(model: ModelInfo) -> int:
    """Most UTF-8 that a prompt is worth being encoded at."""
    return MAX_BYTES_PER_TOKEN * model.max_model_len


def check_input(
    request: pb.GenerateRequest,
    model: ModelInfo,
    refused: Mapping[int, str],
    takes_chats: bool,
    findings: Findings,
) -> Chat | None:
    """Checks the input of `request`, and returns its chat, if it is one. `refused`: ids that no
    prompt may hold, and their kinds; `takes_chats`: whether the model has a chat template."""
    chat = None
    match request.WhichOneof("input"):
        case None:
            findings.add("prompt", "one of prompt, prompt_token_ids and chat", "none of them")
        case "prompt" if not request.prompt:
            findings.add("prompt", "text of at least one character", "an empty string")
        case "prompt":
            _check_bytes("prompt", len(request.prompt.encode()), model, findings)
        case "prompt_token_ids":
            _check_prompt_ids(request.prompt_token_ids, model, refused, findings)
        case "chat" if not takes_chats:
            form = f"text or token ids, because model {model.name!r} has no chat template"
            findings.add("chat", form, "chat")
        case "chat":
            chat = _check_chat(request.chat, model, findings)
    if request.parse_special_tokens and request.HasField("prompt_token_ids"):
        findings.add(
            "parse_special_tokens", "no value with token ids, which are not parsed", "true"
        )
    return chat


def _check_bytes(name: str, num_bytes: int, model: ModelInfo, findings: Findings) -> None:
    most = most_prompt_bytes(model)
    if num_bytes > most:
        context = f"the model accepts {model.max_model_len} tokens"
        findings.add(name, f"at most {most} bytes ({context})", f"{num_bytes} bytes")


def _check_chat(sent: pb.ChatInput, model: ModelInfo, findings: Findings) -> Chat | None:
    name, num_messages = "chat.messages", len(sent.messages)
    if not 1 <= num_messages <= model.max_model_len:
        findings.add(name, f"from 1 to {model.max_model_len} messages", num_messages)
        return None
    num_before = findings.num_found
    num_bytes = sum(len(one.content.encode()) + len(one.json.encode()) for one in sent.messages)
    _check_bytes(name, num_bytes, model, findings)
    for field_name in ("template_arguments", "template_arguments_json"):
        num_bytes = _size_of(getattr(sent, field_name))
        _check_bytes(f"chat.{field_name}", num_bytes, model, findings)
    if findings.num_found > num_before:
        return None  # longer input is not parsed
    try:
        chat = Chat.from_input(sent)
    except SettingError as error:
        findings.note(f"chat.{error.name}", error.description)
        return None
    _check_messages(chat, findings)
    for argument in sorted(NOT_ARGUMENTS & chat.template_arguments.keys()):
        form = f"names except {' and '.join(sorted(NOT_ARGUMENTS))}, which are fields"
        is_json = bool(sent.template_arguments_json)
        findings.add(f"chat.template_arguments{'_json' * is_json}", form, argument)
    return chat


def _size_of(argument: str | struct_pb2.Struct) -> int:
    return len(argument.encode()) if isinstance(argument, str) else argument.ByteSize()


def _check_messages(chat: Chat, findings: Findings) -> None:
    name = "chat.messages"
    strange = [at for at, one in enumerate(chat.messages) if one.role not in ROLES]
    for at in strange[:1]:
        form = f"one of {', '.join(ROLES)}"
        findings.add(f"{name}[{at}].role", form, shown(chat.messages[at].role))
    if not chat.continue_last:
        return
    last, role = f"{name}[{len(chat.messages) - 1}].role", chat.messages[-1].role
    if role != "assistant":
        findings.add(last, "assistant, because the last message is continued", shown(role))
    if chat.add_generation_prompt:
        form = "false if the last message is continued"
        findings.add("chat.add_generation_prompt", form, "true")


def _check_prompt_ids(
    token_ids: pb.TokenIds, model: ModelInfo, refused: Mapping[int, str], findings: Findings
) -> None:
    name, num_ids = "prompt_token_ids.ids", len(token_ids.ids)
    if num_ids == 0:
        findings.add(name, "at least one id", "none")
    elif num_ids >= model.max_model_len:
        findings.add(name, f"at most {model.max_model_len - 1} ids", f"{num_ids} ids")
    else:
        findings.token_ids(name, token_ids.ids, model.vocab_size, refused)
