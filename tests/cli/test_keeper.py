"""When a process that has ended is started again."""

from __future__ import annotations

from effuse.cli.keeper import Restarts


def test_a_process_is_started_again_at_once_and_then_ever_more_slowly() -> None:
    restarts = Restarts()
    now, pauses = 0.0, []
    for _ in range(9):
        pause_s = restarts.ended("decode-0", now)
        assert pause_s is not None
        assert restarts.ended("decode-0", now) is None  # it is waited for already
        pauses.append(pause_s)
        if pause_s:
            assert restarts.due(now + 0.99 * pause_s) == []
        now += pause_s
        assert restarts.due(now) == ["decode-0"]
        assert restarts.due(now) == []
        restarts.back("decode-0", now)
        now += 1.0
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_process_that_was_well_for_a_minute_has_a_fresh_start() -> None:
    restarts = Restarts()
    for at in (0.0, 10.0, 20.0):
        restarts.ended("router", at)
        restarts.due(at + 5.0)
    restarts.back("router", 25.0)
    assert restarts.ended("router", 86.0) == 0


def test_each_process_is_judged_by_itself() -> None:
    restarts = Restarts()
    for _ in range(5):
        restarts.ended("decode-0", 0.0)
        restarts.due(100.0)
    assert restarts.ended("decode-1", 0.0) == 0
    assert restarts.due(0.0) == ["decode-1"]
