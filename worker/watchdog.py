"""Whether an engine still makes progress: a value that is told heartbeats and asked for a verdict.

Liveness is not enough: a loop may turn while the work in it stands still. Pure; the clock is an
argument.
"""

from dataclasses import dataclass, replace

from effuse.worker.messages import Heartbeat


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of an engine's progress, in seconds of one monotonic clock."""

    loops: int
    steps: int
    runnable: int
    beat_at: float  # the loop was last seen to turn
    step_at: float  # a step was last seen, or there was nothing to do

    @classmethod
    def begin(cls, now: float) -> "Progress":
        """An engine that has just said it is ready."""
        return cls(loops=-1, steps=-1, runnable=0, beat_at=now, step_at=now)


def observe(progress: Progress, beat: Heartbeat, now: float) -> Progress:
    """Returns what is known after a heartbeat."""
    turned = beat.loops != progress.loops
    moved = beat.load.steps != progress.steps or beat.load.runnable == 0
    return Progress(
        loops=beat.loops,
        steps=beat.load.steps,
        runnable=beat.load.runnable,
        beat_at=now if turned else progress.beat_at,
        step_at=now if moved else progress.step_at,
    )


def pardon(progress: Progress, stood_still_s: float) -> Progress:
    """Returns what is known, but for a time in which the watcher itself stood still and heard
    nothing of what was said."""
    return replace(
        progress,
        beat_at=progress.beat_at + stood_still_s,
        step_at=progress.step_at + stood_still_s,
    )


def verdict(progress: Progress, now: float, hang_s: float) -> str | None:
    """Returns why the engine counts as hung; None while it does not."""
    if now - progress.beat_at > hang_s:
        return f"its loop has not turned for {now - progress.beat_at:.1f} s"
    if progress.runnable and now - progress.step_at > hang_s:
        return (
            f"{progress.runnable} requests could go on, "
            f"but no step was made for {now - progress.step_at:.1f} s"
        )
    return None
