"""How an engine shows progress, and how its front judges it: values, with the clock as argument.

A heartbeat is sent in each iteration of the loop, within a long forward, and before a long silent
phase: loading, capturing, compiling. All of them come from the thread that does the work, because a
separate one would beat for a loop that hangs.

Liveness is not enough: a loop may run without progress. Nor does silence always mean a hang: long
work is announced as a phase with its own limit, and a model with slow steps gets proportionally
more time. `Backoff` gives the time that a front waits before it starts the next engine.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

from effuse.placement.records import Load
from effuse.telemetry import logs
from effuse.worker.messages import Heartbeat, Phase

LOG = logging.getLogger(__name__)

_BEAT_CHANGED_S = 0.05  # a changed load is sent this soon
_BEAT_S = 0.5
_COMPILING_S = 180.0  # Triton needs up to a minute for a kernel, and FlexAttention for a length
_STOPPED_PART = 4  # share of the time that other engines may be silent
_STEPS_PATIENCE = 10  # an engine may be silent for this many of its steps
BROKEN_STATUS: Final[Mapping[str, int]] = {"died": 70, "killed": 71, "stopped": 72}
"""Exit status of an engine that ends because of one of its ranks, by what became of the rank."""
_ENDINGS = {-signal.SIGKILL: "killed", **{code: how for how, code in BROKEN_STATUS.items()}}

_FORGETTING = 0.1  # weight of the newest step in the expected time; a longer one counts immediately


class EngineEnded(Exception):
    """The engine process is gone, or never became ready."""

    def __init__(self, message: str, *, permanent: bool = False, ending: str = "died") -> None:
        super().__init__(message)
        self.permanent = permanent  # starting another one will not help
        self.ending = ending  # or "killed", or "hung", or "stopped"


class GaveUp(Exception):
    """No engine can be started; the message has the reason."""


class GroupBroken(RuntimeError):
    """A rank has ended, or runs other commands than the leader sent."""


class Pulse:
    """Counts the heartbeats of one engine, and sends them with `send`, which never waits.

    Without `send` nothing watches the engine. Belongs to the thread that makes it. `now` is a
    monotonic clock in seconds.
    """

    def __init__(
        self,
        send: Callable[[Heartbeat], None] | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_watched = send is not None
        self._send = send or (lambda _: None)
        self._now = now
        self._thread = threading.get_ident()
        # Called about as often as beats are sent, for work that may happen within a long step.
        self.meanwhile: Callable[[], None] = lambda: None
        self._phases: list[Phase] = []  # that contain each other
        self._loops = 0
        self._marks = 0
        self._sent = Load()
        self._sent_at = float("-inf")
        self._dropped = 0  # lines of dropped output in the last beat

    def turn(self, load: Load, *, has_end: bool) -> Heartbeat | None:
        """Records a turn of the loop; returns a beat, if one is due.

        With `has_end` an attempt has ended in this turn: a changed load is due before its end is
        sent.
        """
        self._loops += 1
        self._phases.clear()  # also those that an error has left open
        since_s = self._now() - self._sent_at
        has_changed = load != self._sent and (has_end or since_s >= _BEAT_CHANGED_S)
        if not has_changed and since_s < _BEAT_S:
            return None
        self._sent = load
        return self._beat()

    def mark(self, _layer: int = 0) -> None:
        """A part of a long step is done, such as a layer of a forward. Costs almost nothing."""
        self._marks += 1
        if self._now() - self._sent_at >= _BEAT_S:
            self._send(self._beat())
            self.meanwhile()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Reports that `phase` begins and, at its end, that the previous one continues."""
        self.begin(phase)
        try:
            yield
        finally:
            self.end()

    def begin(self, phase: Phase) -> None:
        """Reports that `phase` begins within the current one. Has no effect from another thread,
        whose work does not block this one.
        """
        if threading.get_ident() == self._thread:
            self._phases.append(phase)
            self._send(self._beat())

    def end(self) -> None:
        """Reports that the last begun phase has ended."""
        if threading.get_ident() == self._thread and self._phases:
            self._phases.pop()
            self._send(self._beat())

    def _beat(self) -> Heartbeat:
        self._sent_at = self._now()
        phase = self._phases[-1] if self._phases else "serving"
        before, self._dropped = self._dropped, logs.dropped_lines()
        return Heartbeat(
            loops=self._loops,
            marks=self._marks,
            phase=phase,
            load=self._sent,
            dropped_lines=self._dropped - before,
        )


