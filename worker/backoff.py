"""How long to wait before an engine is started again, and when to give up. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Counts engines that ended without ever becoming ready; durations in seconds."""

    first_s: float = 0.2
    most_s: float = 10.0
    most_failures: int = 5
    failures: int = 0

    @property
    def is_over(self) -> bool:
        """True once it is no use to go on."""
        return self.failures >= self.most_failures

    @property
    def pause_s(self) -> float:
        """The wait before the next start."""
        return min(self.first_s * 2.0**self.failures, self.most_s)

    def failed(self) -> "Backoff":
        """An engine did not become ready."""
        return Backoff(self.first_s, self.most_s, self.most_failures, self.failures + 1)

    def recovered(self) -> "Backoff":
        """An engine became ready."""
        return Backoff(self.first_s, self.most_s, self.most_failures)
