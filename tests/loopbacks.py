"""Names of this machine's loopback, in the form of a flag."""

from __future__ import annotations

import socket
from typing import Final


def _has_ipv6() -> bool:
    """Not every kernel has it, nor every container an address of it."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


LOOPBACKS: Final = ("127.0.0.1", *(("::1", "[::1]") if _has_ipv6() else ()))
"""Those of IPv6, with brackets and without, only where there are any."""
