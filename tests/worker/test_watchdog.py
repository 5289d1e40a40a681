"""When an engine counts as hung: silence, or work that stands still while the loop turns."""

from __future__ import annotations

from effuse.placement.records import Load
from effuse.worker.messages import Heartbeat
from effuse.worker.watchdog import Progress, observe, pardon, verdict

HANG_S = 10.0


def beat(loops: int, steps: int = 0, runnable: int = 0) -> Heartbeat:
    return Heartbeat(loops=loops, load=Load(steps=steps, runnable=runnable))


def test_an_idle_engine_that_beats_is_well() -> None:
    progress = Progress.begin(0.0)
    for second in range(100):
        progress = observe(progress, beat(second), float(second))
        assert verdict(progress, second + 1.0, HANG_S) is None


def test_a_silent_engine_is_hung() -> None:
    progress = observe(Progress.begin(0.0), beat(1), 5.0)
    assert verdict(progress, 15.0, HANG_S) is None
    assert verdict(progress, 15.1, HANG_S) == "its loop has not turned for 10.1 s"


def test_an_engine_that_never_beat_is_hung() -> None:
    assert verdict(Progress.begin(0.0), 11.0, HANG_S) is not None


def test_work_that_stands_still_is_noticed_though_the_loop_turns() -> None:
    progress = Progress.begin(0.0)
    for second in range(12):
        progress = observe(progress, beat(second, steps=7, runnable=2), float(second))
    assert "2 requests could go on" in str(verdict(progress, 12.0, HANG_S))


def test_steps_or_nothing_to_do_count_as_progress() -> None:
    progress = Progress.begin(0.0)
    for second in range(50):
        stepping = second % 2 == 0
        here = beat(second, steps=second // 4, runnable=int(stepping))
        progress = observe(progress, here, float(second))
        assert verdict(progress, float(second), HANG_S) is None


def test_waiting_for_a_peer_is_not_hanging() -> None:
    progress = Progress.begin(0.0)
    for second in range(100):
        waiting = Heartbeat(loops=second, load=Load(running=3, runnable=0))
        progress = observe(progress, waiting, float(second))
    assert verdict(progress, 100.0, HANG_S) is None


def test_time_in_which_the_watcher_stood_still_is_not_the_engines() -> None:
    progress = observe(Progress.begin(0.0), beat(1, steps=3, runnable=1), 5.0)
    later = pardon(progress, 60.0)
    assert verdict(progress, 70.0, HANG_S) is not None
    assert verdict(later, 70.0, HANG_S) is None
    # From then on it has as long as ever to be heard.
    assert verdict(later, 75.1, HANG_S) == "its loop has not turned for 10.1 s"
