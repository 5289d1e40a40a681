"""A real fleet whose processes are killed, stopped and emptied under load: nobody notices."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import report
from chaos.ledger import Ledger
from chaos.plan import Kind
from chaos.run import carry_out
from chaos.verdict import judge

SEED = 1
REQUESTS = 300
KILLS = 8  # a deck: every engine once, a front of each kind, Redis


# Restarts pause up to 60 s, and a slow machine may take many times what this one takes.
@pytest.mark.timeout(900)
def test_no_request_is_lost_or_changed(tmp_path: Path) -> None:
    ledger = Ledger(seed=SEED, connector="nixl")
    carry_out(ledger, REQUESTS, KILLS, tmp_path, print)
    findings = judge(ledger)
    assert not findings, "\n".join(report.lines(ledger, findings))
    assert {one.fault.kind for one in ledger.injected} == set(Kind)
    assert len(ledger.exchanges) >= REQUESTS
