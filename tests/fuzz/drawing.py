"""The drawn inputs: random bytes, messages changed in transit, messages of random fields, and
altered values. Everything follows from a draw.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Draw: TypeAlias = random.Random

INTEGERS: Final = (
    *(0, 1, 2, 3, 5, 7, 8, 9, 16, 17, 63, 64, 65, 127, 128, 255, 256, 257, 258, 271, 272, 512, 513),
    *(4096, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1),
)
FLOATS: Final = (
    *(0.0, -0.0, 0.1, 0.5, 0.9, 1.0, 1.5, 2.0, 100.0, 1e-45, 1e-3, 1e30, -1.0, -1e30),
    *(math.nan, math.inf, -math.inf),
)
TEXTS: Final = (
    *("", "a", "a b", "how many?", "é\u202e\U0001f642", "\0", "../etc", "a" * 129, "b" * 600),
    *("user", "system", "assistant", "text_input", "BYTES", "1", "text_output", "<|mask|>"),
    *("d2f", "confidence", "127.0.0.1:1", "zmq", "DRAM", "low_confidence_dynamic", "tcp://a:1"),
)
_MOST_DEPTH: Final = 4
_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-3, 9),
}


def garbage(draw: Draw, most: int = 200) -> bytes:
    """Bytes of any length up to `most`."""
    return draw.randbytes(draw.randrange(most + 1))


def mutated(draw: Draw, data: bytes) -> bytes:
    """`data` after one to four changes: bits, pieces lost, doubled, moved or put in."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        end = min(len(changed), at + draw.choice((1, 1, 2, 4, 16)))
        match draw.randrange(7):
            case 0 | 1 if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case 2:
                del changed[at:end]
            case 3:
                changed[at:at] = changed[at:end] * draw.choice((1, 2, 40))
            case 4:
                changed[at:end] = draw.randbytes(end - at)
            case 5:
                del changed[at:]
            case _:
                changed[at:at] = draw.choice((b"\xff" * 4, b"\0", b"\x80" * 10, b"\xc3\x28"))
    return bytes(changed)


def random_message(draw: Draw, kind: type[Message], depth: int = 0) -> Message:
    """A message with some of its fields set to values that their types allow."""
    made = kind()
    fields: Sequence[Any] = kind.DESCRIPTOR.fields
    for field in fields:
        if draw.random() < (0.5 if depth == 0 else 0.7):
            _fill(draw, made, field, depth)
    return made


def _fill(draw: Draw, made: Message, field: FieldDescriptor, depth: int) -> None:
    entry = field.message_type
    if entry is not None and depth >= _MOST_DEPTH:
        return
    if entry is not None and entry.GetOptions().map_entry:
        _fill_map(draw, getattr(made, field.name), entry, depth)
    elif field.is_repeated:
        for _ in range(draw.choice((0, 1, 1, 2, 3, 20))):
            _add(draw, getattr(made, field.name), field, depth)
    elif entry is not None:
        filled = random_message(draw, message_factory.GetMessageClass(entry), depth + 1)
        getattr(made, field.name).CopyFrom(filled)
    else:
        setattr(made, field.name, _scalar(draw, field))


def _add(draw: Draw, held: Any, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is None:
        held.append(_scalar(draw, field))
    else:
        kind = message_factory.GetMessageClass(field.message_type)
        held.append(random_message(draw, kind, depth + 1))


def _fill_map(draw: Draw, held: Any, entry: Any, depth: int) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    for _ in range(draw.randrange(3)):
        if value.message_type is None:
            held[_scalar(draw, key)] = _scalar(draw, value)
        else:
            kind = message_factory.GetMessageClass(value.message_type)
            held[_scalar(draw, key)].CopyFrom(random_message(draw, kind, depth + 1))


def _scalar(draw: Draw, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind in _RANGES:
        low, high = _RANGES[kind]
        found = draw.choice(INTEGERS) * draw.choice((1, 1, 1, -1))
        return found if low <= found <= high else draw.randint(low, high)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return draw.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw.choice((b"", b"\0\0\0\0", b"\x04\0\0\0text", garbage(draw, 40)))
    return draw.choice(TEXTS)


def changed_message(draw: Draw, good: Message) -> Message:
    """A good message one field of which, however deep, has another value."""
    made = type(good)()
    made.CopyFrom(good)
    at, depth = made, 0
    while True:
        fields: Sequence[Any] = at.DESCRIPTOR.fields
        field = draw.choice(fields)
        inner = field.message_type
        is_plain = inner is not None and not field.is_repeated
        if is_plain and at.HasField(field.name) and inner.fields and draw.random() < 0.8:
            at, depth = getattr(at, field.name), depth + 1
            continue
        if draw.random() < 0.3:
            at.ClearField(field.name)
        _fill(draw, at, field, depth)
        return made


def drawn_bytes(draw: Draw, kind: type[Message], goods: Sequence[Message]) -> bytes:
    """One message for a method that takes `kind`: garbage, mutated, random or changed."""
    way = draw.random()
    if way < 0.1:
        return garbage(draw)
    if way < 0.4 or not goods:
        sent = random_message(draw, kind)
    else:
        sent = changed_message(draw, draw.choice(goods))
    data = sent.SerializeToString()
    return mutated(draw, data) if way > 0.75 else data


Bend: TypeAlias = Callable[[Draw], object]
_BENDS: Final[Sequence[Bend]] = (
    lambda draw: None,
    lambda draw: draw.choice(INTEGERS) * draw.choice((1, -1)),
    lambda draw: draw.choice(FLOATS),
    lambda draw: draw.choice(TEXTS),
    lambda draw: garbage(draw, 40),
    lambda draw: [],
    lambda draw: {},
    lambda draw: draw.random() < 0.5,
)


def bent(draw: Draw, value: Any) -> Any:
    """Plain values (of msgspec.to_builtins) in which one, however deep, is another one, is gone or
    is there twice. Most bends keep the type, so that they get further than a schema."""
    if isinstance(value, Mapping) and value and draw.random() < 0.9:
        name = draw.choice(sorted(value))
        changed = dict(value)
        if draw.random() < 0.05:
            del changed[name]
        else:
            changed[name] = bent(draw, value[name])
        return changed
    if isinstance(value, list | tuple) and value and draw.random() < 0.9:
        at, items = draw.randrange(len(value)), list(value)
        match draw.randrange(8):
            case 0:
                del items[at]
            case 1:
                items.insert(at, items[at])
            case _:
                items[at] = bent(draw, items[at])
        return items
    return _bent_scalar(draw, value)


def _bent_scalar(draw: Draw, value: object) -> object:
    if draw.random() < 0.3:
        return draw.choice(_BENDS)(draw)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice((value + 1, value - 1, -value, draw.choice(INTEGERS)))
    if isinstance(value, float):
        return draw.choice(FLOATS)
    if isinstance(value, bytes):
        return mutated(draw, value)
    return draw.choice(TEXTS)


def packed(value: Any) -> bytes:
    """Plain values in MessagePack; numbers that it cannot hold make it garbage."""
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, TypeError):
        return b"\xc1"
