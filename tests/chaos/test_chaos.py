"""A real fleet whose processes are killed, stopped and emptied under load: no client notices."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import report
from chaos.ledger import Ledger
from chaos.plan import OF_NETWORKS, Kind, draw_plan, targets_of
from chaos.run import carry_out
from chaos.verdict import judge

SEED = 8  # whose first deck ends with a kill, so that ten have all its kinds
REQUESTS = 200  # the last of them after the last fault, on quiet cores
CLIENTS, THINK_S = 4, 1.0  # which leaves the engines that start most of a small machine
JOBS = 12  # of each algorithm, which are also asked before and after the faults
KILLS = 10  # every engine once, all but one of decode, a front of each kind, a router, Redis


# Restarts pause up to 60 s, and a slow machine may take many times what this one takes.
@pytest.mark.timeout(900)
def test_no_request_is_lost_or_changed(tmp_path: Path) -> None:
    ledger = Ledger(seed=SEED, connector="nixl")
    targets = targets_of(2, 3)
    plan = draw_plan(SEED, KILLS, targets)
    carry_out(
        ledger, targets, plan, REQUESTS, tmp_path, print,
        clients=CLIENTS, think_s=THINK_S, num_jobs=JOBS,
    )  # fmt: skip
    findings = judge(ledger)
    assert not findings, "\n".join(report.lines(ledger, findings))
    assert {one.fault.kind for one in ledger.injected} == set(Kind) - OF_NETWORKS
    assert len(ledger.exchanges) >= REQUESTS
