"""Names of this machine's loopback, in the form of a flag, and names with chosen addresses."""

from __future__ import annotations

import socket
from typing import Any, Final

import pytest


def _has_ipv6() -> bool:
    """Not every kernel has it, nor every container an address of it."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


LOOPBACKS: Final = ("127.0.0.1", *(("::1", "[::1]") if _has_ipv6() else ()))
"""Those of IPv6, with brackets and without, only where there are any."""


def give_name(monkeypatch: pytest.MonkeyPatch, name: str, *addresses: str) -> None:
    """Lets this name have these addresses, in this order."""
    real = socket.getaddrinfo

    def look_up(host: str | None, *rest: Any, **hints: Any) -> list[Any]:
        hosts = addresses if host == name else (host,)
        return [one for each in hosts for one in real(each, *rest, **hints)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
