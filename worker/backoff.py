"""How long a front waits before it starts the next engine. Pure: values in, values out."""

from dataclasses import dataclass, replace


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
        """True once another attempt is useless."""
        return self.failures >= self.most_failures

    @property
    def pause_s(self) -> float:
        """The wait before the next start."""
        if self.is_at_once:
            return 0.0
        # Bounded, because an engine may end early any number of times.
        doublings = min(self.failures + self.early_ends, 32)
        return min(self.first_s * 2.0**doublings, self.most_s)

    def failed(self) -> "Backoff":
        """An engine did not become ready."""
        return replace(self, failures=self.failures + 1, is_at_once=False)

    def ended(self, lived_s: float, *, by_itself: bool = True) -> "Backoff":
        """An engine ended that had been ready for this long; or it was killed, or stopped."""
        if not by_itself and lived_s >= self.healthy_s:
            return replace(self, failures=0, early_ends=0, is_at_once=True)
        early_ends = 0 if lived_s >= self.steady_s else self.early_ends + 1
        return replace(self, failures=0, early_ends=early_ends, is_at_once=False)
