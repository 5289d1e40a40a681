"""Ports that are looked at and held, at addresses of both kinds."""

from __future__ import annotations

import pytest
from loopbacks import LOOPBACKS

from effuse.cli.ports import check_port, hold_port


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_port_is_held_at_an_address_as_grpc_takes_it(host: str) -> None:
    with hold_port(host, 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match=r"cannot listen on .*: "):
            check_port(host, port)
    check_port(host, port)
