"""`effuse top`: a fleet's workers and running requests, drawn again as they change.

At a terminal it runs until q or Ctrl-C; otherwise it draws once. A narrow terminal shows only the
most important columns.
"""

import argparse
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from effuse.cli.arguments import add_router, command, credentials_of, number
from effuse.cli.process import end_as_by_ctrl_c, interruptible
from effuse.cli.status import Look, cells, fitted_table, looks, worker_lines, worker_table
from effuse.config.flags import CommandError
from effuse.v1 import monitor_pb2

FILE_WIDTH: Final = 160  # columns of a file or a pipe
_FINAL = "\u25a0"
_CUT = "\u2026"
_HEADINGS = ("request", "state", "on", "try", "age", "tokens", "blocks")
_LEAST_FIRST = ("try", "on", "age", "state")
_BLOCKS_WIDTH = 20  # columns; others are left out before blocks get less
_NAME_WIDTH = 24  # columns, for a client's own id
_PACE_S = 3.0
_KEY_S = 0.2  # seconds between checks whether top is over


class TokenPace:
    """Tokens per second over the last seconds, from a router's count of all its tokens."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._router = ""

    def add(self, now: float, reply: monitor_pb2.WatchRequestsResponse) -> None:
        """Adds a count at `now` in seconds; the count of another router starts again."""
        if reply.router != self._router or (self._seen and reply.num_tokens < self._seen[-1][1]):
            self._seen.clear()
        self._router = reply.router
        self._seen.append((now, reply.num_tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _PACE_S:
            self._seen.popleft()

    @property
    def tokens_per_s(self) -> float | None:
        """None before there are two counts."""
        if len(self._seen) < 2:
            return None
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began) if ended > began else None


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises CommandError if it drew once and no router answered."""
    parser = make_parser()
    asked = parser.parse_args(argv)
    shown = credentials_of(parser, asked)
    console = Console(markup=False, emoji=False, highlight=False)
    if asked.once or not console.is_terminal:
        look = next(looks(asked.target, asked.interval, shown))
        if look.error:
            raise CommandError(look.error)
        if not console.is_terminal:
            console.width = max(console.width, FILE_WIDTH)
        console.print(draw(look, console.width))
        return 0
    end_as_by_ctrl_c()  # otherwise SIGTERM would leave the terminal in this mode
    with _ended_by_q() as is_ended:
        try:
            with interruptible():
                _show(console, looks(asked.target, asked.interval, shown))
        except KeyboardInterrupt:
            if not is_ended.is_set():
                raise
    return 0


def _show(console: Console, views: Iterator[Look]) -> None:
    """Draws until KeyboardInterrupt."""
    ends = "q or Ctrl-C ends" if sys.stdin.isatty() else "Ctrl-C ends"
    pace = TokenPace()
    with Live(console=console, screen=True, auto_refresh=False) as live, _not_paused():
        for look in views:
            if look.requests is not None:
                pace.add(time.monotonic(), look.requests)
            drawn = draw(look, console.width, pace.tokens_per_s)
            live.update(Group(Text(ends, style="dim"), drawn), refresh=True)


@contextmanager
def _not_paused() -> Iterator[None]:
    """Ends a pause by Ctrl-S, because otherwise the remaining output would wait for Ctrl-Q."""
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal is gone
            # the second call ends only the first one's pause
            for action in (termios.TCOOFF, termios.TCOON):
                termios.tcflow(sys.stdout, action)


@contextmanager
def _ended_by_q() -> Iterator[threading.Event]:
    """Interrupts the main thread, like Ctrl-C, at the key q; sets the event before."""
    pressed, over = threading.Event(), threading.Event()
    if not sys.stdin.isatty():
        yield pressed
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    waiting = threading.Thread(target=_await_q, args=(terminal, pressed, over), daemon=True)
    tty.setcbreak(terminal)
    waiting.start()
    try:
        yield pressed
    finally:
        over.set()
        waiting.join()
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _await_q(terminal: int, pressed: threading.Event, over: threading.Event) -> None:
    main_thread = threading.main_thread().ident
    assert main_thread is not None, "it runs"
    while not over.is_set():
        if not select.select([terminal], [], [], _KEY_S)[0]:
            continue
        typed = os.read(terminal, 64)
        if not typed:  # the terminal is gone
            return
        if b"q" in typed.lower():
            pressed.set()
            signal.pthread_kill(main_thread, signal.SIGINT)
            return


def make_parser() -> argparse.ArgumentParser:
    parser = command("top", "Watch a fleet's workers and running requests; q or Ctrl-C quits.")
    add = parser.add_argument
    add("--interval", type=number(0.05, 60), default=0.25, metavar="S",
        help="seconds between updates, 0.05 to 60 (default: 0.25)")  # fmt: skip
    add("--once", action="store_true", help="print one snapshot, as without a terminal")
    add_router(parser)
    return parser


def draw(look: Look, width: int, tokens_per_s: float | None = None) -> RenderableType:
    """The whole picture for this number of columns."""
    if look.error:
        return Text(look.error, style="bold red")
    running = look.requests or monitor_pb2.WatchRequestsResponse()
    summary = f"{running.num_running} running, {running.num_waiting} waiting"
    if tokens_per_s is not None:
        summary += f", {tokens_per_s:,.0f} tokens/s"
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in worker_lines(look.workers)]
    return Group(
        Text(summary, style="bold"),
        *(Text(), worker_table(look.workers, width)),
        *(Text(), _request_table(running.requests, width)),
        *([Text(), *lines] if lines else []),
    )


def _request_table(requests: Sequence[monitor_pb2.RunningRequest], width: int) -> Table:
    """A row for each request; the blocks get the remaining columns."""
    rows = [_cells(request) for request in requests]
    table = fitted_table(_HEADINGS, rows, width, _LEAST_FIRST, flexible=_BLOCKS_WIDTH)
    kept = [_HEADINGS.index(str(column.header)) for column in table.columns[:-1]]
    others = sum(2 + max(len(row[at]) for row in (_HEADINGS, *rows)) for at in kept)
    for request, row in zip(requests, rows, strict=True):
        blocks = blocks_line(request, width - others)
        table.add_row(*(row[at] for at in kept), blocks)
    return table


def _cells(request: monitor_pb2.RunningRequest) -> tuple[str, ...]:
    """All cells of a row except its blocks."""
    workers = [one for one in (request.prefill_worker, request.decode_worker) if one]
    name = request.name
    return (
        name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}{_CUT}",
        request.state,
        " > ".join(workers),
        str(request.attempt),
        f"{request.age.ToTimedelta().total_seconds():.1f} s",
        f"{request.num_tokens} of {request.max_tokens}",
    )


def blocks_line(request: monitor_pb2.RunningRequest, width: int = FILE_WIDTH) -> str:
    """A square for each final block, then the blocks in flight, token by token.

    If that is wider than `width`, a number replaces the squares, and the end is cut off.
    """
    final = -(-request.num_tokens // request.block_size) if request.block_size else 0
    in_flight = [*map(cells, request.blocks)]
    line = " ".join([*([_FINAL * final] if final else []), *in_flight])
    if len(line) > width and final > 1:
        line = " ".join([f"{final}{_FINAL}", *in_flight])
    return line if len(line) <= width else f"{line[: max(0, width - 1)]}{_CUT}"
