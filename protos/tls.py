"""Certificates from files, for servers and for channels; read again when the files change.

gRPC does the TLS. This file decides which files gRPC gets. It keeps the previous ones while new
files are unreadable or do not match, for example during a renewal.
"""

from __future__ import annotations

import codecs
import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import grpc

LOG: Final = logging.getLogger(__name__)

_CERTIFICATE: Final = b"CERTIFICATE"
_KEY: Final = b"PRIVATE KEY"
_NOT_NOW: Final = (9, 10)  # OpenSSL's codes for a certificate before and after its validity

T = TypeVar("T")
Stamp = tuple[tuple[int, int, int], ...]
"""Device, inode and time of change of each file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of one end of a connection. `ca` signs the other end's certificate. None means that
    a client trusts the system's authorities, and that a server asks clients for no certificate.

    Raises ValueError for a certificate without a key or a key without a certificate; one file may
    have both.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):  # gRPC would abort the process
            found = "cert" if self.key is None else "key"
            raise ValueError(f"expected both cert and key, or neither, got only {found}")

    def stamp(self) -> Stamp:
        """A value that changes when the files do. Raises OSError if one is missing."""
        states = [path.stat() for path in (self.cert, self.key, self.ca) if path is not None]
        return tuple((one.st_dev, one.st_ino, one.st_mtime_ns) for one in states)

    def check(self) -> None:
        """Raises OSError that names the bad file: another kind of file, another certificate's key,
        or a certificate that is not valid now.
        """
        if self.cert is not None and self.key is not None:
            _expect(self.cert, _CERTIFICATE)
            _expect(self.key, _KEY)
            _check_pair(self.cert, self.key)
        if self.ca is not None:
            _expect(self.ca, _CERTIFICATE)
            _trusting(self.ca)

    def check_authority(self) -> None:
        """Raises OSError if `ca` has no certificate of an authority."""
        if self.ca is not None and not _trusting(self.ca).get_ca_certs():
            raise OSError(f"{self.ca}: expected certificates of an authority, found others")

    def check_signature(self) -> None:
        """Raises OSError if `ca` did not sign `cert`, as it must in a fleet."""
        if self.cert is None or self.key is None or self.ca is None:
            return
        try:
            _shake_hands(_showing(self.cert, self.key), _trusting(self.ca))
        except ssl.SSLCertVerificationError as error:
            why = error.verify_message
            raise OSError(f"{self.cert} is not signed by {self.ca}: {why}") from error


def check_name(files: TlsFiles, name: str) -> None:
    """Raises OSError unless two processes that both show these files, and expect this DNS name of
    each other, accept them."""
    if files.cert is None or files.key is None or files.ca is None:
        return
    server, client = _showing(files.cert, files.key), _trusting(files.ca)
    client.load_cert_chain(files.cert, files.key)
    client.check_hostname = True
    server.load_verify_locations(files.ca)
    server.verify_mode = ssl.CERT_REQUIRED
    be_lenient(server)
    try:
        _shake_hands(server, client, name)
    except ssl.SSLCertVerificationError as error:
        form = f"a certificate for the DNS name {name}, of servers and clients"
        raise OSError(f"{files.cert}: expected {form}: {error.verify_message}") from error


def _expect(path: Path, kind: bytes) -> None:
    """Raises OSError if a file has no PEM block of this kind."""
    found = path.read_bytes()
    if found.startswith(codecs.BOM_UTF8):  # gRPC finds nothing after a byte-order mark
        raise OSError(f"{path}: expected PEM text without a byte-order mark")
    if kind in found:
        return
    others = [one.decode().lower() for one in (_CERTIFICATE, _KEY) if one in found]
    has = f"a {others[0]}" if others else "none"
    raise OSError(f"{path}: expected a PEM {kind.decode().lower()}, found {has}")


def _check_pair(cert: Path, key: Path) -> None:
    try:
        _shake_hands(_showing(cert, key), _trusting(cert))
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _NOT_NOW:  # other errors depend on the verifier
            raise OSError(f"{cert}: {error.verify_message}") from error


def _showing(cert: Path, key: Path) -> ssl.SSLContext:
    """Credentials of a server. Raises OSError that names the bad file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, _no_password)
    except ssl.SSLError as error:
        if "MISMATCH" in str(error):
            raise OSError(f"{key} is not the key of the certificate in {cert}") from error
        raise OSError(f"cannot use {cert} or {key}: {error}") from error
    except OSError as error:
        raise OSError(f"{key}: {error}") from error
    return context


