"""When an engine counts as hung: silence, work that stands still, phases that take too long."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from effuse.placement.records import Load
from effuse.telemetry import logs
from effuse.worker.config import WorkerConfig
from effuse.worker.messages import Heartbeat, Phase
from effuse.worker.rank_part import _announce_compiling
from effuse.worker.shell import WorkerMetrics, WorkerReadings
from effuse.worker.watchdog import (
    Limits,
    Progress,
    Pulse,
    is_stopped_by_signal,
    look,
    observe,
    verdict,
)

LIMITS = Limits(startup_s=300.0, serving_s=3.0, compiling_s=60.0)
READY = replace(Progress.begin(0.0), is_ready=True, phase="serving")
PATIENCE_S = 0.3


def beat(
    loops: int, steps: int = 0, runnable: int = 0, *, marks: int = 0, phase: Phase = "serving"
) -> Heartbeat:
    load = Load(steps=steps, runnable=runnable)
    return Heartbeat(loops=loops, marks=marks, phase=phase, load=load)


def test_an_idle_engine_that_beats_is_well() -> None:
    progress = READY
    for second in range(100):
        progress = observe(progress, beat(second), float(second))
        assert verdict(progress, second + 1.0, LIMITS) is None


def test_a_silent_engine_is_hung() -> None:
    progress = observe(READY, beat(1), 5.0)
    assert verdict(progress, 8.0, LIMITS) is None
    assert verdict(progress, 8.1, LIMITS) == "its loop has not run for 3.1 s"


def test_an_engine_that_never_beat_is_hung() -> None:
    assert verdict(READY, 3.1, LIMITS) is not None


def test_work_that_stands_still_is_noticed_though_the_loop_turns() -> None:
    progress = READY
    for second in range(5):
        progress = observe(progress, beat(second, steps=7, runnable=2), float(second))
    assert "2 requests could continue" in str(verdict(progress, 4.0, LIMITS))


def test_steps_or_nothing_to_do_count_as_progress() -> None:
    progress = READY
    for second in range(50):
        stepping = second % 2 == 0
        here = beat(second, steps=second // 4, runnable=int(stepping))
        progress = observe(progress, here, float(second))
        assert verdict(progress, float(second), LIMITS) is None


def test_waiting_for_a_peer_is_not_hanging() -> None:
    progress = READY
    for second in range(100):
        waiting = Heartbeat(loops=second, load=Load(running=3, runnable=0))
        progress = observe(progress, waiting, float(second))
    assert verdict(progress, 100.0, LIMITS) is None


def test_layers_of_a_long_forward_count_as_progress() -> None:
    """Neither the loop turns nor a step ends for a minute."""
    progress = observe(READY, beat(1, runnable=1), 0.0)
    for second in range(60):
        progress = observe(progress, beat(1, runnable=1, marks=second + 1), float(second))
        assert verdict(progress, second + 1.0, LIMITS) is None
    assert verdict(progress, 59.0 + 10.1, LIMITS) is not None


@pytest.mark.parametrize(("step_s", "limit_s"), [(0.01, 3.0), (0.3, 3.0), (0.5, 5.0), (2.0, 20.0)])
def test_an_engine_may_be_silent_for_ten_of_its_steps(step_s: float, limit_s: float) -> None:
    progress, now = READY, 0.0
    for step in range(5):
        now = step * step_s
        progress = observe(progress, beat(step, steps=step, runnable=1), now)
    assert verdict(progress, now + limit_s - 0.01, LIMITS) is None
    assert verdict(progress, now + limit_s + 0.01, LIMITS) is not None


def test_what_is_expected_of_steps_rises_at_once_and_falls_slowly() -> None:
    progress = observe(READY, beat(1, steps=1, runnable=1), 0.0)
    progress = observe(progress, beat(2, steps=2, runnable=1), 1.0)
    assert progress.step_s == 1.0
    expected = []
    for step in range(3, 60):
        progress = observe(progress, beat(step, steps=step, runnable=1), 1.0 + step * 0.01)
        expected.append(progress.step_s)
    assert all(later < earlier for earlier, later in pairwise(expected))
    assert expected[0] > 0.8 and expected[-1] < 0.02


def test_several_steps_in_one_beat_share_its_time() -> None:
    progress = observe(READY, beat(1, steps=1, runnable=1), 0.0)
    progress = observe(progress, beat(9, steps=11, runnable=1), 2.0)
    assert progress.step_s == pytest.approx(0.2)


def test_time_without_work_says_nothing_of_steps() -> None:
    progress = observe(READY, beat(1, steps=1), 0.0)
    progress = observe(progress, beat(2, steps=2, runnable=1), 100.0)
    assert progress.step_s == 0.0


@pytest.mark.parametrize("phase", ["loading", "capturing", "compiling"])
def test_a_start_takes_as_long_as_it_may_whatever_the_phase(phase: Phase) -> None:
    progress = observe(Progress.begin(0.0), beat(0, phase=phase), 299.0)
    assert verdict(progress, 300.0, LIMITS) is None
    assert verdict(progress, 300.1, LIMITS) == (
        f"it was not ready after 300 s; its last phase was {phase}"
    )


@pytest.mark.parametrize(("phase", "limit_s"), [("compiling", 60.0), ("capturing", 300.0)])
def test_a_phase_has_a_limit_of_its_own_at_any_time(phase: Phase, limit_s: float) -> None:
    progress = observe(READY, beat(4, steps=1, runnable=1), 9.0)
    progress = observe(progress, beat(4, steps=1, runnable=1, phase=phase), 10.0)
    assert verdict(progress, 10.0 + limit_s, LIMITS) is None
    told = verdict(progress, 10.1 + limit_s, LIMITS)
    assert told == f"it has been {phase} for {limit_s + 0.1:.1f} s"


def test_what_was_compiled_for_is_not_taken_for_a_step() -> None:
    progress = observe(READY, beat(4, steps=1, runnable=1), 9.0)
    progress = observe(progress, beat(4, steps=1, runnable=1, phase="compiling"), 10.0)
    progress = observe(progress, beat(4, steps=1, runnable=1), 60.0)
    assert (verdict(progress, 63.0, LIMITS), progress.step_s) == (None, 0.0)
    assert verdict(progress, 63.1, LIMITS) == "its loop has not run for 3.1 s"


@pytest.mark.parametrize("pause_s", [12.0, 40.0, 4000.0])
@pytest.mark.parametrize("phase", ["loading", "capturing", "compiling", "serving"])
def test_time_in_which_the_watcher_stood_still_is_not_the_engines(
    pause_s: float, phase: Phase
) -> None:
    progress = replace(READY, is_ready=phase != "loading", looked_at=5.0)
    progress = observe(progress, beat(1, steps=3, runnable=1, phase=phase), 5.0)
    now = 5.0 + pause_s
    assert verdict(progress, 4005.0, LIMITS) is not None
    progress, stood_still_s = look(progress, now, PATIENCE_S)
    assert stood_still_s == pytest.approx(pause_s - PATIENCE_S)
    assert verdict(progress, now, LIMITS) is None


def test_after_that_it_has_as_long_as_ever_to_be_heard() -> None:
    progress = observe(replace(READY, looked_at=5.0), beat(1), 5.0)
    progress, _ = look(progress, 45.0, PATIENCE_S)
    assert verdict(progress, 45.0 + 2.7, LIMITS) is None
    assert verdict(progress, 45.0 + 2.8, LIMITS) == "its loop has not run for 3.1 s"


def test_a_watcher_that_is_only_late_pardons_nothing() -> None:
    """Else an engine would never be found out where the machine is busy."""
    progress, now, why = READY, 0.0, None
    while why is None and now < 10.0:
        now += 1.9 * PATIENCE_S
        progress, stood_still_s = look(progress, now, PATIENCE_S)
        assert stood_still_s == 0.0
        why = verdict(progress, now, LIMITS)
    assert why == "its loop has not run for 3.4 s"


class Watched:
    """A pulse, its reports, and time that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[Heartbeat] = []
        self.pulse = Pulse(self.told.append, now=lambda: self.now)

    @property
    def phases(self) -> list[Phase]:
        return [beat.phase for beat in self.told]


