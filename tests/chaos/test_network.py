"""Real workers whose network is cut and slowed under load: no client notices."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import network, report
from chaos.ledger import Ledger
from chaos.plan import OF_NETWORKS
from chaos.verdict import judge

FAULTS = 8  # each worker cut once and slowed once
LONGEST_CUT_S = 4.0


@pytest.mark.network
@pytest.mark.timeout(900)
def test_a_network_that_fails_costs_no_request(tmp_path: Path) -> None:
    if reason := network.why_not():
        pytest.skip(reason)
    ledger = Ledger(seed=3, connector="nixl")
    faults = network.draw_faults(ledger.seed, FAULTS, LONGEST_CUT_S)
    network.carry_out(ledger, faults, tmp_path, print)
    findings = judge(ledger)
    assert not findings, "\n".join(report.lines(ledger, findings))
    assert {(one.fault.kind, one.fault.target) for one in ledger.injected} == {
        (kind, name) for kind in OF_NETWORKS for name in network.TARGETS.workers
    }
