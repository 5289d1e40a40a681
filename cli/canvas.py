"""What a streamed answer looks like at one moment: final text, then the blocks in flight.

Pure: events go in, lines and spans come out. Drawing on a terminal is `watch.py`'s.
"""

from dataclasses import dataclass, field
from typing import Literal

from effuse.v1 import generation_pb2

MASK = "\u2591"

Style = Literal["final", "draft", "mask"]


@dataclass(slots=True)
class Canvas:
    """The state that the events so far have led to."""

    text: str = ""
    num_tokens: int = 0
    forward_passes: int = 0
    _drafts: dict[int, str] = field(default_factory=dict)

    def commit(self, commit: generation_pb2.BlockCommit) -> None:
        """Final text was added; drafts it covers are over."""
        self.text += commit.text
        self.num_tokens = commit.token_offset + commit.num_tokens
        self.forward_passes = commit.forward_passes
        self._drafts = {at: text for at, text in self._drafts.items() if at >= self.num_tokens}

    def draft(self, draft: generation_pb2.BlockDraft) -> None:
        """A block in flight changed."""
        self._drafts[draft.token_offset] = draft.text

    def finish(self) -> None:
        """The answer ended; blocks behind its end are dropped."""
        self._drafts.clear()

    def blocks(self) -> list[str]:
        """Text of the blocks in flight, in order, masks shown as shades."""
        return [self._drafts[at] for at in sorted(self._drafts)]

    def spans(self) -> list[tuple[str, Style]]:
        """Everything in order, cut where the style changes."""
        spans: list[tuple[str, Style]] = [(self.text, "final")] if self.text else []
        for block in self.blocks():
            spans.extend(_cut(block))
        return spans

    def line(self) -> str:
        """All of it on one line; a bar stands before each block in flight."""
        return "|".join([self.text, *self.blocks()]).replace("\n", " / ")


def _cut(block: str) -> list[tuple[str, Style]]:
    spans: list[tuple[str, Style]] = []
    for character in block:
        style: Style = "mask" if character == MASK else "draft"
        if spans and spans[-1][1] == style:
            spans[-1] = (spans[-1][0] + character, style)
        else:
            spans.append((character, style))
    return spans
