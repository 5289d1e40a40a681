"""Ports of this machine: free ones, taken ones, and one reserved for routers to share."""

import errno
import os
import random
import socket
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

_LOWEST: Final = 20_000
_OTHERS: Final = (
    "; --port, --http-port, --page-port, --metrics-port and --health-port take other ports, and "
    "with 0 free ones"
)
_GIVEN: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port of 127.0.0.1 that is not in use now. It is outside the range of ports that the kernel
    gives to connections and to port 0, as far as known, so that it is still free when it is bound.
    """
    given = _GIVEN.read_text().split() if _GIVEN.exists() else [str(_LOWEST)]
    ports = range(_LOWEST, int(given[0]))
    tried = random.SystemRandom().sample(ports, min(len(ports), 100))
    for port in (*tried, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            return found
    raise OSError("127.0.0.1 has no free port")


def check_ports(places: Iterable[tuple[str, int]]) -> None:
    """Raises OSError that names each of these that cannot be bound together with the others."""
    asked: set[int] = set()
    failed: dict[str, list[str]] = {}  # places by reason
    with ExitStack() as held:
        for host, port in places:
            try:
                server = socket.create_server(_bare(host, port), family=_family(host))
            except OSError as error:
                for_two = " for two things" if port in asked else ""
                failed.setdefault(_reason(error), []).append(f"{host}:{port}{for_two}")
            else:
                held.enter_context(server)
                asked.add(port)
    if failed:
        each = [f"{' and '.join(those)}: {reason}" for reason, those in failed.items()]
        remedy = _OTHERS if os.strerror(errno.EADDRINUSE) in failed else ""
        raise OSError(f"cannot listen on {', nor on '.join(each)}{remedy}")


def hold_port(host: str, port: int) -> socket.socket:
    """A socket that reserves a port for a fleet's routers, whichever of them live; 0 takes a free
    one.

    It never listens. The routers share the port with it, but a process that wants the port
    exclusively cannot have it. Raises OSError that names host and port if the port is taken.
    """
    holder = socket.socket(_family(host))
    try:
        with socket.create_server(_bare(host, port), family=_family(host)) as alone:
            address = alone.getsockname()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of an earlier fleet
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        holder.close()
        raise OSError(f"cannot listen on {host}:{port}: {_reason(error)}") from error
    return holder


def _reason(error: OSError) -> str:
    """Why, without the address, which the standard library repeats."""
    number = error.errno or 0
    return os.strerror(number) if number > 0 else str(error.strerror or error)


def _bare(host: str, port: int) -> tuple[str, int]:
    return host.strip("[]"), port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
