"""Names of hosts, resolved by one rule, so that both ends of a connection find the same address.

ZMQ itself takes only addresses of IPv4 for a name, or prefers those of IPv6.
"""

import socket


def resolve(name: str, family: int = socket.AF_INET) -> tuple[str, socket.AddressFamily]:
    """A numeric address of a host and its family: this one if the host has such an address, with
    which other programs begin, too. Raises OSError if there is none, and ValueError for a name that
    cannot be one."""
    found = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    chosen, _, _, _, where = min(found, key=lambda one: one[0] != family)  # the first such one
    scope = f"%{where[3]}" if len(where) == 4 and where[3] else ""
    return f"{where[0]}{scope}", socket.AddressFamily(chosen)


def numeric(name: str) -> str:
    """A numeric address of a host; the name itself if there is none now."""
    try:
        return resolve(name)[0]
    except (OSError, ValueError):
        return name


def numeric_endpoint(endpoint: str) -> str:
    """An endpoint of ZMQ with a numeric address; the same one if there is none, whose error ZMQ
    raises."""
    scheme, _, where = endpoint.partition("://")
    name, _, port = where.rpartition(":")
    if scheme != "tcp":
        return endpoint
    try:
        host, family = resolve(name)
    except (OSError, ValueError):
        return endpoint
    return f"tcp://[{host}]:{port}" if family == socket.AF_INET6 else f"tcp://{host}:{port}"
