"""Draws a streamed answer: blocks that fill in live in a terminal, otherwise one plain line for
each change.

A canvas is the answer at one moment, and is independent of the terminal.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text

from effuse.client.answer import Event

MASK = "\u2591"

FRAMES_A_SECOND = 15
_MOST_BEHIND = 15  # frames; if more are waiting, some are left out

Style = Literal["final", "draft", "mask"]
_STYLES: dict[Style, str] = {"final": "bold", "draft": "cyan", "mask": "dim"}


@dataclass(slots=True)
class Canvas:
    """Final text, then the blocks in flight, after the events so far."""

    text: str = ""
    num_tokens: int = 0
    _drafts: dict[int, str] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        if event.HasField("echo"):
            self.text = event.echo.text  # the prompt comes first
        elif event.HasField("commit"):
            commit = event.commit
            self.text += commit.text
            self.num_tokens = commit.token_offset + commit.num_tokens
            # Final text replaces the drafts that it covers.
            self._drafts = {at: text for at, text in self._drafts.items() if at >= self.num_tokens}
        elif event.HasField("progress"):
            done, of = event.progress.computed_tokens, event.progress.prompt_tokens
            self._drafts = {0: f"{done} of {of} tokens of the prompt"}
        elif event.HasField("draft"):
            self._drafts[event.draft.token_offset] = event.draft.text
        else:  # the answer ended; blocks after its end are dropped
            self._drafts.clear()

    def blocks(self) -> list[str]:
        """Text of the blocks in flight, in order, with masks as shades."""
        return [self._drafts[at] for at in sorted(self._drafts)]

    def spans(self) -> list[tuple[str, Style]]:
        spans: list[tuple[str, Style]] = [(self.text, "final")] if self.text else []
        for block in self.blocks():
            spans.extend(_cut(block))
        return spans

    def line(self) -> str:
        """Everything on one line, with a bar before each block in flight."""
        return "|".join([self.text, *self.blocks()]).replace("\n", " / ")


@contextlib.contextmanager
def watch(console: Console, indent: int = 2) -> Iterator[Callable[[Event], None]]:
    """Yields the function that takes every event of one answer."""
    canvas = Canvas()
    if not console.is_terminal:
        yield lambda event: _print_change(console, canvas, event, indent)
        return
    film = Film()
    with Live(
        console=console, get_renderable=film.next_frame, refresh_per_second=FRAMES_A_SECOND
    ) as live:

        def show(event: Event) -> None:
            canvas.apply(event)
            film.frames.append(_draw(canvas, indent))

        yield show
        while film.is_behind and live.is_started:
            time.sleep(1 / FRAMES_A_SECOND)


class Film:
    """The drawn frames, shown one after another. A small model changes its answer too fast for the
    eye, and the reader of events must not wait."""

    def __init__(self) -> None:
        self.frames: deque[Text] = deque()
        self._shown = Text()

    @property
    def is_behind(self) -> bool:
        return bool(self.frames)

    def next_frame(self) -> Text:
        for _ in range(max(1, len(self.frames) - _MOST_BEHIND)):
            if self.frames:
                self._shown = self.frames.popleft()
        return self._shown


def _print_change(console: Console, canvas: Canvas, event: Event, indent: int) -> None:
    before = canvas.line()
    canvas.apply(event)
    if canvas.line() != before:
        console.print(" " * indent + canvas.line(), markup=False, highlight=False, soft_wrap=True)


def _draw(canvas: Canvas, indent: int) -> Text:
    drawn = Text()
    for text, style in canvas.spans():
        drawn.append(text, _STYLES[style])
    pad = " " * indent
    return Text(pad) + Text("\n" + pad).join(drawn.split("\n"))


def _cut(block: str) -> list[tuple[str, Style]]:
    spans: list[tuple[str, Style]] = []
    for character in block:
        style: Style = "mask" if character == MASK else "draft"
        if spans and spans[-1][1] == style:
            spans[-1] = (spans[-1][0] + character, style)
        else:
            spans.append((character, style))
    return spans
