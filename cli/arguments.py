"""Types of command-line values: each refuses a bad value with the accepted form.

Shared by all commands; holds no option of any one of them.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from effuse.config.checks import is_redis_url
from effuse.config.flags import make_parser


def command(name: str, about: str) -> argparse.ArgumentParser:
    """A parser for `effuse NAME`; flags must be written out in full, and help tells defaults."""
    return make_parser(f"effuse {name}", about)


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number from `least` to `most`, both included."""
    form = f"a whole number of {least} or more" if most is None else f"{least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {form}, got {text!r}") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"expected {form}, got {text}")
        return value

    return parse


def number(
    least: float, most: float = math.inf, *, open_left: bool = False
) -> Callable[[str], float]:
    """A finite number in [least, most], or in (least, most] where `open_left`."""
    bracket = "(" if open_left else "["
    right = "infinity)" if math.isinf(most) else f"{most:g}]"
    form = f"a number in {bracket}{least:g}, {right}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {form}, got {text!r}") from None
        inside = math.isfinite(value) and least <= value <= most
        if not inside or (open_left and value == least):
            raise argparse.ArgumentTypeError(f"expected {form}, got {text}")
        return value

    return parse


def directory(text: str) -> Path:
    """A directory that exists."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a directory, got {text!r}")
    return path


def file(text: str) -> Path:
    """A file that exists."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"expected a file, got {text!r}")
    return path


def new_file(text: str) -> Path:
    """A path to write to, in a directory that exists."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in an existing directory, got {text!r}")
    return path


def redis_url(text: str) -> str:
    """A Redis's address."""
    if not is_redis_url(text):
        raise argparse.ArgumentTypeError(f"expected redis://HOST:PORT/DB, got {text!r}")
    return text


def text(given: str) -> str:
    """Text that can be sent; other bytes of a command line arrive as lone surrogates."""
    if not is_unicode(given):
        raise argparse.ArgumentTypeError(f"expected UTF-8 text, got {given!a}")
    return given


def is_unicode(given: str) -> bool:
    """Whether it holds no lone surrogate, which UTF-8 cannot express."""
    return not any("\ud800" <= character <= "\udfff" for character in given)


def token_ids(given: str) -> list[int]:
    """Token ids, with commas between them."""
    parse = whole(0, 2**32 - 1)  # what the wire holds
    return [parse(one) for one in given.split(",")]


def seconds(given: str) -> float:
    """A time above 0, at most a week: gRPC takes far longer ones for none at all."""
    return number(0, 604_800, open_left=True)(given)


def target(text: str) -> str:
    """A router's address."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return text
