"""What moves a push's bytes, as UCX itself tells it, over connections of several kinds."""

from __future__ import annotations

from kvtransfer.fixtures import SMALL, boundary, filled, next_event
from kvtransfer.receiver_process import make
from kvtransfer.remote import RemoteReceiver

from effuse.kvtransfer.connector import UNKNOWN, Pushed, Route


def test_the_route_of_each_peer_is_the_one_that_ucx_takes() -> None:
    """Peers on one machine that were met before TCP was the only way to somebody keep theirs."""
    sender = make("nixl", filled(SMALL, 4), "prefill-1")
    sender.start()
    routes = {}
    try:
        for name, ways in (("a", {}), ("b", {"UCX_TLS": "tcp,self"})):
            with RemoteReceiver("nixl", "small", 4, f"decode-{name}", **ways) as remote:
                reserved = remote.reserve([0, 1])
                sender.push_pages(reserved, [2, 3], 0)
                sender.finish(reserved, boundary)
                pushed = next_event(sender, reserved.transfer_id)
                assert isinstance(pushed, Pushed), pushed
                routes[name] = pushed.route
    finally:
        sender.close()
    assert routes["b"] == Route("tcp"), "pages of the host are nobody's fall-back"
    assert routes["a"] not in (UNKNOWN, Route("cma or tcp"))
