"""Where UCX listens: the network devices of the worker's listening address.

UCX listens on every interface of the machine unless an option names some. It accepts names of
devices but no addresses, so this file finds the interface of the address. Linux only.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Iterator, MutableMapping
from pathlib import Path

LOG = logging.getLogger(__name__)

DEVICES, FAMILIES = "UCX_NET_DEVICES", "UCX_TCP_AF_PRIO"
_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40  # struct ifreq: a name of 16 bytes, a sockaddr, padding
_MOST_ENTRIES = 1024
_IPV6 = Path("/proc/net/if_inet6")
_RDMA = Path("/sys/class/infiniband")


def confine(host: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes UCX listen only on the interface of `host`; call it before the first agent is made.

    A wildcard means all interfaces, like for other sockets, and a set `UCX_NET_DEVICES` has
    precedence. RDMA devices stay unless the address is loopback, because nothing reaches them by an
    IP address. Raises ValueError if no interface has the address.
    """
    address = _resolve(host)
    if address.is_unspecified or DEVICES in environment:
        return
    names = [name for name, own in addresses() if own == address]
    if address.is_loopback:  # lo has all of 127.0.0.0/8, and reports one address of it
        names = names or [name for name, own in addresses() if own.is_loopback]
    if not names:
        raise ValueError(
            f"--host: expected the address of an interface of this machine, got {address}"
        )
    rdma = [] if address.is_loopback else list(_rdma_ports())
    environment[DEVICES] = ",".join([*dict.fromkeys(names), *rdma])
    environment.setdefault(FAMILIES, "inet6" if address.version == 6 else "inet")
    LOG.debug("UCX listens on %s", environment[DEVICES])


def addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Every interface that is up, with each of its addresses."""
    table = array.array("B", bytes(_MOST_ENTRIES * _ENTRY_BYTES))
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        asked = struct.pack("iL", len(table), table.buffer_info()[0])
        num_bytes, _ = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, asked))
    for at in range(0, num_bytes, _ENTRY_BYTES):
        entry = table[at : at + _ENTRY_BYTES].tobytes()
        yield entry[:16].split(b"\0")[0].decode(), ipaddress.IPv4Address(entry[20:24])
    for line in _IPV6.read_text().splitlines() if _IPV6.exists() else ():
        digits, *_, name = line.split()
        yield name, ipaddress.IPv6Address(bytes.fromhex(digits))


def _resolve(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"--host: expected a host with an address, got {host!r}: {error}"
        ) from error
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])


def _rdma_ports() -> Iterator[str]:
    """Ports of RDMA devices, by UCX's names."""
    for port in sorted(_RDMA.glob("*/ports/*")):
        yield f"{port.parent.parent.name}:{port.name}"