def test_a_long_forward_is_told_of_while_it_lasts() -> None:
    one = Watched()
    load = Load(running=1, runnable=1)
    assert one.pulse.turn(load, has_end=False) is not None
    for layer in range(31):
        one.now += 0.125
        one.pulse.mark(layer)
    assert [beat.marks for beat in one.told] == [4, 8, 12, 16, 20, 24, 28]
    assert {(beat.loops, beat.load) for beat in one.told} == {(1, load)}


def test_layers_of_a_short_forward_cost_no_message() -> None:
    one = Watched()
    one.pulse.turn(Load(), has_end=False)
    for layer in range(100):
        one.pulse.mark(layer)
    assert one.told == []


def test_a_phase_is_told_before_it_begins_and_after_it() -> None:
    one = Watched()
    with one.pulse.during("loading"), one.pulse.during("compiling"):
        assert one.phases == ["loading", "compiling"]
    assert one.phases == ["loading", "compiling", "loading", "serving"]


def test_a_phase_that_an_error_left_open_ends_with_the_turn() -> None:
    one = Watched()
    one.pulse.begin("compiling")  # and the compilation has failed
    one.now = 1.0
    beat = one.pulse.turn(Load(), has_end=False)
    assert beat is not None
    assert beat.phase == "serving"


def test_what_another_thread_compiles_keeps_nobody_waiting() -> None:
    one = Watched()

    def compile_something() -> None:
        with one.pulse.during("compiling"):
            pass

    thread = threading.Thread(target=compile_something)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert one.told == []


