"""Shared parts of all commands: types of values, connections to a router, the settings of a
request, and texts of failed calls.

Each type refuses a bad value with the accepted form. Each command's own options are in its module.
"""

import argparse
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import grpc
import grpc.aio

from effuse.client.answer import StreamBroken
from effuse.client.client import Client
from effuse.client.credentials import GRPC_SCHEME, Credentials, read_target, read_token
from effuse.client.params import NAMES, NUMBERS, Params
from effuse.client.retries import DEFAULT_TARGET, NEVER_CONNECTED
from effuse.config.checks import redis_url as check_redis_url
from effuse.config.decoding import BIAS, Bounds
from effuse.config.flags import CommandError, add_switch, flag_of, make_parser, typed
from effuse.placement.records import check_name
from effuse.protos.errors import Draining, EffuseError, from_rpc_error, lost
from effuse.protos.tls import TlsFiles

Number = TypeVar("Number", int, float)


def command(name: str, about: str) -> argparse.ArgumentParser:
    """A parser for `effuse NAME`; flags must be written out in full, and help shows defaults."""
    return make_parser(f"effuse {name}", about)


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    form = f"a whole number of {least} or more" if most is None else f"{least} to {most}"
    return reader(int, form, lambda value: least <= value and (most is None or value <= most))


def number(
    least: float, most: float = math.inf, *, open_left: bool = False
) -> Callable[[str], float]:
    """A finite number in [least, most], or in (least, most] if `open_left`."""
    bracket = "(" if open_left else "["
    right = "infinity)" if math.isinf(most) else f"{most:g}]"

    def is_inside(value: float) -> bool:
        left = least < value if open_left else least <= value
        return math.isfinite(value) and left and value <= most

    return reader(float, f"a number in {bracket}{least:g}, {right}", is_inside)


def reader(
    kind: Callable[[str], Number], form: str, accepts: Callable[[Number], bool]
) -> Callable[[str], Number]:
    """The type of a flag whose number `accepts` accepts; `form` is the accepted form in words."""

    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {form}, got {text!r}") from None
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"expected {form}, got {text}")
        return value

    return parse


_TOKEN_ID = whole(0, 2**32 - 1)  # the range of the wire


directory: Final = typed(Path, "a directory", Path.is_dir)
file: Final = typed(Path, "a file", lambda path: path.exists() and not path.is_dir())
"""A pipe also counts."""
new_file: Final = typed(
    Path,
    "a file in an existing directory",
    lambda path: path.parent.is_dir() and not path.is_dir(),
)


