"""The text of one answer as it grows: characters complete, stop strings found, tokens counted.

Pure. Joins `detokenizer.py` and `stop.py`; which tokens arrive is `delivery.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from effuse.router.detokenizer import Decoder, Detokenizer
from effuse.router.stop import StopMatcher


class Answer:
    """One answer. `num_tokens` counts up to and with the token that completed a stop string."""

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decoder)
        self._matcher = StopMatcher(stops) if stops else None
        self.num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        """A stop string has ended it."""
        return self._matcher is not None and self._matcher.matched is not None

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is decided by them.

        Once stopped, the rest of `token_ids` is not counted and adds nothing."""
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids)
        text = ""
        for token_id in token_ids:
            # One at a time, so that it is known which token completed the string.
            if self.is_stopped:
                break
            self.num_tokens += 1
            text += self._matcher.push(self._detokenizer.push([token_id]))
        return text

    def flush(self) -> str:
        """The answer is over: returns the text that was held back; may find a stop string yet."""
        if self.is_stopped:
            return ""
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text
        return self._matcher.push(text) + self._matcher.flush()
