"""Typed reading of a JSON configuration, with errors that name the file, the key and the accepted
form.

Knows JSON but no models, except how releases spell the rotary base.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from effuse.config.extras import pointer_problem

_MOST_INTEGER: Final = 2**31 - 1
# All names of layers and experts are built before one is looked up.
_MOST_LAYERS: Final = 4096
_MOST_EXPERTS: Final = 2**17  # of all layers together
_MOST_NUMBER: Final = sys.float_info.max


class CheckpointError(ValueError):
    """A checkpoint or adapter directory is incomplete, contradictory or not supported; the message
    names the file and the key or tensor."""


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """One JSON object and its file. A null counts as a missing key.

    `asked` has the keys that a reader used.
    """

    path: Path
    values: dict[str, object]
    asked: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def read(cls, path: Path) -> ConfigKeys:
        """Raises CheckpointError if the file is missing or is not a JSON object."""
        return cls(path, read_json_object(path))

    def error(self, key: str, problem: str) -> CheckpointError:
        """The exception that names this file and `key`."""
        return CheckpointError(f"{self.path}: {key}: {problem}")

    def integer(self, key: str, *, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`, with 32 bits."""
        value = self._value(key, default, "an integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"expected an integer of at least {least}, found {value!r}")
        if value > _MOST_INTEGER:
            form = f"an integer of at least {least}, at most {_MOST_INTEGER}"
            raise self.error(key, f"expected {form}, found {value!r}")
        return value

    def num_layers(self, key: str) -> int:
        """The number of layers, within a plausible limit."""
        value = self.integer(key)
        if value > _MOST_LAYERS:
            raise self.error(key, f"expected at most {_MOST_LAYERS} layers, found {value}")
        return value

    def num_experts(self, key: str) -> int:
        """The number of experts in a layer, within a plausible limit for all layers."""
        value, num_layers = self.integer(key), self.num_layers("num_hidden_layers")
        most = _MOST_EXPERTS // num_layers
        if value > most:
            form = f"at most {most} experts in each of {num_layers} layers"
            raise self.error(key, f"expected {form}, found {value}")
        return value

    def number(self, key: str) -> float:
        """A finite number above zero."""
        value = self._value(key, None, "a number")
        is_number = not isinstance(value, bool)
        if is_number and isinstance(value, int | float) and 0 < value <= _MOST_NUMBER:
            return float(value)
        raise self.error(key, f"expected a number above 0, found {value!r}")

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {value!r}")
        return value

    def text(self, key: str) -> str:
        value = self._value(key, None, "a string")
        if not isinstance(value, str):
            raise self.error(key, f"expected a string, found {value!r}")
        return value

    def strings(self, key: str, *, required: bool = True) -> tuple[str, ...]:
        value = self._value(key, None if required else [], "a list of strings")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"expected a list of strings, found {value!r}")
        return tuple(value)

    def token_ids(self, key: str, *, required: bool = True) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.stated(key)
        if value is None and not required:
            return ()
        ids = value if isinstance(value, list) else [self._value(key, None, "a token id")]
        if not ids or not all(type(token) is int for token in ids):
            raise self.error(key, f"expected a token id or a list of them, found {value!r}")
        return tuple(ids)

    def only(self, key: str, accepted: tuple[object, ...]) -> None:
        """Refuse every value but the `accepted` ones; a None among them lets the key be missing."""
        value = self.stated(key)
        if not any(type(value) is type(one) and value == one for one in accepted):
            wanted = " or ".join("missing" if one is None else json.dumps(one) for one in accepted)
            raise self.error(key, f"{json.dumps(value)} is not supported; accepted: {wanted}")

    def every(self, key: str, accepted: str) -> None:
        """Refuse a list with other elements than `accepted`; the key may be missing."""
        value = self.stated(key)
        if value is None:
            return
        if not isinstance(value, list) or any(one != accepted for one in value):
            raise self.error(key, f"{value!r} is not supported; accepted: only {accepted!r}")

    def rope_theta(self) -> float:
        """The rotary base, from `rope_theta` or the newer `rope_parameters`; no scaling."""
        for place in self.rope_places():
            if place.values.get("rope_theta") is not None:
                return place.number("rope_theta")
        return self.number("rope_theta")

    def rope_places(self) -> list[ConfigKeys]:
        """The places of rotary numbers, by precedence: `rope_scaling`, then `rope_parameters`, each
        directly or by kinds of layers, then the top.
        """
        places: list[ConfigKeys] = []
        for name in ("rope_scaling", "rope_parameters"):
            nested = self.values.get(name)
            if nested is None:
                continue
            if not isinstance(nested, dict):
                raise self.error(name, f"expected an object, found {nested!r}")
            by_kind = nested.get("full_attention")
            nested = by_kind if isinstance(by_kind, dict) else nested
            kind = nested.get("rope_type", nested.get("type", "default"))
            if kind != "default":
                raise self.error(name, f"rope type {kind!r} is not supported; accepted: 'default'")
            places.append(ConfigKeys(self.path, nested))
        return [*places, self]

    def stated(self, key: str) -> object:
        """A value of any kind, None if it is missing."""
        self.asked.add(key)
        return self.values.get(key)

    def _value(self, key: str, default: object, wanted: str) -> object:
        value = self.stated(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, f"missing; expected {wanted}")
        return value


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object in `path`; raises CheckpointError if there is none."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # including integers of thousands of digits
        problem = pointer_problem(path) or f"not JSON: {error}"
        raise CheckpointError(f"{path}: {problem}") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(parsed).__name__}")
    return parsed
