"""Draws a streamed answer: blocks filling in live in a terminal, one plain line a change elsewhere.

Not here: what the answer is (`canvas.py`), who asked for it (`client.py`).
"""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from effuse.cli.canvas import Canvas, Style
from effuse.client.answer import Event

_STYLES: dict[Style, str] = {"final": "bold", "draft": "cyan", "mask": "dim"}


@contextlib.contextmanager
def watch(console: Console, indent: int = 2) -> Iterator[Callable[[Event], None]]:
    """Gives the function to hand every event of one answer to."""
    canvas = Canvas()
    if not console.is_terminal:
        yield lambda event: _print_change(console, canvas, event, indent)
        return
    with Live(console=console, refresh_per_second=30, transient=False) as live:

        def show(event: Event) -> None:
            apply(canvas, event)
            live.update(_draw(canvas, indent))

        yield show


def apply(canvas: Canvas, event: Event) -> None:
    """Let one event change the canvas."""
    if event.HasField("commit"):
        canvas.commit(event.commit)
    elif event.HasField("draft"):
        canvas.draft(event.draft)
    else:
        canvas.finish()


def _print_change(console: Console, canvas: Canvas, event: Event, indent: int) -> None:
    before = canvas.line()
    apply(canvas, event)
    if canvas.line() != before:
        console.print(" " * indent + canvas.line(), markup=False, highlight=False, soft_wrap=True)


def _draw(canvas: Canvas, indent: int) -> Text:
    drawn = Text()
    for text, style in canvas.spans():
        drawn.append(text, _STYLES[style])
    pad = " " * indent
    return Text(pad) + Text("\n" + pad).join(drawn.split("\n"))