def ended_by(status: int) -> EngineEnded:
    """How an engine ended, by the exit status of its process."""
    how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    return EngineEnded(f"the engine {how}", ending=_ENDINGS.get(status, "died"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long an engine may show no progress, in seconds."""

    startup_s: float  # from its start until it is ready; at any time while loading or capturing
    serving_s: float  # or ten of its steps, if that is longer
    compiling_s: float = _COMPILING_S

    @property
    def stopped_s(self) -> float:
        """How long an engine stopped by a signal may be silent, in any phase."""
        return self.serving_s / _STOPPED_PART

    def silence_s(self, progress: "Progress") -> float:
        if progress.phase == "serving":
            return max(self.serving_s, _STEPS_PATIENCE * progress.step_s)
        return self.compiling_s if progress.phase == "compiling" else self.startup_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The known progress of an engine, in seconds of one monotonic clock."""

    began_at: float
    looked_at: float  # the last check
    beat_at: float  # the last heartbeat
    moved_at: float  # the last progress of work, or the last time without work
    is_ready: bool = False
    phase: Phase = "loading"
    loops: int = 0
    marks: int = 0
    steps: int = 0
    runnable: int = 0
    step_s: float = 0.0  # the expected time between two signs of work

    @classmethod
    def begin(cls, now: float) -> "Progress":
        return cls(began_at=now, looked_at=now, beat_at=now, moved_at=now)


def look(progress: Progress, now: float, patience_s: float) -> tuple[Progress, float]:
    """Returns the state at this check, and for how many seconds this process itself was stopped.

    There is a check at least every `patience_s`. If this one comes far later, our process or the
    whole machine was stopped and received no messages, so that time is not the engine's.
    """
    late_s = now - progress.looked_at - patience_s
    stood_still_s = late_s if late_s > patience_s else 0.0
    looked = replace(
        progress,
        looked_at=now,
        began_at=progress.began_at + stood_still_s,
        beat_at=progress.beat_at + stood_still_s,
        moved_at=progress.moved_at + stood_still_s,
    )
    return looked, stood_still_s


def observe(progress: Progress, beat: Heartbeat, now: float) -> Progress:
    signs = beat.load.steps - progress.steps + beat.marks - progress.marks
    changes_phase = beat.phase != progress.phase
    is_alive = changes_phase or signs > 0 or beat.loops != progress.loops
    has_moved = changes_phase or signs > 0 or beat.load.runnable == 0
    step_s = progress.step_s
    if signs > 0 and progress.runnable and not changes_phase:
        newest_s = (now - progress.moved_at) / signs
        step_s = max(newest_s, step_s + _FORGETTING * (newest_s - step_s))
    return replace(
        progress,
        phase=beat.phase,
        loops=beat.loops,
        marks=beat.marks,
        steps=beat.load.steps,
        runnable=beat.load.runnable,
        step_s=step_s,
        beat_at=now if is_alive else progress.beat_at,
        moved_at=now if has_moved else progress.moved_at,
    )


def verdict(
    progress: Progress, now: float, limits: Limits, *, is_stopped: bool = False
) -> str | None:
    """Returns why the engine counts as hung; None while it does not. `is_stopped`: a signal has
    stopped its process, which no load of the machine does."""
    silent_s, idle_s = now - progress.beat_at, now - progress.moved_at
    if is_stopped and silent_s > limits.stopped_s:
        why = "because a signal stopped its process"
        return f"its loop has not run for {silent_s:.1f} s, {why}"
    if not progress.is_ready and now - progress.began_at > limits.startup_s:
        return f"it was not ready after {limits.startup_s:g} s; its last phase was {progress.phase}"
    limit_s = limits.silence_s(progress)
    if silent_s > limit_s:
        if progress.phase == "serving":
            return f"its loop has not run for {silent_s:.1f} s"
        return f"it has been {progress.phase} for {silent_s:.1f} s"
    if progress.runnable and idle_s > limit_s:
        return (
            f"{progress.runnable} requests could continue, but the engine made no step for "
            f"{idle_s:.1f} s"
        )
    return None


@dataclass(slots=True, kw_only=True)
class PeerSilence:
    """How long a process on another host has sent nothing, in seconds of one monotonic clock.

    `is_over` is called every `look_s`. If it is called far later, this process itself was stopped
    and received nothing, so that time does not count.
    """

    limit_s: float
    look_s: float
    received_at: float
    looked_at: float

    @classmethod
    def begin(cls, now: float, limit_s: float, look_s: float) -> "PeerSilence":
        return cls(limit_s=limit_s, look_s=look_s, received_at=now, looked_at=now)

    def is_over(self, now: float) -> bool:
        """Whether the process was silent for too long."""
        late_s = now - self.looked_at - self.look_s
        if late_s > self.look_s:
            self.received_at += late_s
        self.looked_at = now
        return now - self.received_at > self.limit_s


def is_stopped_by_signal(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped the process, from Linux's /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # it has ended
        return False
    return status.rpartition(b")")[2].split()[:1] == [b"T"]


@dataclass(slots=True)
class Stopped:
    """Since when a signal is known to have stopped a process."""

    since: float | None = None

    def look(self, pid: int, now: float) -> float:
        """How long it has been so, in seconds; 0 while it is not."""
        self.since = (self.since or now) if is_stopped_by_signal(pid) else None
        return 0.0 if self.since is None else now - self.since


def end_process(message: str, ending: str) -> NoReturn:
    """Ends this process at once; its ranks end with it. For an engine that has a front."""
    LOG.critical("this engine ends, because its group is broken: %s", message)
    logs.leave(BROKEN_STATUS[ending])


def note_only(message: str, _ending: str) -> None:
    """Logs that the group is broken. For a process that is not ours to end."""
    LOG.error("the group of ranks is broken: %s", message)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Counts consecutive engines that never became ready or ended soon after; durations in seconds.

    Only the former are a reason to give up. A request may end a ready engine, and will be over, or
    a device may be repaired while the worker lives. An engine that served for a while and was then
    killed or frozen did not fail: the next one starts immediately, however often.
    """

    first_s: float = 0.2
    most_s: float = 10.0
    most_failures: int = 5
    steady_s: float = 60.0
    healthy_s: float = 5.0
    failures: int = 0
    early_ends: int = 0
    is_at_once: bool = False

    @property
    def is_over(self) -> bool:
        return self.failures >= self.most_failures

    @property
    def pause_s(self) -> float:
        if self.is_at_once:
            return 0.0
        # Bounded, because an engine may end early any number of times.
        doublings = min(self.failures + self.early_ends, 32)
        return min(self.first_s * 2.0**doublings, self.most_s)

    def failed(self) -> "Backoff":
        return replace(self, failures=self.failures + 1, is_at_once=False)

    def ended(self, lived_s: float, *, by_itself: bool = True) -> "Backoff":
        """An engine ended that had been ready for this long; or it was killed, or stopped."""
        if not by_itself and lived_s >= self.healthy_s:
            return replace(self, failures=0, early_ends=0, is_at_once=True)
        early_ends = 0 if lived_s >= self.steady_s else self.early_ends + 1
        return replace(self, failures=0, early_ends=early_ends, is_at_once=False)
