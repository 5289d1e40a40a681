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
from kvtransfer.fixtures import next_event
from kvtransfer.late_writes import NEXT_OWNERS, NUM_PAGES, WRITTEN, Victim

from effuse.kvtransfer.connector import Fence, Fenced, Forget

BY_KERNEL = "posix,cma,self,tcp"
MOST_TRIES = 12
FREEZE_AFTER_S = (0.004, 0.008, 0.016)  # in the midst of 48 MiB


def num_spoilt(*, is_trusted: bool, freeze_after_s: float) -> int:
    """Free pages that are overwritten once the writer goes on; `is_trusted` closes nothing."""
    with contextlib.closing(Victim()) as victim:
        victim.meet()
        reserved = victim.reserve(NUM_PAGES)
        victim.writer.push(reserved, range(NUM_PAGES), WRITTEN)
        time.sleep(freeze_after_s)
        os.kill(victim.writer.process.pid, signal.SIGSTOP)
        victim.connector.send(Forget(reserved.transfer_id))
        victim.connector.send(Fence(reserved.transfer_id, has_drained=is_trusted))
        next_event(victim.connector, reserved.transfer_id, Fenced)
        victim.memory.tensor.fill_(NEXT_OWNERS)
        os.kill(victim.writer.process.pid, signal.SIGCONT)
        time.sleep(1.0)
        return int((~victim.holds(NEXT_OWNERS)).sum())


def num_spoilt_at_worst(*, is_trusted: bool) -> int:
    """The same of several writers; when one is frozen is a matter of luck."""
    found = 0
    for number in range(MOST_TRIES):
        freeze_after_s = FREEZE_AFTER_S[number % len(FREEZE_AFTER_S)]
        found = max(found, num_spoilt(is_trusted=is_trusted, freeze_after_s=freeze_after_s))
        if found:
            break
    return found


def test_over_tcp_a_live_writer_is_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    assert num_spoilt_at_worst(is_trusted=True) > 0, "the fault did not happen"
    for freeze_after_s in FREEZE_AFTER_S:
        assert num_spoilt(is_trusted=False, freeze_after_s=freeze_after_s) == 0


def test_beside_us_nothing_keeps_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why such a writer is waited for. Should this fail, it need not be any more."""
    monkeypatch.setenv("UCX_TLS", BY_KERNEL)
    assert num_spoilt_at_worst(is_trusted=False) > 0
