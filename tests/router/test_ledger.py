"""Which ids run, which are remembered, and for how long."""

from __future__ import annotations

import pytest

from effuse.protos.errors import AlreadyRunning
from effuse.router.ledger import MOST_REMEMBERED, REMEMBERED_S, Ledger
from effuse.router.request import Life


def test_an_id_runs_once_and_may_be_used_again_afterwards() -> None:
    ledger = Ledger(lambda: 0.0)
    first, second = Life("a"), Life("a")
    with ledger.running(first):
        with pytest.raises(AlreadyRunning, match="'a' is running"), ledger.running(second):
            pass
        assert ledger.find("a") is first
    with ledger.running(second):
        assert ledger.find("a") is second
    assert ledger.idle.is_set()


def test_ended_requests_are_remembered_for_a_while() -> None:
    now = 0.0
    ledger = Ledger(lambda: now)
    life = Life("a")
    with ledger.running(life):
        pass
    assert ledger.find("a") is life
    now = REMEMBERED_S
    assert ledger.find("a") is None


def test_memory_is_bounded() -> None:
    ledger = Ledger(lambda: 0.0)
    for at in range(MOST_REMEMBERED + 10):
        with ledger.running(Life(str(at))):
            pass
    assert ledger.find("9") is None
    assert ledger.find("10") is not None
