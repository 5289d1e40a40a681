"""How a process reaches Redis: servers, user, password and authorities; and why it gets no answer,
in one line.

User, password and authorities are not in the address, because command lines and logs show
addresses. Each connection reads the file again, so that a password can change without a restart.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeAlias, cast

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    ClusterError,
    InvalidResponse,
    MovedError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from effuse.config.access import Access
from effuse.config.checks import RedisServers

Client: TypeAlias = Redis | RedisCluster
CREDENTIALS_VARIABLE: Final = "EFFUSE_REDIS_CREDENTIALS"
RIGHTS: Final = "-@all +@read +@write +@scripting +@connection +time"
"""The rights of a fleet's user, in Redis's own form: only those that the fleet needs. In a
cluster it also needs `+cluster|slots`."""
FAULTS: Final = (RedisError, RedisClusterException, OSError)
"""Errors of a client if Redis does not answer or refuses."""
_WRITE: Final = "return redis.call('set', KEYS[1], '', 'PX', 1)"
_FINAL: Final = (AuthenticationError, ResponseError, InvalidResponse)
_PASSING: Final = (ReadOnlyError, OutOfMemoryError, ClusterError)
"""Final errors that may pass once Redis's memory or role has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAccess:
    """How one process reaches Redis. `credentials`: a file with `user:password`, or only a
    password, which is the default user's. If absent, the variable EFFUSE_REDIS_CREDENTIALS has the
    same content. `sentinel_credentials`: the same for Sentinels. `ca`: PEM certificates of the
    authorities for a server with TLS; the system's if absent.
    """

    credentials: Path | None = None
    sentinel_credentials: Path | None = None
    ca: Path | None = None

    @classmethod
    def of(cls, config: Access) -> Self:
        return cls(
            credentials=config.redis_credentials,
            sentinel_credentials=config.sentinel_credentials,
            ca=config.redis_ca,
        )

    @property
    def has_credentials(self) -> bool:
        return self.credentials is not None or bool(os.environ.get(CREDENTIALS_VARIABLE))

    def arguments(self, url: str) -> dict[str, Any]:
        """For the connections of redis's clients to servers of a fleet."""
        found: dict[str, Any] = {}
        if self.has_credentials:
            found["credential_provider"] = _Credentials(self.credentials)
        if self.ca is not None and url.startswith("rediss"):
            found["ssl_ca_certs"] = str(self.ca)
        return found

    def connect(self, url: str, timeout_s: float, most_connections: int) -> Client:
        """A client of the server, of the primary that Sentinels name, or of the cluster at `url`.

        Each exchange with one server may take `timeout_s`, and none is repeated. Connects later;
        `close` closes it.
        """
        once: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
        }
        known = {**once, **self.arguments(url), "max_connections": most_connections}
        if (servers := RedisServers.of(url)) is None:
            return Redis.from_url(url, **known)
        if servers.has_tls:
            once["ssl"] = known["ssl"] = True
        if servers.service:
            if "ssl_ca_certs" in known:
                once["ssl_ca_certs"] = known["ssl_ca_certs"]
            if self.sentinel_credentials is not None:
                once["credential_provider"] = _Credentials(self.sentinel_credentials)
            untyped: Any = _Sentinels
            sentinels = untyped(servers.addresses, sentinel_kwargs=once)
            return cast(Redis, sentinels.master_for(servers.service, db=servers.database, **known))
        return RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in servers.addresses],
            dynamic_startup_nodes=False,  # nodes may move, and names lead to their new addresses
            require_full_coverage=False,  # a fleet uses one slot,
            reinitialize_steps=0,  # of which each redirection names the node
            **known,
        )

    def silence(self, url: str, fleet: str) -> Silence | None:
        """Asks a Redis once, a second for each question; None if the fleet may write there."""
        with ThreadPoolExecutor(1) as thread:  # the caller's may run an event loop
            return thread.submit(asyncio.run, self._silence(url, fleet)).result()

    async def _silence(self, url: str, fleet: str) -> Silence | None:
        client = self.connect(url, 1.0, 1)
        try:
            key = f"effuse:{{{fleet}}}:may-write"
            await client.execute_command("EVAL", _WRITE, 1, key)
        except FAULTS as error:
            cause = _cause(error)
            is_final = isinstance(cause, _FINAL) and not isinstance(cause, _PASSING)
            return Silence(reason_of(error, self), is_final)
        finally:
            await close(client)
        return None


async def close(client: Client) -> None:
    """Closes all connections of a client of `RedisAccess.connect`."""
    await client.aclose()
    if isinstance(client, Redis) and isinstance(client.connection_pool, SentinelConnectionPool):
        for one in client.connection_pool.sentinel_manager.sentinels:
            await one.aclose()


async def let_go(client: Client, timeout_s: float) -> None:
    """Closes connections to a server that was the primary when they were made, and may be cut off
    or a replica by now: its address, or Sentinel, leads elsewhere then.
    """
    if isinstance(client, Redis):  # a cluster redirects
        with suppress(*FAULTS, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await client.connection_pool.disconnect(inuse_connections=False)


class _Sentinels(Sentinel):
    """Names the primary of a service, or the reason why there is none."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        try:
            return cast(tuple[str, int], await super().discover_master(service_name))
        except MasterNotFoundError:
            asked = ("SENTINEL", "CKQUORUM", service_name)
            sentinels = cast(list[Any], self.sentinels)
            answers = await asyncio.gather(
                *(one.execute_command(*asked) for one in sentinels), return_exceptions=True
            )
        raise MasterNotFoundError(_no_primary(service_name, answers))


def _no_primary(service: str, answers: Sequence[object]) -> str:
    """The reason, from each Sentinel's answer or error about the quorum of a service."""
    refused = [one for one in answers if isinstance(one, AuthenticationError)]
    faults = [one for one in answers if isinstance(one, ResponseError)]
    if any(not isinstance(one, BaseException) for one in answers):
        return f"the primary of {service!r} is down, and the Sentinels have not replaced it yet"
    if faults:
        names = "No such master" in str(faults[0])
        return f"no Sentinel knows the service {service!r}" if names else f"Sentinel: {faults[0]}"
    if refused:
        return f"a Sentinel refuses --sentinel-credentials, or requires them ({refused[0]})"
    return f"no Sentinel answers ({answers[0]})"


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


def reason_of(error: BaseException, access: RedisAccess) -> str:
    """Why Redis does not answer, in one line that names the flag that helps."""
    error = _cause(error)
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, InvalidResponse):
        return f"the server there is not Redis ({text})"
    if isinstance(error, MovedError):
        return f"the server is a node of a cluster, which needs redis+cluster:// ({text})"
    if not isinstance(error, AuthenticationError):
        return text
    if not access.has_credentials:
        return "Redis needs a password: --redis-credentials names a file with user:password"
    return (
        "Redis refuses the user or the password of --redis-credentials (write a password that "
        "contains a colon as default:PASSWORD)"
    )


def _cause(error: BaseException) -> BaseException:
    """The answer of a node behind the error of a cluster's client, if there is one."""
    while isinstance(error, RedisClusterException):
        if (before := error.__cause__ or error.__context__) is None:
            break
        error = before
    return error
