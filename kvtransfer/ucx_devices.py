"""Where UCX listens: the network devices of the address that a worker was told to listen on.

UCX listens on every interface of the machine unless it is told which to use. It takes names of
devices and no addresses, so the interface is looked up that has the address. Linux alone.
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
    """Has UCX listen on the interface of `host` alone; to be called before the first agent is made.

    A wildcard means all interfaces, as it does for other sockets, and `UCX_NET_DEVICES` where it is
    set means what it says. RDMA devices stay where the address is not loopback: nothing reaches
    them by an IP address. Raises ValueError where no interface has the address.
    """
    address = _resolve(host)
    if address.is_unspecified or DEVICES in environment:
        return
    names = [name for name, own in addresses() if own == address]
    if address.is_loopback:  # lo has all of 127.0.0.0/8, and tells one address of it
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
    """Every interface that is up with each of its addresses."""
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
    """Ports of RDMA devices, as UCX names them."""
    for port in sorted(_RDMA.glob("*/ports/*")):
        yield f"{port.parent.parent.name}:{port.name}"
