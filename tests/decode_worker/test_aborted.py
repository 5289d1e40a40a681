"""Aborted transfers are remembered for a while, and no longer."""

from __future__ import annotations

from effuse.decode_worker.aborted import Aborted


def test_a_transfer_is_remembered_until_its_time_is_over() -> None:
    aborted = Aborted(keep_s=10.0)
    aborted.add("a", now=0.0)
    aborted.add("b", now=6.0)
    assert "a" in aborted and "b" in aborted
    aborted.add("c", now=11.0)
    assert "a" not in aborted and "b" in aborted and "c" in aborted


def test_a_second_abort_renews_the_memory() -> None:
    aborted = Aborted(keep_s=10.0)
    aborted.add("a", now=0.0)
    aborted.add("a", now=9.0)
    aborted.add("b", now=15.0)
    assert "a" in aborted
