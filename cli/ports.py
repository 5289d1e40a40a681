"""Ports of this machine: free ones, taken ones, and one that is held for routers to share."""

import socket
from collections.abc import Iterable
from contextlib import ExitStack


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_ports(places: Iterable[tuple[str, int]]) -> None:
    """Raises OSError, naming host and port, where nobody can listen on all of these at once."""
    asked: set[int] = set()
    with ExitStack() as held:
        for host, port in places:
            try:
                server = socket.create_server(_bare(host, port), family=_family(host))
            except OSError as error:
                for_two = " for two things" if port in asked else ""
                raise OSError(f"cannot listen on {host}:{port}{for_two}: {error}") from error
            held.enter_context(server)
            asked.add(port)


def hold_port(host: str, port: int) -> socket.socket:
    """A socket that keeps a port for a fleet's routers, whichever of them live; 0 is a free one.

    It never listens. The routers share the port with it, and so does nobody who asks for it alone.
    Raises OSError, naming host and port, where somebody has it."""
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
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    return holder


def _bare(host: str, port: int) -> tuple[str, int]:
    return host.strip("[]"), port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
