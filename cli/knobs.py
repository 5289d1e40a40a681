"""The settings of a request as flags. The server chooses the value of a flag that is not given."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

from effuse.cli.arguments import reader, text, whole
from effuse.client.params import NAMES, NUMBERS, Params
from effuse.config.decoding import BIAS, Bounds
from effuse.config.flags import flag_of

_TOKEN_ID = whole(0, 2**32 - 1)  # the range of the wire


def add_knobs(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every setting."""
    for one in fields(Params):
        about = one.metadata["about"]
        told = about if "(default: " in about else f"{about} (default: the model's)"
        flag = "--stop-token-id" if one.name == "stop_token_ids" else flag_of(one.name)
        kind = _kind_of(one.name, one.metadata["form"])
        parser.add_argument(flag, dest=one.name, help=told, **kind)


def _kind_of(name: str, metavar: str) -> dict[str, Any]:
    """The arguments of `add_argument` for a setting."""
    if name in NAMES:
        return {"choices": NAMES[name]}
    if name in NUMBERS:
        return {"type": within(NUMBERS[name]), "metavar": metavar}
    if name in _REPEATED:
        return {"action": "append", "default": [], "type": _REPEATED[name], "metavar": metavar}
    if name == "model":
        return {"type": text, "metavar": metavar}
    return {"action": "store_true", "default": None}


def within(bounds: Bounds) -> Callable[[str], float]:
    """The type of a flag whose number lies within `bounds`."""
    kind: type[float] = int if bounds.is_whole else float
    return reader(kind, bounds.form, bounds.__contains__)


def _bias(given: str) -> tuple[int, float]:
    token, equals, added = given.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected ID=X, got {given!r}")
    return int(_TOKEN_ID(token)), within(BIAS)(added)


_REPEATED: Final[Mapping[str, Callable[[str], Any]]] = {
    "stop": text, "stop_token_ids": _TOKEN_ID, "logit_bias": _bias
}  # fmt: skip
"""Settings whose flags may be given several times."""


def params_from(parser: argparse.ArgumentParser, found: argparse.Namespace) -> Params:
    """The settings from the parsed flags; ends with status 2 if they contradict each other."""
    try:
        given = {one.name: getattr(found, one.name) for one in fields(Params)}
        return Params(**{**given, "logit_bias": dict(found.logit_bias)})
    except ValueError as error:
        parser.error(str(error))
