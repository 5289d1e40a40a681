"""Workers with ranks on two hosts: one process's tokens, and an end of the group with any part."""

from __future__ import annotations

import json

import pytest
from chaos import network
from e2e.client import all_at_once, connect
from e2e.hosts import FAR, LEADERS, Faults, asking, goes_on, serving
from e2e.rank_faults import Ledger


@pytest.mark.timeout(600)
def test_a_worker_on_two_hosts_writes_one_process_s_tokens_whatever_befalls_the_far_one() -> None:
    """In namespaces a cable is pulled; on loopback, without root, the far rank is killed."""
    why = network.why_not(("ip",))
    ledger = Ledger()
    with serving("zmq" if why else "nixl", why) as (fleet, spread, asked):
        with connect(fleet.address) as client:
            found = all_at_once(client.generate, [message for message, _ in asked])
        assert [tuple(one.token_ids) for one in found] == [tokens for _, tokens in asked]
        for name in LEADERS.values():
            told = json.loads(fleet.ready_of(name).read_text())
            assert told["address"].startswith(spread.addresses.get(FAR, "127.0.0.2"))
        with asking(fleet, asked, ledger):
            goes_on(ledger)
            Faults(fleet, spread).hit("rank" if why else "cable", "decode-0")
            goes_on(ledger)
        for process in fleet.far.values():
            assert process.poll() is None
        far = [process.pid for name in LEADERS.values() for process in fleet.ranks_of(name)]
        assert len(far) == 2
    assert not ledger.wrong and not ledger.failed
    assert [process.returncode for process in fleet.far.values()] == [0, 0]
