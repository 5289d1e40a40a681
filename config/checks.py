"""Checks of a config's values, for `__post_init__`: each raises ValueError naming flag and form.

Not here: what needs more than one value to judge, which is its config's own.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

from effuse.config.flags import flag_of

MODEL_NAME_FORM: Final = "1 to 256 characters of A-Z a-z 0-9 . _ : / + @ -, without '..' or '//'"
_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+@-]{0,255}")


def whole(name: str, value: int | None, least: int, most: int | None = None) -> None:
    """Refuses a number outside of `least` to `most`; None, where a field allows it, is good."""
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
    """Refuses a value that is none of the choices, as Python code may set one."""
    if value not in choices:
        raise ValueError(f"{flag_of(name)}: expected one of {', '.join(choices)}, got {value!r}")


def directory(name: str, path: Path | None) -> None:
    """Refuses a path, where there is one, that is not a directory."""
    if path is not None and not path.is_dir():
        raise ValueError(f"{flag_of(name)}: expected a directory, got {str(path)!r}")


def file(name: str, path: Path | None) -> None:
    """Refuses a path, where there is one, that is not a file."""
    if path is not None and not path.is_file():
        raise ValueError(f"{flag_of(name)}: expected a file, got {str(path)!r}")


def together(config: object, *names: str) -> None:
    """Refuses some of these fields without the others."""
    given = [name for name in names if getattr(config, name) is not None]
    if given and len(given) < len(names):
        others = ", ".join(flag_of(name) for name in names if name not in given)
        raise ValueError(f"{flag_of(given[0])}: expected {others} beside it")


def loopback(name: str, host: str, why: str, unless: str) -> None:
    """Refuses an address that other machines may reach; `unless` is the flag that allows it."""
    if not is_loopback(host):
        raise ValueError(
            f"{flag_of(name)}: expected a loopback address, as {why}, or {unless}; got {host!r}"
        )


def is_loopback(host: str) -> bool:
    """Whether this machine alone reaches it. A name other than localhost is not looked up."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def redis_url(name: str, url: str | None) -> None:
    """Refuses an address, where there is one, that is not a Redis's, and one with a password: what
    stands on a command line is read by every user of the machine."""
    if url is not None and not is_redis_url(url):
        form = "expected redis://host:port/db"
        raise ValueError(f"{flag_of(name)}: {form}, got {without_password(url)!r}")
    if url is not None and _has_password(url):
        raise ValueError(f"{flag_of(name)}: expected no password; --redis-credentials names a file")


def _has_password(url: str) -> bool:
    """Where a client of Redis looks for one: beside the host, and among parameters."""
    parts = urlsplit(url)
    return parts.password is not None or "password" in parse_qs(parts.query)


def without_password(url: str) -> str:
    """As it may be shown, however broken it is: of one that may hold a password the scheme alone,
    as far as it begins with one."""
    if "@" not in url and "?" not in url:
        return url
    scheme = re.match("rediss?|unix", url)
    return f"{scheme[0]}://.." if scheme else ".."


def is_redis_url(url: str) -> bool:
    """Whether a client of Redis can be made for it."""
    with contextlib.suppress(ValueError):  # of a port that is no number, or of half a host
        parts = urlsplit(url)
        _ = parts.port
        is_database = re.fullmatch("/?[0-9]*", parts.path) is not None
        return url.startswith("unix://") or (
            url.startswith(("redis://", "rediss://")) and is_database
        )
    return False


def model_name(name: str, value: str | None) -> None:
    """Refuses a model's name, where there is one, that no client may ask for."""
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
    """A model's name after a directory of this one, whose own may hold what no client may say."""
    plain = re.sub(r"[^A-Za-z0-9._:+@-]+", "-", text)
    plain = re.sub(r"\.{2,}", ".", plain).strip("._:+@-")
    return text if is_model_name(text) else plain[:256] or "model"


def is_model_name(text: str) -> bool:
    """Whether it is a model's name as `MODEL_NAME_FORM` has it."""
    return bool(_MODEL_NAME.fullmatch(text)) and ".." not in text and "//" not in text
