"""Whether it is worth asking Redis now: after failures, callers are refused for a growing while.

A value with an injected clock; it asks nothing itself.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Circuit:
    """Counts failures in a row; refuses for `first_s` after the first, doubling to `most_s`."""

    now: Callable[[], float]  # monotonic seconds
    first_s: float = 0.1
    most_s: float = 2.0
    failures: int = 0
    open_until: float = 0.0

    @property
    def is_open(self) -> bool:
        """True while nobody should ask."""
        return self.now() < self.open_until

    def succeeded(self) -> None:
        """An answer came."""
        self.failures = 0
        self.open_until = 0.0

    def failed(self) -> None:
        """None came."""
        pause = min(self.first_s * 2.0**self.failures, self.most_s)
        self.failures = min(self.failures + 1, 32)
        self.open_until = self.now() + pause
