"""Token ids to text, piece by piece: the pieces together are the decoding of the whole at once.

Pure but for the tokenizer's own decoder. Not here: stop strings (`stop.py`), encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
MASK_GLYPH: Final = "\N{LIGHT SHADE}"


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def is_text(self, token_id: int) -> bool:
        """Whether the id stands for text: known, and not special."""

    def is_byte(self, token_id: int) -> bool:
        """Whether the id stands for one byte of a run that is judged as a whole."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids that all are text."""


class Detokenizer:
    """Follows one answer. What may still become another character is held back.

    Decoders look at neighbours (bytes join to characters, some drop the first space), so each piece
    is decoded with the ids of the piece before it, whose text is then taken off again."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []  # ids of the last complete piece, then those since
        self._settled = 0  # how many of them belong to that piece
        self._open: list[int] = []  # single bytes at the end, not yet in the window
        self._shown = 0  # characters of the window's text that were returned

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that they complete."""
        self._open += [i for i in token_ids if self._decoder.is_text(i)]
        keep = len(self._open)
        while keep and self._decoder.is_byte(self._open[keep - 1]):
            keep -= 1
        return self._complete(keep) if keep else ""

    def flush(self) -> str:
        """The ids are over: returns what was held back, as it is."""
        self._window += self._open
        self._open = []
        text = self._decoder.decode(self._window) if self._window else ""
        piece = text[self._shown :]
        self._shown = len(text)
        return piece

    def _complete(self, num_ids: int) -> str:
        """Moves the first open ids into the window and returns what they complete."""
        self._window += self._open[:num_ids]
        del self._open[:num_ids]
        text = self._decoder.decode(self._window)
        end = len(text.rstrip(REPLACEMENT)) if text.endswith(REPLACEMENT) else len(text)
        piece = text[self._shown : end]
        if end == len(text):
            self._slide()
        else:
            self._shown = max(self._shown, end)
        return piece

    def _slide(self) -> None:
        """All is returned: what came since the last complete piece is the context of the next."""
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._shown = len(self._decoder.decode(self._window))


def draft_text(decoder: Decoder, token_ids: Sequence[int], masked: Sequence[bool]) -> str:
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