def _trusting(ca: Path) -> ssl.SSLContext:
    """Credentials of a client, which trusts each certificate in a file. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    be_lenient(context)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise OSError(f"cannot use {ca}: {error}") from error
    return context


def be_lenient(context: ssl.SSLContext) -> None:
    """Checks certificates like gRPC, on every version of Python."""
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None = None) -> None:
    """A handshake in memory, with a server of this name. Raises SSLCertVerificationError if either
    end refuses it."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_end = client.wrap_bio(down, up, server_hostname=name)
    ends = (client_end, server.wrap_bio(up, down, server_side=True))
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLCertVerificationError:
            raise
        except ssl.SSLError:  # it waits for the other end, or needs a feature that only gRPC has
            continue


def _no_password() -> str:
    raise OSError("expected a key without a password, got an encrypted one")


class Renewal(Generic[T]):
    """What was read from files, and is read again once they have changed and can be used."""

    def __init__(
        self, at: Path | None, stamp: Callable[[], Stamp], read: Callable[[], T], kept: str
    ) -> None:
        """at: where it is, for the log. kept: the line about files that cannot be used, with a
        place for the reason. Raises the errors of `read`."""
        self._at, self._stamp_now, self._read, self._kept = at, stamp, read, kept
        self._trouble = ""  # the last logged problem with the files
        self._stamp = stamp()
        self.found = read()
        self.version = 0
        """How often they were read since."""

    def look(self) -> bool:
        """Reads changed files; whether there is new content. Files that cannot be used are logged
        once and looked at again later.
        """
        try:
            stamp = self._stamp_now()
            if stamp == self._stamp:
                self._trouble = ""
                return False
            self.found = self._read()
        except (OSError, ValueError) as error:
            if str(error) != self._trouble:  # not at each look
                LOG.warning(self._kept, error)
            self._trouble = str(error)
            return False
        self._stamp, self._trouble = stamp, ""
        self.version += 1
        LOG.info("loaded %s, which has changed", self._at)
        return True


class Certificates(Renewal[T]):
    """The newest usable certificates in files, in the form that `load` makes of them."""

    def __init__(self, files: TlsFiles, load: Callable[[TlsFiles], T]) -> None:
        """Raises OSError if they cannot be used now."""

        def read() -> T:
            files.check()
            return load(files)

        kept = "keeping the previous certificates: %s"
        super().__init__(files.cert or files.ca, files.stamp, read, kept)


class ServerTls(Certificates[grpc.ServerCertificateConfiguration]):
    """Credentials of a server, which takes new files at the next handshake after a change."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises OSError if they cannot be used."""
        super().__init__(files, _server_configuration)
        files.check_authority()
        self._asks_clients = files.ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`. Clients need a certificate if the files name an authority."""
        return grpc.dynamic_ssl_server_credentials(
            self.found,
            self._changed,  # type: ignore[arg-type]  # None is documented, and not in the types
            require_client_authentication=self._asks_clients,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """New credentials, or None for no change. gRPC calls it at each handshake."""
        return self.found if self.look() else None


class ChannelTls(Certificates[grpc.ChannelCredentials]):
    """Credentials of channels. A channel keeps those with which it was made; `version` changes with
    them, for callers that want to make a new channel.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Raises OSError if they cannot be used."""
        super().__init__(files, _channel_credentials)


def _server_configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    assert files.key is not None and files.cert is not None
    pair = (files.key.read_bytes(), files.cert.read_bytes())
    return grpc.ssl_server_certificate_configuration([pair], _read(files.ca))


def _channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    trusted = _system_authorities() if files.ca is None else _read(files.ca)
    return grpc.ssl_channel_credentials(trusted, _read(files.key), _read(files.cert))


def _system_authorities() -> bytes | None:
    """PEM certificates that this system trusts, from OpenSSL's places. None, which means those that
    gRPC brings along, if there are none or gRPC's own variable names a file.
    """
    paths = ssl.get_default_verify_paths()
    if os.environ.get("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"):
        return None
    if paths.cafile is not None:
        return Path(paths.cafile).read_bytes() or None
    hashed = sorted(Path(paths.capath).glob("[0-9a-f]*.[0-9]")) if paths.capath else []
    return b"\n".join(path.read_bytes() for path in hashed if path.is_file()) or None


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
