"""The network interfaces of this host, by their addresses."""

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40  # struct ifreq: a name of 16 bytes, a sockaddr, padding
_MOST_ENTRIES = 1024
_IPV6 = Path("/proc/net/if_inet6")


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


def interface_towards(host: str, port: int) -> str:
    """The interface from which this host reaches another one, or itself. Raises OSError if it
    reaches it from none."""
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
    family, kind, _, _, where = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing
        own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    names = [
        name for name, one in addresses() if one == own or (own.is_loopback and one.is_loopback)
    ]
    if not names:
        raise OSError(f"no interface has the address {own}, from which {host} is reached")
    return names[0]
