"""How Redis is reached: user, password, and whom to trust where it speaks TLS.

None of it is in an address, which stands on command lines and in logs. A file is read anew for each
connection, so that a password changes without a restart.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from redis.credentials import CredentialProvider

VARIABLE: Final = "EFFUSE_REDIS_CREDENTIALS"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAccess:
    """For one process. `credentials`: a file with `user:password`, or a password alone, which is
    the default user's; where absent the environment's EFFUSE_REDIS_CREDENTIALS says the same.
    `ca`: PEM certificates that sign that of a `rediss://` server; the system's where absent."""

    credentials: Path | None = None
    ca: Path | None = None

    def arguments(self, url: str) -> dict[str, Any]:
        """For `from_url` of redis's clients, of both kinds."""
        found: dict[str, Any] = {}
        if self.credentials is not None or os.environ.get(VARIABLE):
            found["credential_provider"] = _Credentials(self.credentials)
        if self.ca is not None and url.startswith("rediss://"):
            found["ssl_ca_certs"] = str(self.ca)
        return found


class _Credentials(CredentialProvider):
    def __init__(self, path: Path | None) -> None:
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Raises OSError, which counts as no answer of Redis's."""
        given = os.environ[VARIABLE] if self._path is None else self._path.read_text()
        user, colon, password = given.strip().partition(":")
        return (user, password) if colon else (user,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same: a file this small is read at once. redis-py's own warns at each connection."""
        return self.get_credentials()
