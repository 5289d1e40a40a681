"""`effuse up` once its flags are checked: starts the fleet, watches over it, and ends it."""

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from effuse.cli import page
from effuse.cli.fleet import Fleet, FleetError
from effuse.cli.greeting import asks_who_calls, greeting
from effuse.cli.keeper import LOG, Rolling, watch_over
from effuse.cli.screen import Screen, columns


@dataclass(frozen=True, slots=True, kw_only=True)
class UpView:
    """The visible parts of the fleet."""

    quiet: bool = False  # its logs stay in their files
    verbose: bool = False  # all of its logs are shown, and all that is known of it
    page_port: int | None = None  # where the page about it is; None serves none


def run(fleet: Fleet, view: UpView, screen: Screen) -> int:
    """Start the fleet, watch over it until it is told to end; the exit status."""
    rolling = Rolling(fleet)
    signal.signal(signal.SIGUSR1, lambda *_: rolling.ask())
    shows_logs = view.verbose and not view.quiet
    try:
        with screen:
            fleet.start()
        with _page(fleet, view) as page_address:
            width = columns() if sys.stdout.isatty() else None
            _say(greeting(fleet, page_address, width=width, verbose=view.verbose))
            watch_over(fleet, rolling, shows_logs=shows_logs)
    except FleetError as error:
        LOG.error("%s", error.why if shows_logs else error)
        return 1
    except OSError as error:
        LOG.error("%s", error)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        stop(fleet)


def stop(fleet: Fleet) -> None:
    """End the fleet once running requests have ended; at a second signal, immediately."""
    is_told_again = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_told_again.set())
    # a shell passes on a signal that it received itself
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if fleet.processes:
        _say(["effuse up: stopping after running requests end; press Ctrl-C again to stop now"])
    fleet.stop(is_told_again.is_set)


def _say(lines: Sequence[str]) -> None:
    """With one write: on unbuffered output a log line could come before the line end."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


@contextmanager
def _page(fleet: Fleet, view: UpView) -> Iterator[str | None]:
    """Serves the page about it; yields its address. Raises OSError.

    Every client that reaches the page may look at it, so there is none if the fleet requires
    tokens.
    """
    if view.page_port is None or asks_who_calls(fleet.config):
        yield None
        return
    source = page.PageSource(fleet.address, fleet.metrics)
    with page.served(source, view.page_port) as address:
        fleet.tell_page(address)
        yield address
