"""Certificates from files, for servers and for channels; read again when the files change.

gRPC does the TLS. What is here decides which files it gets, and keeps those it has where new ones
are unreadable or do not belong together, as in the midst of a renewal.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import grpc

LOG: Final = logging.getLogger(__name__)

T = TypeVar("T")
Stamp = tuple[tuple[int, int, int], ...]
"""Device, inode and time of change of each file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of one end of a connection. `ca` signs the other end: None trusts, of a client, the
    system's authorities, and asks, of a server, no certificate of clients.

    Raises ValueError for a certificate without a key, or a key without one; a file may hold both.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):  # gRPC ends the process at that
            found = "cert" if self.key is None else "key"
            raise ValueError(f"expected cert and key, or neither, got {found} alone")

    def stamp(self) -> Stamp:
        """Changes with the files. Raises OSError where one is missing."""
        states = [path.stat() for path in (self.cert, self.key, self.ca) if path is not None]
        return tuple((one.st_dev, one.st_ino, one.st_mtime_ns) for one in states)

    def check(self) -> None:
        """Raises OSError for files that are no certificates, or a key of another one."""
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, _no_password)
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except OSError as error:  # ssl.SSLError is one
            named = ", ".join(str(one) for one in (self.cert, self.key, self.ca) if one)
            raise OSError(f"certificates ({named}) cannot be used: {error}") from error


def _no_password() -> str:
    raise OSError("the key is encrypted; expected one without a password")


class Renewal:
    """Reads files when they have changed and can be used."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises OSError where they cannot be used now."""
        self._files = files
        self._trouble = ""  # with the files, as it was told
        self._stamp = files.stamp()
        files.check()

    def newest(self, read: Callable[[], T]) -> T | None:
        """What `read` makes of them, once for each change to files that can be used; others are
        logged, once, and looked at again."""
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                self._trouble = ""
                return None
            self._files.check()
            found = read()
        except OSError as error:
            if str(error) != self._trouble:  # not at each look
                LOG.warning("keeping the certificates that were read before: %s", error)
            self._trouble = str(error)
            return None
        self._stamp, self._trouble = stamp, ""
        LOG.info("took new certificates from %s", self._files.cert or self._files.ca)
        return found


class ServerTls:
    """Credentials of a server, which takes new files at the next handshake after a change."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises OSError where they cannot be used."""
        self._files = files
        self._renewal = Renewal(files)
        self._first = self._configuration()

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`. Clients need a certificate where the files name who signs it."""
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            self._changed,  # type: ignore[arg-type]  # None is documented, and not in the types
            require_client_authentication=self._files.ca is not None,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What is new; None keeps what is there. Runs in a thread of gRPC at each handshake."""
        return self._renewal.newest(self._configuration)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        assert self._files.key is not None and self._files.cert is not None
        pair = (self._files.key.read_bytes(), self._files.cert.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], _read(self._files.ca))


class ChannelTls:
    """Credentials of channels. A channel keeps those that it was made with: `version` counts the
    files that were read since, for who would rather make a new one."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises OSError where they cannot be used."""
        self._files = files
        self._renewal = Renewal(files)
        self.credentials = self._read_all()
        self.version = 0

    def look(self) -> None:
        """Reads the files again if they have changed."""
        found = self._renewal.newest(self._read_all)
        if found is not None:
            self.credentials = found
            self.version += 1

    def _read_all(self) -> grpc.ChannelCredentials:
        files = self._files
        trusted = _system_authorities() if files.ca is None else _read(files.ca)
        return grpc.ssl_channel_credentials(trusted, _read(files.key), _read(files.cert))


def _system_authorities() -> bytes | None:
    """PEM certificates of those that this system trusts, where OpenSSL looks for them. None, for
    those that gRPC brings along, where there are none, or where gRPC's own variable names some."""
    paths = ssl.get_default_verify_paths()
    if os.environ.get("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"):
        return None
    if paths.cafile is not None:
        return Path(paths.cafile).read_bytes() or None
    hashed = sorted(Path(paths.capath).glob("[0-9a-f]*.[0-9]")) if paths.capath else []
    return b"\n".join(path.read_bytes() for path in hashed if path.is_file()) or None


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
