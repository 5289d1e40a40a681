"""Certificates from files, for servers and for channels; read again when the files change.

gRPC does the TLS. What is here decides which files it gets, and keeps those it has where new ones
are unreadable or do not belong together, as in the midst of a renewal.
"""

from __future__ import annotations

import codecs
import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import grpc

LOG: Final = logging.getLogger(__name__)

_CERTIFICATE: Final = b"CERTIFICATE"
_KEY: Final = b"PRIVATE KEY"
_NOT_NOW: Final = (9, 10)  # OpenSSL's codes of a certificate before and after its time

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
        """Raises OSError that names the file at fault: one of another kind, a key of another
        certificate, a certificate that is not valid now."""
        if self.cert is not None and self.key is not None:
            _expect(self.cert, _CERTIFICATE)
            _expect(self.key, _KEY)
            _check_pair(self.cert, self.key)
        if self.ca is not None:
            _expect(self.ca, _CERTIFICATE)
            _trusting(self.ca)

    def check_authority(self) -> None:
        """Raises OSError where `ca` has no certificate of an authority."""
        if self.ca is not None and not _trusting(self.ca).get_ca_certs():
            raise OSError(f"{self.ca}: expected certificates of an authority, found others")

    def check_signature(self) -> None:
        """Raises OSError where `ca` did not sign `cert`, as it does in a fleet."""
        if self.cert is None or self.key is None or self.ca is None:
            return
        try:
            _shake_hands(_showing(self.cert, self.key), _trusting(self.ca))
        except ssl.SSLCertVerificationError as error:
            why = error.verify_message
            raise OSError(f"{self.cert} is not signed by {self.ca}: {why}") from error


def _expect(path: Path, kind: bytes) -> None:
    """Raises OSError where a file has no PEM block of this kind."""
    found = path.read_bytes()
    if found.startswith(codecs.BOM_UTF8):  # gRPC finds nothing behind it
        raise OSError(f"{path}: expected no byte-order mark before the PEM text")
    if kind in found:
        return
    others = [one.decode().lower() for one in (_CERTIFICATE, _KEY) if one in found]
    has = f"a {others[0]}" if others else "none"
    raise OSError(f"{path}: expected a PEM {kind.decode().lower()}, found {has}")


def _check_pair(cert: Path, key: Path) -> None:
    try:
        _shake_hands(_showing(cert, key), _trusting(cert))
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _NOT_NOW:  # each reader of the certificate judges others
            raise OSError(f"{cert}: {error.verify_message}") from error


def _showing(cert: Path, key: Path) -> ssl.SSLContext:
    """A server's side. Raises OSError that names the file at fault."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, _no_password)
    except ssl.SSLError as error:
        if "MISMATCH" in str(error):
            raise OSError(f"{key} is not the key of the certificate in {cert}") from error
        raise OSError(f"{cert} or {key} cannot be used: {error}") from error
    except OSError as error:
        raise OSError(f"{key}: {error}") from error
    return context


def _trusting(ca: Path) -> ssl.SSLContext:
    """A client's side, which trusts each certificate of a file. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # as gRPC, on every Python
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise OSError(f"{ca} cannot be used: {error}") from error
    return context


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """A handshake in memory. Raises SSLCertVerificationError where the client does not trust."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLCertVerificationError:
            raise
        except ssl.SSLError:  # it waits for the other end, or OpenSSL cannot do what gRPC can
            continue


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
        files.check_authority()
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