def redis_url(text: str) -> str:
    try:
        check_redis_url("redis_url", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None
    return text


def fleet_name(given: str) -> str:
    try:
        return check_name("fleet", given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def text(given: str) -> str:
    """Text that can be sent. Words that are not UTF-8 are read in the locale's encoding."""
    try:
        return os.fsencode(given).decode()
    except UnicodeError:
        if is_unicode(given):
            return given
        raise argparse.ArgumentTypeError(f"expected UTF-8 text, got {given!a}") from None


def is_unicode(given: str) -> bool:
    """Whether the text has no lone surrogate, which UTF-8 cannot encode."""
    return not any("\ud800" <= character <= "\udfff" for character in given)


def token_ids(given: str) -> list[int]:
    parts = given.split(",")
    if not all(map(str.strip, parts)):
        raise argparse.ArgumentTypeError(f"expected ids with commas between them, got {given!r}")
    return [int(_TOKEN_ID(one)) for one in parts]


def seconds(given: str) -> float:
    """A time above 0, at most a week: gRPC treats a far longer one as no limit at all."""
    return number(0, 604_800, open_left=True)(given)


def target(text: str) -> str:
    """A router's address: HOST:PORT, an http or https URL, or one with a scheme of gRPC's own."""
    try:
        address, _ = read_target(text, None)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("target: ")) from error
    scheme, _, rest = address.partition("://")
    if rest and not GRPC_SCHEME.match(address):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT without {scheme}://, got {text!r}")
    host, _, port = GRPC_SCHEME.sub("", address).rpartition(":")
    is_host = bool(re.fullmatch(r"[^\s:/\[\]]+|\[[^\s/\[\]]+\]", host))
    if not (is_host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return text


def add_router(
    parser: argparse.ArgumentParser,
    default: str | None = DEFAULT_TARGET,
    about: str = "the router",
    *,
    has_timeout: bool = False,
) -> None:
    """Adds the flags of a command that calls a router. `has_timeout`: also a time limit."""
    if has_timeout:
        about_time = "longest time for each answer, in seconds"
        parser.add_argument("--timeout", type=seconds, default=5.0, metavar="S", help=about_time)
    parser.add_argument("--target", type=target, default=default, metavar="HOST:PORT", help=about)
    group = parser.add_argument_group("TLS and token of the connection to the router")
    add = group.add_argument
    add_switch(group, "--tls", "use TLS and trust the system's certificate authorities")
    add("--tls-ca", type=file, metavar="FILE",
        help="use TLS and trust these PEM certificates (default: the system's)")  # fmt: skip
    add("--tls-cert", type=file, metavar="FILE",
        help="PEM certificate of this client (default: none)")  # fmt: skip
    add("--tls-key", type=file, metavar="FILE",
        help="PEM key of that certificate (default: none)")  # fmt: skip
    add("--token-file", type=file, metavar="FILE",
        help="file that holds the token (default: the variable EFFUSE_TOKEN)")  # fmt: skip


def credentials_of(parser: argparse.ArgumentParser, found: argparse.Namespace) -> Credentials:
    """The credentials from these flags; bad ones end the process with status 2."""
    if (found.tls_cert is None) != (found.tls_key is None):
        parser.error("--tls-cert, --tls-key: expected both or neither")
    speaks_tls = found.tls or found.tls_ca or found.tls_cert
    files = TlsFiles(cert=found.tls_cert, key=found.tls_key, ca=found.tls_ca)
    try:
        if speaks_tls:
            files.check()
        token = read_token(found.token_file)
        if target := vars(found).get("target"):
            read_target(target, files if speaks_tls else None)
        return Credentials(tls=files if speaks_tls else None, token=token)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def add_knobs(parser: argparse.ArgumentParser) -> None:
    for one in fields(Params):
        about = one.metadata["about"]
        text = about if "(default: " in about else f"{about} (default: the model's)"
        flag = "--stop-token-id" if one.name == "stop_token_ids" else flag_of(one.name)
        kind = _kind_of(one.name, one.metadata["form"])
        parser.add_argument(flag, dest=one.name, help=text, **kind)


def _kind_of(name: str, metavar: str) -> dict[str, Any]:
    """The arguments of `add_argument` for a setting."""
    if name in NAMES:
        return {"choices": NAMES[name]}
    if name in NUMBERS:
        return {"type": within(NUMBERS[name]), "metavar": metavar}
    if name in _REPEATED:
        return {"action": "append", "default": [], "type": _REPEATED[name], "metavar": metavar}
    if name in ("model", "request_class"):
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
    try:
        given = {one.name: getattr(found, one.name) for one in fields(Params)}
        return Params(**{**given, "logit_bias": dict(found.logit_bias)})
    except ValueError as error:
        parser.error(str(error))


_TOKEN: Final = "--token-file or EFFUSE_TOKEN"


@contextmanager
def calling(target: str, accepts: str = _TOKEN, *, has_answered: bool = False) -> Iterator[None]:
    """Turns the failure of a call to `target`, a router by default, into a CommandError. `accepts`
    names the flags of the credentials that it accepts. `has_answered`: an earlier call."""
    try:
        yield
    except (EffuseError, grpc.aio.AioRpcError) as error:
        told = explain(error, target, accepts, has_answered=has_answered)
        raise CommandError(told) from error
    except StreamBroken as error:
        raise CommandError(str(error)) from error


def client_of(target: str, credentials: Credentials, timeout_s: float) -> Client:
    """A client for a look at a fleet, which tries every call once."""
    shown = credentials
    return Client(target, timeout_s=timeout_s, max_attempts=1, tls=shown.tls, token=shown.token)


@contextmanager
def requests_to(target: str, credentials: Credentials, timeout_s: float) -> Iterator[Client]:
    """A client for requests, which outlive their router. A look comes first, so that a fleet that
    is not there is reported at once. Raises CommandError."""
    with (
        calling(target),
        client_of(target, credentials, timeout_s) as look,
        suppress(Draining),  # another router, or the next one, takes the requests
    ):
        look.models()
    shown = credentials
    with Client(target, timeout_s=timeout_s, tls=shown.tls, token=shown.token) as client:
        yield client


def explain(
    error: EffuseError | grpc.aio.AioRpcError,
    target: str,
    accepts: str = _TOKEN,
    *,
    has_answered: bool = False,
) -> str:
    """Why the call to `target` failed, on one line, with a remedy, for `calling`."""
    call = error.__cause__ if isinstance(error, EffuseError) else error
    found = error if isinstance(error, EffuseError) else from_rpc_error(error, target)
    code, text = found.code, str(found)
    if isinstance(call, grpc.RpcError):
        status = cast("grpc.aio.AioRpcError", call)
        if str(from_rpc_error(status, target)).endswith(lost(status.code())):
            code, details = status.code(), status.details() or "no details"
            text = _lost(code, details, target, has_answered=has_answered)
    hint = f" ({accepts})" if code is grpc.StatusCode.UNAUTHENTICATED else ""
    return f"{code.name}: {text}{hint}"


def _lost(code: grpc.StatusCode, details: str, target: str, *, has_answered: bool) -> str:
    """Why no router answered; `details` are the gRPC library's."""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return (
            f"the server on {target} is not a router of effuse, or not of this version: {details}"
        )
    if code is not grpc.StatusCode.UNAVAILABLE:
        return details
    if "WRONG_VERSION_NUMBER" in details:
        return f"{target} does not speak TLS: leave out --tls and all flags that begin with --tls-"
    if "Hostname Verification" in details:
        return f"the certificate of {target} is for another host"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"the certificate of {target} is not trusted (--tls-ca)"
    if "handshake" in details:
        return f"no TLS connection to {target}: {details}"
    reason = details.rpartition(": ")[2].removesuffix("]")
    if "Failed parsing HTTP/2" in details:
        return f"the server on {target} is not a router of effuse"
    if details.startswith(NEVER_CONNECTED) and "closed" not in reason and "reset" not in reason:
        return (
            f"no router answers on {target} ({reason}); "
            "'effuse up' starts a fleet, --target names another one"
        )
    doubt = "" if has_answered else ", or does it need TLS (--tls-ca)"
    return f"{target} closed the connection ({reason}): did the router end{doubt}?"
