"""The transport to each peer, from UCX's log: to the process whose first agent is ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kvtransfer.fixtures import SMALL, boundary, filled, next_event
from kvtransfer.receiver_process import make
from kvtransfer.remote import RemoteReceiver

from effuse.kvtransfer.connector import UNKNOWN, FinishPush, Pushed, PushPages, Route


def test_the_route_of_each_peer_is_the_one_that_ucx_takes() -> None:
    """Peers on one machine that were met before TCP was the only way to some peer keep theirs."""
    # In a process of its own: this one may have agents already, which decided on UCX's log.
    paths = [str(Path(__file__).parent.parent), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-P", __file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    routes = {name: Route(*route) for name, route in json.loads(done.stdout).items()}
    assert routes["b"] == Route("tcp"), "pages of the host are nobody's fall-back"
    assert routes["a"] not in (UNKNOWN, Route("cma or tcp"))


def tell_routes() -> None:
    """Pushes to two peers and returns the transports of the pages."""
    sender = make("nixl", filled(SMALL, 4), "prefill-1")
    sender.start()
    routes = {}
    try:
        for name, ways in (("a", {}), ("b", {"UCX_TLS": "tcp,self"})):
            with RemoteReceiver("nixl", "small", 4, f"decode-{name}", **ways) as remote:
                reserved = remote.reserve([0, 1])
                sender.send(PushPages(reserved, (2, 3), 0))
                sender.send(FinishPush(reserved, boundary))
                pushed = next_event(sender, reserved.transfer_id)
                assert isinstance(pushed, Pushed), pushed
                routes[name] = (pushed.route.name, pushed.route.is_fallback)
    finally:
        sender.close()
    print(json.dumps(routes))


if __name__ == "__main__":
    tell_routes()
