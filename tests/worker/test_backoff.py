"""Pauses between engines that fail to start, and the end of trying."""

from __future__ import annotations

from effuse.worker.backoff import Backoff


def test_pauses_grow_to_a_bound_and_end() -> None:
    backoff = Backoff(first_s=1.0, most_s=4.0, most_failures=5)
    pauses = []
    while not backoff.is_over:
        pauses.append(backoff.pause_s)
        backoff = backoff.failed()
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_ready_engine_clears_the_count() -> None:
    backoff = Backoff(most_failures=2).failed().recovered().failed()
    assert not backoff.is_over
    assert backoff.failures == 1
