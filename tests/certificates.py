"""Certificates for tests, made by openssl: an authority, and certificates that it signs."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from effuse.protos.tls import TlsFiles

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


@dataclass(frozen=True, slots=True)
class Authority:
    """An authority in a directory of its own."""

    home: Path

    @property
    def cert(self) -> Path:
        return self.home / "ca.pem"

    @classmethod
    def make(cls, home: Path) -> Authority:
        home.mkdir(parents=True)
        made = cls(home)
        # Without its usage Python 3.13 trusts none.
        usage = ("-subj", "/CN=test", "-addext", "keyUsage=critical,keyCertSign")
        _openssl("req", "-x509", *_EC, *usage, "-keyout", made._key, "-out", made.cert)
        return made

    def below(self, home: Path) -> Authority:
        """An authority that this one has signed."""
        home.mkdir(parents=True)
        made = Authority(home)
        _openssl(
            "req", "-x509", *_EC, "-subj", "/CN=below", "-addext", "keyUsage=critical,keyCertSign",
            "-addext", "basicConstraints=critical,CA:TRUE", "-CA", self.cert, "-CAkey", self._key,
            "-keyout", made._key, "-out", made.cert,
        )  # fmt: skip
        return made

    @property
    def _key(self) -> Path:
        return self.home / "ca.key"

    def sign(self, name: str, *dns: str, usage: str | None = None) -> TlsFiles:
        """A pair of files `name`.pem and .key for these DNS names, written anew if they exist.
        usage: the only ends of connections that may show it, as OpenSSL names them."""
        cert, key, partial = (self.home / f"{name}.{end}" for end in ("pem", "key", "partial"))
        names = ",".join([*(f"DNS:{one}" for one in dns), "IP:127.0.0.1"])
        _openssl(
            "req", "-x509", *_EC, "-subj", f"/CN={name}", "-addext", f"subjectAltName={names}",
            "-addext", "basicConstraints=critical,CA:FALSE",
            *(("-addext", f"extendedKeyUsage={usage}") if usage else ()),
            "-CA", self.cert, "-CAkey", self._key, "-keyout", key, "-out", partial,
        )  # fmt: skip
        partial.replace(cert)
        return TlsFiles(cert=cert, key=key, ca=self.cert)

    def expired(self, name: str) -> TlsFiles:
        """A pair whose certificate was valid until yesterday."""
        files = self.sign(name)
        signing = ("-CA", self.cert, "-CAkey", self._key, "-set_serial", "7", "-days", "-1")
        request = self.home / f"{name}.request"
        _openssl("req", "-new", "-key", files.key, "-subj", f"/CN={name}", "-out", request)
        _openssl("x509", "-req", "-in", request, *signing, "-out", files.cert)
        return files


def _openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=30)
