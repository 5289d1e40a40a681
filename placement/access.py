"""How a process reaches Redis: user, password and authorities; and why it cannot, in one line.

User, password and authorities are not in the address, because command lines and logs show
addresses. Each connection reads the file again, so that a password can change without a restart.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    ClusterError,
    InvalidResponse,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.retry import Retry

CREDENTIALS_VARIABLE: Final = "EFFUSE_REDIS_CREDENTIALS"
RIGHTS: Final = "-@all +@read +@write +@scripting +@connection +time"
"""The rights of a fleet's user, in Redis's own form: only those that the fleet needs."""
_WRITE: Final = "return redis.call('set', KEYS[1], '', 'PX', 1)"
_FINAL: Final = (AuthenticationError, ResponseError, InvalidResponse)
_PASSING: Final = (ReadOnlyError, OutOfMemoryError, ClusterError)
"""Final errors that may pass once Redis's memory or role has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAccess:
    """How one process reaches Redis. `credentials`: a file with `user:password`, or only a
    password, which is the default user's. If absent, the variable EFFUSE_REDIS_CREDENTIALS has the
    same content. `ca`: PEM certificates of the authorities for a `rediss://` server; the system's
    if absent.
    """

    credentials: Path | None = None
    ca: Path | None = None

    @property
    def has_credentials(self) -> bool:
        """Whether a user or a password is given."""
        return self.credentials is not None or bool(os.environ.get(CREDENTIALS_VARIABLE))

    def arguments(self, url: str) -> dict[str, Any]:
        """For `from_url` of redis's clients, of both kinds."""
        found: dict[str, Any] = {}
        if self.has_credentials:
            found["credential_provider"] = _Credentials(self.credentials)
        if self.ca is not None and url.startswith("rediss://"):
            found["ssl_ca_certs"] = str(self.ca)
        return found

    def silence(self, url: str, fleet: str) -> Silence | None:
        """Asks a Redis once, a second for each question; None if the fleet may write there."""
        try:
            # Its own retries would take seconds, and would wait for a password to become right.
            once = {"socket_timeout": 1.0, "retry": Retry(NoBackoff(), 0), **self.arguments(url)}
            with redis.Redis.from_url(url, **once) as client:
                client.ping()
                client.eval(_WRITE, 1, f"effuse:{{{fleet}}}:may-write")
        except (redis.RedisError, OSError) as error:
            is_final = isinstance(error, _FINAL) and not isinstance(error, _PASSING)
            return Silence(told(error, self), is_final)
        return None


@dataclass(frozen=True, slots=True)
class Silence:
    """Why a Redis does not answer, and whether it never will."""

    why: str
    is_final: bool


class _Credentials(CredentialProvider):
    def __init__(self, path: Path | None) -> None:
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Raises OSError, which counts as a missing answer of Redis."""
        path, named = self._path, os.environb.get(CREDENTIALS_VARIABLE.encode(), b"")
        try:
            given = (named if path is None else path.read_bytes()).decode("utf-8-sig")
        except UnicodeDecodeError:  # its text has a byte of the password
            raise OSError("Redis's credentials: expected UTF-8") from None
        user, colon, password = given.strip().partition(":")
        return (user, password) if colon else (user,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same: a small file is read at once. redis-py's own version warns each time."""
        return self.get_credentials()


def told(error: Exception, access: RedisAccess) -> str:
    """Why Redis does not answer, in one line that names the flag that helps."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, InvalidResponse):
        return f"the server there is not Redis ({text})"
    if not isinstance(error, AuthenticationError):
        return text
    if not access.has_credentials:
        return "Redis needs a password: --redis-credentials names a file with user:password"
    return (
        "Redis refuses the user or the password of --redis-credentials (write a password that "
        "contains a colon as default:PASSWORD)"
    )