def test_torch_s_compiler_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.callback import callback_handler
    from triton import knobs

    monkeypatch.setattr(callback_handler, "start_callbacks", [])
    monkeypatch.setattr(callback_handler, "end_callbacks", [])
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    one = Watched()
    _announce_compiling(WorkerConfig(attention="flex"), torch.device("cuda"), one.pulse)
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    assert one.told == []
    compiled(torch.zeros(2))
    assert one.phases == ["compiling", "serving"]
    compiled(torch.zeros(2))
    assert len(one.told) == 2, "what is compiled already is not announced"


def test_a_beat_carries_the_dropped_lines_since_the_last_one() -> None:
    """The front adds them to its own, which its metric shows."""
    beats: list[Heartbeat] = []
    pulse = Pulse(beats.append)
    pulse.begin("loading")
    before = logs.dropped_lines()
    now = WorkerReadings(role="decode", model_name="", load=Load(), restarts=0, tasks=0)
    logs.count(3)
    pulse.end()
    pulse.begin("loading")
    assert [one.dropped_lines for one in beats[1:]] == [3, 0]
    assert WorkerMetrics(lambda: now).value("effuse_log_lines_dropped_total") == before + 3


def test_a_process_that_a_signal_stopped_is_found_out_sooner_in_any_phase() -> None:
    for phase in ("serving", "compiling", "loading"):
        stopped = replace(Progress.begin(0.0), is_ready=True, phase=phase)
        assert verdict(stopped, 0.75, LIMITS, is_stopped=True) is None
        assert "a signal stopped" in (verdict(stopped, 0.8, LIMITS, is_stopped=True) or "")
        assert verdict(stopped, 0.8, LIMITS) is None


def test_a_stopped_process_is_told_from_one_that_runs_or_is_gone() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert not is_stopped_by_signal(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped_by_signal(child.pid)
    finally:
        child.kill()
        child.wait(10)
    assert not is_stopped_by_signal(child.pid)
