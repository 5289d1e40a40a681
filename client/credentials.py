"""How client and router authenticate each other: by a token, by certificates, or not at all.

Deadlines and retries are in `retries.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import grpc
import grpc.aio

from effuse.config.checks import is_loopback
from effuse.protos.rpc import near_options
from effuse.protos.tls import ChannelTls, TlsFiles

AUTHORIZATION: Final = "authorization"
TOKEN_VARIABLE: Final = "EFFUSE_TOKEN"
GRPC_SCHEME: Final = re.compile(r"(dns|ipv4|ipv6):(//[^/]*/)?")  # schemes of gRPC's targets

_MOST_BYTES: Final = 1 << 14  # of a token's file

Arguments = Sequence[tuple[str, str | int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Credentials of one client. Without `tls` everything travels in plain text, including the
    token: only for loopback.

    White space around a token is dropped, such as the line end of its file. Raises ValueError for a
    token that no call can carry, and TypeError for other types.
    """

    tls: TlsFiles | None = None  # no files given: the system's authorities
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, kind in (("tls", TlsFiles), ("token", str)):
            given = getattr(self, name)
            if given is not None and not isinstance(given, kind):
                expected = f"expected {kind.__name__}, got {type(given).__name__}"
                raise TypeError(f"{name}: {expected}")
        if self.token is None:
            return
        token = self.token.strip()
        object.__setattr__(self, "token", token)
        if not all("!" <= character <= "~" for character in token):
            raise ValueError("token: expected printable ASCII on one line")  # which is not shown

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of each call."""
        return () if self.token is None else ((AUTHORIZATION, f"Bearer {self.token}"),)

    def channel(self, target: str, arguments: Arguments) -> grpc.Channel:
        """A blocking channel; its user adds `metadata` to each call. Raises OSError for unusable
        certificates, and ValueError for a target like `read_target`.
        """
        target, tls, arguments = self._read(target, arguments)
        if tls is None:
            return grpc.insecure_channel(target, arguments)
        return grpc.secure_channel(target, tls.found, arguments)

    def aio_opener(self, target: str, arguments: Arguments) -> Callable[[], grpc.aio.Channel]:
        """A function that makes a channel like `channel`, for the event loop in which it is called.
        Raises now, like `channel`."""
        target, tls, arguments = self._read(target, arguments)
        if tls is None:
            return partial(grpc.aio.insecure_channel, target, arguments)
        return partial(grpc.aio.secure_channel, target, tls.found, arguments)

    def _read(self, target: str, arguments: Arguments) -> tuple[str, ChannelTls | None, Arguments]:
        """Target, certificates and arguments of a channel; without a proxy if the router is on this
        machine."""
        target, tls = read_target(target, self.tls)
        host = GRPC_SCHEME.sub("", target).rpartition(":")[0]
        is_near = is_loopback(host) or host in ("0.0.0.0", "[::]")  # for a client, this machine
        arguments = [*arguments, *near_options()] if is_near else arguments
        return target, None if tls is None else ChannelTls(tls), arguments


def read_target(target: str, tls: TlsFiles | None) -> tuple[str, TlsFiles | None]:
    """A target for gRPC and its certificates. In a URL, `http` is plain text, and `https` is TLS
    that trusts the system's authorities if `tls` is None; ports default to 80 and 443. Raises
    ValueError for a URL with more than a host and a port, and for `http` with certificates.
    """
    if not isinstance(target, str) or not target:
        raise ValueError(f"target: expected HOST:PORT, got {target!r}")
    scheme = target.partition("://")[0].lower()
    if scheme not in ("http", "https"):
        return target, tls
    url = urlsplit(target)
    try:
        port = url.port or (80 if scheme == "http" else 443)
    except ValueError:
        port = 0
    is_bare = url.path in ("", "/") and not (url.query or url.fragment or "@" in url.netloc)
    if not (url.hostname and port and is_bare):
        raise ValueError(f"target: expected {scheme}://HOST:PORT, got {target!r}")
    if scheme == "http" and tls is not None:
        raise ValueError(f"target: expected https:// with certificates, got {target!r}")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{host}:{port}", tls or (TlsFiles() if scheme == "https" else None)


def read_token(path: Path | None) -> str | None:
    """The token from a file, otherwise from the variable EFFUSE_TOKEN; None without either. Raises
    OSError, also for an invalid token.
    """
    where = TOKEN_VARIABLE if path is None else str(path)
    if path is None:
        given = os.environ.get(TOKEN_VARIABLE, "")
    else:
        with path.open("rb") as file:  # which may have no end
            given = file.read(_MOST_BYTES + 1).decode("utf-8-sig", "replace")
    token = given.strip()
    is_one = len(given) <= _MOST_BYTES and all("!" <= character <= "~" for character in token)
    if not is_one or (path and not token):
        raise OSError(f"{where}: expected one token, of ASCII characters without spaces")
    return token or None
