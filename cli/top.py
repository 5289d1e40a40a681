"""`effuse top`: workers and running requests of a fleet, drawn again as they change.

At a terminal until Ctrl-C; elsewhere once. There are no keys.
"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from effuse.cli.arguments import add_credentials, command, credentials_of, number, target
from effuse.cli.look import Look, cells, looks
from effuse.cli.status import worker_lines, worker_table
from effuse.client.options import DEFAULT_TARGET
from effuse.v1 import monitor_pb2

_FINAL = "\u25a0"
_HEADINGS = ("request", "state", "on", "try", "age", "tokens", "blocks")


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 where it drew once and no router answered."""
    asked = parse(argv)
    console = Console(markup=False, emoji=False, highlight=False)
    if asked.once or not console.is_terminal:
        look = next(looks(asked.target, asked.interval, asked.credentials))
        if look.error:
            print(f"effuse top: {look.error}", file=sys.stderr)
            return 1
        console.width = max(console.width, 160)
        console.print(draw(look))
        return 0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for look in looks(asked.target, asked.interval, asked.credentials):
            live.update(draw(look), refresh=True)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = command("top", "Watch a fleet's workers and running requests, until Ctrl-C.")
    add = parser.add_argument
    add("--target", type=target, default=DEFAULT_TARGET, metavar="HOST:PORT", help="the router")
    add("--interval", type=number(0.05, 60), default=0.25, metavar="S",
        help="between two drawings, 0.05 to 60 (default: 0.25)")  # fmt: skip
    add("--once", action="store_true", help="draw once, as where nobody sits at a terminal")
    add_credentials(parser)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """What the flags say; exits with status 2 on bad ones."""
    parser = make_parser()
    found = parser.parse_args(argv)
    found.credentials = credentials_of(parser, found)
    return found


def draw(look: Look) -> RenderableType:
    """The whole picture."""
    if look.error:
        return Text(look.error, style="bold red")
    running = look.requests or monitor_pb2.WatchRequestsResponse()
    table = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, no_wrap=True)
    for request in running.requests:
        table.add_row(*_cells(request))
    told = f"{running.num_running} requests run, {running.num_waiting} wait"
    lines = [Text(line) for line in worker_lines(look.workers)]
    return Group(worker_table(look.workers), *lines, Text(f"\n{told}", style="bold"), table)


def _cells(request: monitor_pb2.RunningRequest) -> tuple[str, ...]:
    workers = [one for one in (request.prefill_worker, request.decode_worker) if one]
    return (
        request.name,
        request.state,
        " > ".join(workers),
        str(request.attempt),
        f"{request.age.ToTimedelta().total_seconds():.1f} s",
        f"{request.num_tokens} of {request.max_tokens}",
        blocks_line(request),
    )


def blocks_line(request: monitor_pb2.RunningRequest) -> str:
    """A square for each block that is final, then the blocks in flight, token by token."""
    final = -(-request.num_tokens // request.block_size) if request.block_size else 0
    return " ".join([*([_FINAL * final] if final else []), *map(cells, request.blocks)])
