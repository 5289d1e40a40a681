"""A writer that is abandoned while it is frozen, and then goes on: closing our end keeps its bytes
out.

Over TCP that is everything, which `worker/peer.py` builds on for writers elsewhere. A writer beside
us has the kernel copy into our memory, and is not kept out at all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
from kvtransfer.fixtures import DEADLINE_S, next_event
from kvtransfer.late_writes import NEXT_OWNERS, NUM_PAGES, OLD, WRITTEN, Victim

from effuse.kvtransfer.connector import Fence, Fenced, Forget

BY_KERNEL = "posix,cma,self,tcp"
MOST_TRIES = 12
WRITTEN_PAGES = (1, 100, 300)  # of NUM_PAGES, after which the writer is frozen
LATE_S = 1.0  # after which late bytes have arrived


def num_spoilt(*, is_trusted: bool, written_pages: int) -> int:
    """Free pages that are overwritten once the writer goes on; `is_trusted` closes nothing."""
    with contextlib.closing(Victim()) as victim:
        victim.meet()
        victim.fill(OLD)
        reserved = victim.reserve(NUM_PAGES)
        victim.writer.push(reserved, range(NUM_PAGES), WRITTEN)
        deadline = time.monotonic() + DEADLINE_S
        while num_begun(victim) < written_pages:
            assert time.monotonic() < deadline, "too few pages were written"
        os.kill(victim.writer.process.pid, signal.SIGSTOP)
        victim.connector.send(Forget(reserved.transfer_id))
        victim.connector.send(Fence(reserved.transfer_id, has_drained=is_trusted))
        next_event(victim.connector, reserved.transfer_id, Fenced)
        victim.memory.tensor.fill_(NEXT_OWNERS)
        os.kill(victim.writer.process.pid, signal.SIGCONT)
        deadline = time.monotonic() + LATE_S
        while not (found := int((~victim.holds(NEXT_OWNERS)).sum())):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return found


def num_begun(victim: Victim) -> int:
    """Pages whose first bytes were written."""
    return int((victim.memory.tensor.flatten(1)[:, 0] == WRITTEN).sum())


def num_spoilt_at_worst(*, is_trusted: bool) -> int:
    """The same of several writers, because a busy machine may freeze one after its last write."""
    found = 0
    for number in range(MOST_TRIES):
        written_pages = WRITTEN_PAGES[number % len(WRITTEN_PAGES)]
        if found := num_spoilt(is_trusted=is_trusted, written_pages=written_pages):
            break
    return found


def test_over_tcp_a_live_writer_is_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    assert num_spoilt_at_worst(is_trusted=True) > 0, "the fault did not happen"
    for written_pages in WRITTEN_PAGES:
        assert num_spoilt(is_trusted=False, written_pages=written_pages) == 0


def test_beside_us_nothing_keeps_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why such a writer is waited for. Should this fail, it need not be any more."""
    monkeypatch.setenv("UCX_TLS", BY_KERNEL)
    assert num_spoilt_at_worst(is_trusted=False) > 0
