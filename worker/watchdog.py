"""Whether an engine still makes progress: a value that is told heartbeats and asked for a verdict.

Liveness is not enough: a loop may turn while the work in it stands still. Nor is silence always a
hang: what takes long by its nature is announced as a phase and has a limit of its own, and a model
whose steps are slow is given time in proportion. Pure; the clock is an argument.
"""

from dataclasses import dataclass, replace

from effuse.worker.messages import Heartbeat, Phase

_COMPILING_S = 180.0  # Triton needs up to a minute for a kernel, and FlexAttention for a length
_STEPS_PATIENCE = 10  # an engine may be silent for so many of its steps
_FORGETTING = 0.1  # share of the newest step in what is expected; a longer one counts at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long an engine may show nothing, in seconds."""

    startup_s: float  # from its start until it is ready; in loading or capturing at any time
    serving_s: float  # or ten of its steps, if that is longer
    compiling_s: float = _COMPILING_S

    def silence_s(self, progress: "Progress") -> float:
        """How long the engine may be silent in its phase."""
        if progress.phase == "serving":
            return max(self.serving_s, _STEPS_PATIENCE * progress.step_s)
        return self.compiling_s if progress.phase == "compiling" else self.startup_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What is known of an engine's progress, in seconds of one monotonic clock."""

    began_at: float
    looked_at: float  # when we looked last
    beat_at: float  # a sign of life was last seen
    moved_at: float  # work was last seen to move, or there was nothing to do
    is_ready: bool = False
    phase: Phase = "loading"
    loops: int = 0
    marks: int = 0
    steps: int = 0
    runnable: int = 0
    step_s: float = 0.0  # what we expect from one sign of work to the next

    @classmethod
    def begin(cls, now: float) -> "Progress":
        """An engine whose process has just been started."""
        return cls(began_at=now, looked_at=now, beat_at=now, moved_at=now)


def look(progress: Progress, now: float, patience_s: float) -> tuple[Progress, float]:
    """Returns what is known at this look, and for how many seconds we ourselves stood still.

    We look at least every `patience_s`. If this look comes far later, our process was stopped, or
    the whole machine was, and we heard nothing of what was said: that time is not the engine's.
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
    """Returns what is known after a heartbeat."""
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


def verdict(progress: Progress, now: float, limits: Limits) -> str | None:
    """Returns why the engine counts as hung; None while it does not."""
    silent_s, idle_s = now - progress.beat_at, now - progress.moved_at
    if not progress.is_ready and now - progress.began_at > limits.startup_s:
        return f"it was not ready after {limits.startup_s:g} s, {progress.phase} at the end"
    limit_s = limits.silence_s(progress)
    if silent_s > limit_s:
        if progress.phase == "serving":
            return f"its loop has not turned for {silent_s:.1f} s"
        return f"it has been {progress.phase} for {silent_s:.1f} s"
    if progress.runnable and idle_s > limit_s:
        return f"{progress.runnable} requests could go on, but no step was made for {idle_s:.1f} s"
    return None
