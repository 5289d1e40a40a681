"""What is wrong with a request: its findings, and the checks of names that several calls take.

Each finding names the field, the accepted form and what was found. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from effuse.config.decoding import Bounds
from effuse.protos.errors import FieldViolation, InvalidRequest

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
REQUEST_ID_FORM: Final = "1 to 128 characters of A-Z a-z 0-9 . _ : -"
MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+@-]{0,255}")
MODEL_NAME_FORM: Final = "1 to 256 characters of A-Z a-z 0-9 . _ : / + @ -, without '..' or '//'"


@dataclass(slots=True)
class Findings:
    """What is wrong with one request so far."""

    violations: list[FieldViolation] = field(default_factory=list)

    def add(self, name: str, expected: str, found: object) -> None:
        """One more violation."""
        self.violations.append(FieldViolation(name, f"expected {expected}, got {found}"))

    def raise_any(self) -> None:
        """Raises `InvalidRequest` with all of them, if there are any."""
        if self.violations:
            raise InvalidRequest(self.violations)

    def number(self, name: str, value: float, bounds: Bounds) -> None:
        """A number within `bounds`."""
        if value not in bounds:
            self.add(name, bounds.form, f"{value:g}" if isinstance(value, float) else value)

    def choice(self, name: str, value: int, names: Sequence[str]) -> None:
        """An enum value that has a name; protobuf lets unknown numbers pass."""
        if not 0 <= value < len(names):
            self.add(name, f"one of {', '.join(names)}", f"the unknown value {value}")

    def token_ids(
        self, name: str, ids: Sequence[int], vocab_size: int, refused: Mapping[int, str]
    ) -> None:
        """Ids of the vocabulary, but for `refused`, which says what those are; the first bad one
        is named."""
        if max(ids, default=0) >= vocab_size:
            at, bad = next((at, i) for at, i in enumerate(ids) if i >= vocab_size)
            self.add(f"{name}[{at}]", f"an id below the vocabulary size {vocab_size}", bad)
        elif not refused.keys().isdisjoint(ids):
            at, bad = next((at, i) for at, i in enumerate(ids) if i in refused)
            self.add(f"{name}[{at}]", "an id that stands for text", f"the {refused[bad]} id {bad}")


def check_request_id(request_id: str, findings: Findings) -> None:
    """A request id in the accepted form."""
    if not REQUEST_ID.fullmatch(request_id):
        findings.add("request_id", REQUEST_ID_FORM, shown(request_id))


def check_model_name(name: str, field_name: str, findings: Findings) -> None:
    """A model name in the accepted form; whether there is such a model is another question."""
    if not MODEL_NAME.fullmatch(name) or ".." in name or "//" in name:
        findings.add(field_name, MODEL_NAME_FORM, shown(name))


def shown(text: str, most: int = 40) -> str:
    """`text` as it may stand in an error: quoted, in ASCII, cut."""
    tail = "" if len(text) <= most else f"... ({len(text)} characters)"
    return ascii(text[:most]) + tail
