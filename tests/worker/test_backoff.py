"""How long a front waits before it starts the next engine."""

from __future__ import annotations

from effuse.worker.watchdog import Backoff


def test_pauses_grow_to_a_bound_and_end() -> None:
    backoff = Backoff(first_s=1.0, most_s=4.0, most_failures=5)
    pauses = []
    while not backoff.is_over:
        pauses.append(backoff.pause_s)
        backoff = backoff.failed()
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_ready_engine_clears_the_count_of_failures() -> None:
    backoff = Backoff(most_failures=2).failed().ended(lived_s=1.0).failed()
    assert not backoff.is_over
    assert backoff.failures == 1


def test_engines_that_end_soon_are_replaced_for_ever_but_ever_more_slowly() -> None:
    backoff = Backoff(first_s=1.0, most_s=8.0, most_failures=2, steady_s=60.0)
    pauses = []
    for _ in range(2000):
        backoff = backoff.ended(lived_s=59.9)
        pauses.append(backoff.pause_s)
    assert pauses[:4] == [2.0, 4.0, 8.0, 8.0]
    assert pauses[-1] == 8.0
    assert not backoff.is_over


def test_an_engine_that_lived_long_is_replaced_at_once() -> None:
    backoff = Backoff(first_s=1.0, steady_s=60.0).ended(lived_s=3.0).ended(lived_s=60.0)
    assert backoff.pause_s == 1.0


def test_an_engine_that_served_and_was_killed_is_replaced_at_once_however_often() -> None:
    backoff = Backoff(first_s=1.0).ended(lived_s=1.0).ended(lived_s=2.0)
    for _ in range(20):
        backoff = backoff.ended(lived_s=5.0, by_itself=False)
        assert backoff.pause_s == 0.0
    assert backoff.ended(lived_s=20.0).pause_s == 2.0, "the first that ended by itself"
    assert backoff.failed().pause_s == 2.0


def test_one_that_is_killed_as_soon_as_it_is_ready_counts_as_one_that_ends_early() -> None:
    """The kernel kills for memory, too, and would do so again."""
    backoff, pauses = Backoff(first_s=1.0, most_s=8.0), []
    for _ in range(4):
        backoff = backoff.ended(lived_s=0.5, by_itself=False)
        pauses.append(backoff.pause_s)
    assert pauses == [2.0, 4.0, 8.0, 8.0]
