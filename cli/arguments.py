"""Types of command-line values: each refuses a bad value with the accepted form.

Shared by all commands; holds no option of any one of them.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import grpc

from effuse.client.credentials import Credentials, read_token
from effuse.config.checks import is_redis_url, without_password
from effuse.config.checks import redis_url as check_redis_url
from effuse.config.flags import add_switch, make_parser
from effuse.placement.keys import check_name
from effuse.protos.tls import TlsFiles


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
    """A Redis's address, without a password."""
    if not is_redis_url(text):
        shown = without_password(text)
        raise argparse.ArgumentTypeError(f"expected redis://HOST:PORT/DB, got {shown!r}")
    try:
        check_redis_url("redis_url", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None
    return text


def fleet_name(given: str) -> str:
    """A fleet's name."""
    try:
        return check_name("fleet", given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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


def add_credentials(parser: argparse.ArgumentParser) -> None:
    """Flags of a command that asks a router."""
    group = parser.add_argument_group("what the router is known by, and shown")
    add = group.add_argument
    add_switch(group, "--tls", "speak TLS, and trust the system's authorities")
    add("--tls-ca", type=file, metavar="FILE",
        help="speak TLS, and trust these PEM certificates (default: the system's)")  # fmt: skip
    add("--tls-cert", type=file, metavar="FILE",
        help="PEM certificate to show (default: none)")  # fmt: skip
    add("--tls-key", type=file, metavar="FILE", help="PEM key of it (default: none)")
    add("--token-file", type=file, metavar="FILE",
        help="file with the token to show (default: EFFUSE_TOKEN of the environment)")  # fmt: skip


def credentials_of(parser: argparse.ArgumentParser, found: argparse.Namespace) -> Credentials:
    """What these flags say; ends with status 2 where that cannot be."""
    if (found.tls_cert is None) != (found.tls_key is None):
        parser.error("--tls-cert, --tls-key: expected both or none")
    speaks_tls = found.tls or found.tls_ca or found.tls_cert
    files = TlsFiles(cert=found.tls_cert, key=found.tls_key, ca=found.tls_ca)
    try:
        if speaks_tls:
            files.check()
        token = read_token(found.token_file)
        return Credentials(tls=files if speaks_tls else None, token=token)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def with_hint(code: grpc.StatusCode, told: str) -> str:
    """How a call failed, on one line, and which flags a router may ask for."""
    hint = ""
    if code is grpc.StatusCode.UNAUTHENTICATED:
        hint = " (--token-file or EFFUSE_TOKEN)"
    elif "Socket closed" in told:
        hint = " (is it TLS that the router speaks? --tls-ca)"
    elif told.endswith("broke off with UNAVAILABLE"):
        hint = " (does a router listen there, and is it TLS that it speaks? --tls-ca)"
    return f"{code.name}: {told}{hint}"
