"""Token ids of an answer to its text, piece by piece, cut exactly at the stop string that ends it.

The pieces together equal the text of all ids decoded at once. Pure except for the tokenizer's own
decoder. Not here: encoding (`tokenizer.py`), which tokens are new (`request.py`)."""

from collections.abc import Sequence
from typing import Final

from effuse.router.tokenizer import Tokenizer

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
MASK_GLYPH: Final = "\N{LIGHT SHADE}"
MOST_BYTES: Final = 4
"""Of one character in UTF-8: so many may still become another one, less one."""
LONG_WINDOW: Final = 64
"""Ids after which a window is cut although its text has no end: it is decoded at each piece."""


class Detokenizer:
    """Follows one answer. Ids that may still become another character are held back.

    Decoders look at neighbours (bytes join to characters, some drop the first space). So each piece
    is decoded with the ids of the piece before it, whose text is then taken off again."""

    def __init__(self, decoder: Tokenizer) -> None:
        self._decoder = decoder
        self._window: list[int] = []  # ids of the last complete piece, then those since
        self._settled = 0  # how many of them belong to that piece
        self._open: list[int] = []  # single bytes at the end, not yet in the window
        self._shown = 0  # characters of the window's text that were returned
        self._most_window = LONG_WINDOW

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that they complete."""
        num_bytes = len(self._open)  # those that are open are bytes
        self._open += [i for i in token_ids if self._decoder.is_text(i)]
        keep = len(self._open)
        while keep > num_bytes and self._decoder.is_byte(self._open[keep - 1]):
            keep -= 1
        return self._complete_text(keep) if keep > num_bytes else ""

    def flush(self) -> str:
        """The ids are over: returns the text that was held back, unchanged."""
        piece = self.held_back()
        self._window += self._open
        self._open = []
        self._shown += len(piece)
        return piece

    def held_back(self) -> str:
        """What would be returned if the ids were over."""
        if not self._open and len(self._window) == self._settled:
            return ""  # the last piece was complete
        return self._decoder.decode(self._window + self._open)[self._shown :]

    def _complete_text(self, num_ids: int) -> str:
        """Moves the first open ids into the window and returns the text that they complete."""
        self._window += self._open[:num_ids]
        del self._open[:num_ids]
        text = self._decoder.decode(self._window)
        num_open = len(text) - len(text.rstrip(REPLACEMENT))
        end = len(text) - min(num_open, MOST_BYTES - 1)
        piece = text[self._shown : end]
        if not num_open:
            self._slide_window(text)
            return piece
        self._shown = max(self._shown, end)
        if len(self._window) >= self._most_window:
            self._cut_window(text)
        return piece

    def _cut_window(self, text: str) -> None:
        """Drops the front of a window of bytes that are no characters, at a place where its text is
        that of both parts; bytes that follow change neither that nor what was shown."""
        self._most_window = 2 * len(self._window)  # if there is no such place
        last = len(self._window) - 2 * MOST_BYTES
        for cut in range(last, last - MOST_BYTES, -1):
            front = self._decoder.decode(self._window[:cut])
            whole = front + self._decoder.decode(self._window[cut:])
            if whole == text and len(front) <= self._shown:
                self._window, self._settled = self._window[cut:], 0
                self._shown -= len(front)
                self._most_window = LONG_WINDOW
                return

    def _slide_window(self, text: str) -> None:
        """All of the window's text is returned: what came since the last complete piece is the
        context of the next."""
        if self._settled:
            self._window = self._window[self._settled :]
            text = self._decoder.decode(self._window)
        self._settled = len(self._window)
        self._shown = len(text)


class StopMatcher:
    """Finds stop strings in a stream of text, across its pieces; holds back what is undecided.

    Of several that occur, the one that is complete first ends the answer, and of those that are
    complete at the same place the longest; so the outcome does not depend on how the text was cut
    into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes the next piece; returns the text that is certain to be part of the answer.

        After a match (`matched` is set) nothing more is part of it."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        # The longest end of the text that begins a stop string is undecided.
        keep = max((_overlap_length(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text is over: returns the part that was held back."""
        held, self._held = self._held, ""
        return held


class AnswerText:
    """The text of one answer as it grows: characters complete, stop strings found, tokens counted.

    `num_tokens` counts up to and with the token that completed a stop string. Stop strings are
    looked for in what follows the first `min_tokens` tokens."""

    def __init__(self, decoder: Tokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(decoder)
        self._min_tokens = min_tokens
        self._num_free = 0  # characters of these tokens that are still to come
        self._stops = StopMatcher(stops)
        self.num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        return self.matched_stop is not None

    @property
    def matched_stop(self) -> str | None:
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is decided by them.

        Once stopped, the rest of `token_ids` is not counted and adds nothing."""
        if not self._stops.stops:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids)
        text = ""
        for token_id in token_ids:
            # One at a time, so that it is known which token completed the string.
            if self.is_stopped:
                break
            self.num_tokens += 1
            piece = self._detokenizer.push([token_id])
            if self.num_tokens <= self._min_tokens:
                text += piece
            else:
                text += self._look_for_stops(piece)
            if self.num_tokens == self._min_tokens:
                self._num_free = len(self._detokenizer.held_back())
        return text

    def flush(self) -> str:
        """The answer is over: returns the text that was held back; may find a stop string yet."""
        if self.is_stopped:
            return ""
        return self._look_for_stops(self._detokenizer.flush()) + self._stops.flush()

    def _look_for_stops(self, text: str) -> str:
        """Passes on the characters in which no stop string may begin, and searches the rest."""
        free, rest = text[: self._num_free], text[self._num_free :]
        self._num_free -= len(free)
        return free + self._stops.push(rest)


def draft_text(decoder: Tokenizer, token_ids: Sequence[int], masked: Sequence[bool]) -> str:
    """The text of a block in flight: each run between masks by itself, each mask as U+2591."""
    parts: list[str] = []
    run: list[int] = []
    for token_id, is_mask in zip(token_ids, masked, strict=True):
        if is_mask:
            parts += [decoder.decode(run) if run else "", MASK_GLYPH]
            run = []
        elif decoder.is_text(token_id):
            run.append(token_id)
    parts.append(decoder.decode(run) if run else "")
    return "".join(parts)


def _overlap_length(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
