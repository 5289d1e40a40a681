"""Stop strings in a stream of text: found across its pieces, held back until decided, cut exactly.

Pure. Of several that occur, the one that is complete first ends the answer, and of those that are
complete at the same place the longest; so the outcome does not depend on how the text was cut into
pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Follows one answer."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes the next piece; returns what is decided now to be part of the answer.

        After a match (`matched` is set) nothing more is part of it."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text is over: returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
