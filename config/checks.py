"""Checks of a config's values, for `__post_init__`: each raises ValueError with flag and form.

Checks that need several values are in the config itself.
"""

import contextlib
import ipaddress
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import parse_qs, urlsplit

import msgspec

from effuse.config.flags import flag_of

MODEL_NAME_FORM: Final = "1 to 256 characters of A-Z a-z 0-9 . _ : / + @ -, without '..' or '//'"
_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+@-]{0,255}")
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec's decoders: its own, a string that is not UTF-8, values nested too deeply."""


def whole(name: str, value: int | None, least: int, most: int | None = None) -> None:
    """Refuses a number outside of `least` to `most`, and accepts None if the field allows it."""
    if value is None or (least <= value and (most is None or value <= most)):
        return
    form = f"{least} or more" if most is None else f"{least} to {most}"
    raise ValueError(f"{flag_of(name)}: expected {form}, got {value}")


def seconds(name: str, value: float, most: float | None = None) -> None:
    """Refuses a time that is not finite and above 0, or beyond `most`."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{flag_of(name)}: expected seconds above 0, got {value:g}")
    if most is not None and value > most:
        raise ValueError(f"{flag_of(name)}: expected at most {most:g} seconds, got {value:g}")


def choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuses a value that is none of the choices, because Python code may set any value."""
    if value not in choices:
        raise ValueError(f"{flag_of(name)}: expected one of {', '.join(choices)}, got {value!r}")


def directory(name: str, path: Path | None) -> None:
    if path is not None and not path.is_dir():
        raise ValueError(f"{flag_of(name)}: expected a directory, got {str(path)!r}")


def file(name: str, path: Path | None) -> None:
    if path is not None and not path.is_file():
        raise ValueError(f"{flag_of(name)}: expected a file, got {str(path)!r}")


def utf8(name: str, value: object) -> None:
    """Refuses a text or path with bytes that are no UTF-8: Python has surrogates for them."""
    if not isinstance(value, str | Path):
        return
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{flag_of(name)}: expected UTF-8, got {str(value)!r}") from None


def together(config: object, *names: str) -> None:
    given = [name for name in names if getattr(config, name) is not None]
    if given and len(given) < len(names):
        others = ", ".join(flag_of(name) for name in names if name not in given)
        raise ValueError(f"{flag_of(given[0])}: expected {others} with it")


def loopback(name: str, host: str, why: str, unless: str) -> None:
    """Refuses an address that other machines may reach; `unless` is the flag that allows it."""
    if not is_loopback(host):
        raise ValueError(
            f"{flag_of(name)}: expected a loopback address, because {why}, or {unless}; got "
            f"{host!r}"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. Of all names only localhost counts."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


_SERVER: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_SEVERAL: Final = {
    "sentinel": re.compile(r"redis(s?)\+sentinel://([^/]+)/([A-Za-z0-9._-]+)(?:/([0-9]{1,4}))?"),
    "cluster": re.compile(r"redis(s?)\+cluster://([^/]+)(?:/0?)?"),
}
_FORMS: Final = {
    "": "redis://host:port/db",
    "sentinel": "redis+sentinel://host:port,host:port/service/db",
    "cluster": "redis+cluster://host:port,host:port",
}


@dataclass(frozen=True, slots=True)
class RedisServers:
    """Sentinels that name the primary of a service, or nodes of a cluster."""

    addresses: tuple[tuple[str, int], ...]  # host and port
    has_tls: bool
    service: str = ""  # empty for a cluster
    database: int = 0

    @classmethod
    def of(cls, url: str) -> Self | None:
        """The servers that a URL names; None if it is no URL of several ones."""
        for kind, form in _SEVERAL.items():
            if found := form.fullmatch(url):
                tls, servers, *rest = found.groups()
                addresses = []
                for one in servers.split(","):
                    named = _SERVER.fullmatch(one)
                    port = int((named and named[2]) or (6379 if kind == "cluster" else 26379))
                    if named is None or not 0 < port < 65536:
                        return None
                    addresses.append((named[1].strip("[]"), port))
                service, database = rest or ("", None)
                return cls(tuple(addresses), bool(tls), service, int(database or 0))
        return None


def redis_url(name: str, url: str | None) -> None:
    """Refuses an address, if there is one, that is not a Redis URL or has a password in it: every
    user of the machine can read a command line."""
    if url is not None and not is_redis_url(url):
        several = re.match(r"rediss?\+(sentinel|cluster)://", url)
        form = f"expected {_FORMS[several[1] if several else '']}"
        if several and "@" in url:
            form += " without a user; --redis-credentials names a file with it"
        raise ValueError(f"{flag_of(name)}: {form}, got {without_password(url)!r}")
    if url is not None and _has_password(url):
        raise ValueError(
            f"{flag_of(name)}: expected a URL without a password; --redis-credentials names a file "
            "with it"
        )


def _has_password(url: str) -> bool:
    """Places where a Redis client looks for a password: before the host, and in parameters."""
    parts = urlsplit(url)
    return parts.password is not None or "password" in parse_qs(parts.query)


def without_password(url: str) -> str:
    """The URL as logs and errors may show it, however broken it is. If it may have a password, only
    the scheme is shown."""
    if "@" not in url and "?" not in url:
        return url
    scheme = re.match(r"rediss?(\+(sentinel|cluster))?|unix", url)
    return f"{scheme[0]}://.." if scheme else ".."


def is_redis_url(url: str) -> bool:
    """Whether a Redis client can be made for the URL."""
    if re.match(r"rediss?\+", url):
        return RedisServers.of(url) is not None
    with contextlib.suppress(ValueError):  # a bad port, or half of an IPv6 address
        parts = urlsplit(url)
        _ = parts.port
        is_database = re.fullmatch("/?[0-9]*", parts.path) is not None
        return url.startswith("unix://") or (
            url.startswith(("redis://", "rediss://")) and is_database
        )
    return False


def model_name(name: str, value: str | None) -> None:
    """Refuses a model's name, if there is one, that no client may use."""
    if value is not None and not is_model_name(value):
        raise ValueError(f"{flag_of(name)}: expected {MODEL_NAME_FORM}, got {value!r}")


def name_of_model(directory: Path) -> str:
    """The name of the model in a directory: ORG/NAME of a snapshot in the Hugging Face cache,
    `models--ORG--NAME/snapshots/HASH`, else the directory's own. Links are followed."""
    resolved = directory.resolve()
    for path in (directory.absolute(), resolved):
        if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
            cached = path.parents[1].name.removeprefix("models--")
            return as_model_name(cached.replace("--", "/", 1))
    return as_model_name(resolved.name)


def as_model_name(text: str) -> str:
    """A model's name from that of its directory, which may have characters that are not allowed."""
    plain = re.sub(r"[^A-Za-z0-9._:+@-]+", "-", text)
    plain = re.sub(r"\.{2,}", ".", plain).strip("._:+@-")
    return text if is_model_name(text) else plain[:256] or "model"


def is_model_name(text: str) -> bool:
    return bool(_MODEL_NAME.fullmatch(text)) and ".." not in text and "//" not in text
