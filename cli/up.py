"""`effuse up`: a whole fleet on this machine until Ctrl-C or SIGTERM.

Flags that are not its own are those of the processes it starts (their `config.py`), checked here
and passed on to whichever takes them.
A process that ends by itself is reported and started again, ever more slowly if it keeps ending.
SIGUSR1 replaces all processes, one after the other, with no request lost.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from effuse.cli.arguments import command, directory, redis_url, whole
from effuse.cli.commands import LOOPBACK, value_of
from effuse.cli.fleet import Fleet, FleetConfig, FleetError
from effuse.cli.gpus import VARIABLE, fleet_gpus, gpu_list, gpus_here
from effuse.cli.process import LogFollower, Process
from effuse.cli.status import taken_defaults
from effuse.client.client import Client
from effuse.config.flags import add_flags
from effuse.decode_worker.config import DecodeConfig
from effuse.models.config import ModelConfig
from effuse.models.defaults import read_defaults
from effuse.prefill_worker.config import PrefillConfig
from effuse.protos.errors import EffuseError
from effuse.router.config import RouterConfig
from effuse.worker.config import WorkerConfig

_POLL_S = 0.2
_WELL_S = 60.0  # a process that ran for so long did not fail at its start
_MOST_PAUSE_S = 60.0
_ASK_S = 5.0  # the longest that the router may take to describe its models
_OVER = object()
# Flags of a process that the fleet itself gives to each of them.
_GIVEN = {"worker_id", "ready_file", "share_port", "advertise_host", "connector_host"}
# Both have it, but workers on one machine cannot share a port.
_ROUTERS_ALONE = {"metrics_port", "metrics_host"}

Config = WorkerConfig | RouterConfig


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Flags that are passed on to the same processes."""

    title: str
    config: type[Config]  # which checks them
    names: set[str]  # its fields that they set


@dataclass(frozen=True, slots=True)
class FlagGroups:
    """All flags that are passed on, by the processes that take them."""

    every: FlagGroup
    router: FlagGroup
    workers: FlagGroup
    prefill: FlagGroup
    decode: FlagGroup

    def all(self) -> tuple[FlagGroup, ...]:
        """The groups in the order in which help lists them."""
        return (self.every, self.router, self.workers, self.prefill, self.decode)


class Restarts:
    """When a process that has ended is started again: at once, and if it ends again within a minute
    of being ready, after 1, 2, 4 .. 60 s. Each process is counted by itself. Times are seconds of
    one clock."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._back_at: dict[str, float] = {}

    def ended(self, name: str, now: float) -> float | None:
        """Records that a process has ended. Returns seconds until it is started again; None where
        that is planned already."""
        if name in self._due:
            return None
        if now - self._back_at.get(name, now) > _WELL_S:
            self._in_a_row[name] = 0
        before = self._in_a_row.get(name, 0)
        pause_s = min(_MOST_PAUSE_S, 2.0 ** (before - 1)) if before else 0.0
        self._in_a_row[name] = before + 1
        self._due[name] = now + pause_s
        return pause_s

    def due(self, now: float) -> list[str]:
        """Names of the processes to be started now; each is returned once."""
        names = [name for name, at in self._due.items() if at <= now]
        for name in names:
            del self._due[name]
        return names

    def back(self, name: str, now: float) -> None:
        """Records that a process is ready again."""
        self._back_at[name] = now


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit status."""
    config, quiet = parse(argv)
    try:
        refuse_early(config)
    except ValueError as error:
        print(f"effuse up: {error}", file=sys.stderr)
        return 2
    # SIGTERM ends the fleet exactly as Ctrl-C does, also while it starts.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        fleet = Fleet(config)
    except OSError as error:
        print(f"effuse up: {error}", file=sys.stderr)
        return 2
    if quiet:
        return run(fleet)
    with LogFollower(fleet.log_dir, sys.stderr):
        return run(fleet)


def refuse_early(config: FleetConfig) -> None:
    """Raises ValueError for a checkpoint that cannot be served, before any process is started."""
    if config.model is not None:
        read_defaults(config.model, ModelConfig.from_dir(config.model))


def parse(argv: Sequence[str]) -> tuple[FleetConfig, bool]:
    """What to start, and whether to keep the logs to files; exits with status 2 on bad flags."""
    parser = command("up", "Start a fleet on this machine.")
    _add_own(parser)
    found, rest = parser.parse_known_args([word for word in argv if word not in ("-h", "--help")])
    groups = _groups(set(vars(found)))
    found = _check_flags(parser, argv, rest, groups)
    try:
        return _config(found, rest, groups), found.quiet
    except ValueError as error:
        parser.error(str(error))


def _config(found: argparse.Namespace, rest: Sequence[str], groups: FlagGroups) -> FleetConfig:
    """The fleet that the flags describe. Raises ValueError where GPUs do not suffice."""

    def words(*wanted: FlagGroup) -> tuple[str, ...]:
        return _words_of(wanted, rest, groups.all())

    asked = _asks_for_gpus(found)
    # Named GPUs mean --device cuda, so that one that cannot be used is an error, and the CPU does
    # not compute in its place. A --device that was given comes later and wins.
    device = ("--device", "cuda") if asked else ()
    return FleetConfig(
        prefill=found.prefill,
        decode=found.decode,
        routers=found.routers,
        connector=found.connector,
        model=found.model,
        adapter=found.adapter,
        host=found.host,
        port=found.port,
        redis_url=found.redis_url,
        name=found.fleet,
        router_flags=words(groups.every, groups.router),
        worker_flags=(*device, *words(groups.every, groups.workers)),
        prefill_flags=words(groups.prefill),
        decode_flags=words(groups.decode),
        gpus=_gpus(found, asked),
        prefill_gpus=found.prefill_gpus,
        decode_gpus=found.decode_gpus,
        gpu_sharing=found.gpu_sharing,
        log_dir=found.log_dir,
    )


def _asks_for_gpus(found: argparse.Namespace) -> bool:
    return bool(found.gpus or found.prefill_gpus or found.decode_gpus)


def _gpus(found: argparse.Namespace, asked: bool) -> tuple[str, ...] | None:
    """The GPUs that the fleet may use; None on the CPU, as on a machine without GPUs.

    Raises ValueError where there are none of those asked for.
    """
    if found.device == "cpu" and not asked:
        return None
    here = gpus_here()
    if not here and not asked:
        return None
    if not here:
        hidden = f" ({VARIABLE} is {os.environ[VARIABLE]!r})" if VARIABLE in os.environ else ""
        raise ValueError(f"--gpus: no GPU was found on this machine{hidden}")
    return fleet_gpus(here, found.gpus, (*(found.prefill_gpus or ()), *(found.decode_gpus or ())))


def _add_own(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prefill", type=whole(0, 64), default=1, metavar="X",
        help="prefill workers; 0 lets decode workers prefill (default: 1)")  # fmt: skip
    add("--decode", type=whole(1, 64), default=1, metavar="Y", help="decode workers (default: 1)")
    add("--routers", type=whole(1, 16), default=1, metavar="Z",
        help="routers, which share the port (default: 1)")  # fmt: skip
    add("--connector", choices=("nixl", "zmq"), default="zmq",
        help="how KV pages move (default: zmq)")  # fmt: skip
    add("--model", type=directory, metavar="DIR", help="checkpoint; the bundled model if absent")
    add("--adapter", type=directory, metavar="DIR", help="LoRA adapter, merged into the weights")
    add("--host", default=LOOPBACK,
        help="the routers' address; all else stays on loopback (default: 127.0.0.1)")  # fmt: skip
    add("--port", type=whole(0, 65535), default=50051,
        help="the routers' port; 0 is any free one (default: 50051)")  # fmt: skip
    add("--redis-url", type=redis_url, metavar="URL",
        help="a running Redis; an embedded one is started if absent")  # fmt: skip
    add("--fleet", metavar="NAME", help="namespace in Redis; a new one if absent")
    add("--log-dir", type=Path, metavar="DIR", help="keep one log file a process here")
    add("--quiet", action="store_true", help="do not show the processes' logs")
    _add_gpus(parser)


def _add_gpus(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "GPUs, by number or id as in CUDA_VISIBLE_DEVICES", "Each worker gets one of its own."
    )
    add = group.add_argument
    add("--gpus", type=gpu_list, metavar="0,1,..",
        help="GPUs to use, prefill workers first (default: all that are here)")  # fmt: skip
    add("--prefill-gpus", type=gpu_list, metavar="0,..", help="one for each prefill worker")
    add("--decode-gpus", type=gpu_list, metavar="1,..", help="one for each decode worker")
    add("--gpu-sharing", action="store_true",
        help="let several workers share a GPU where there are too few, and divide "
        "--gpu-memory-utilization among them")  # fmt: skip


def _groups(own: set[str]) -> FlagGroups:
    """Flags of the processes by who takes them, less those of `up` itself."""
    worker, router, prefill, decode = (
        {one.name for one in fields(config)}
        for config in (WorkerConfig, RouterConfig, PrefillConfig, DecodeConfig)
    )
    both = (worker & router) - own - _GIVEN - _ROUTERS_ALONE
    return FlagGroups(
        every=FlagGroup("flags of every process", WorkerConfig, both),
        router=FlagGroup(
            "flags of the routers",
            RouterConfig,
            (router - worker - own - _GIVEN) | _ROUTERS_ALONE,
        ),
        workers=FlagGroup("flags of every worker", WorkerConfig, worker - router - own - _GIVEN),
        prefill=FlagGroup("flags of prefill workers", PrefillConfig, prefill - worker),
        decode=FlagGroup("flags of decode workers", DecodeConfig, decode - worker),
    )


def _check_flags(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    rest: Sequence[str],
    groups: FlagGroups,
) -> argparse.Namespace:
    """Adds these flags to `parser`, so that help and errors show every flag that is taken. Returns
    the values of all; exits with status 2 on a bad one."""
    for flag in rest:
        if flag.split("=")[0].removeprefix("--").replace("-", "_") in _GIVEN:
            parser.error(f"{flag}: not a flag of `effuse up`, which sets it for each process")
    for group in groups.all():
        add_flags(parser.add_argument_group(group.title), group.config, only=group.names)
    found = parser.parse_args(argv)
    try:
        for group in groups.all():
            names = group.names | groups.every.names  # may be judged together
            if group is groups.router:
                names = names | {"host"}  # which is the routers' alone
            group.config(**{name: getattr(found, name) for name in names})
    except ValueError as error:
        parser.error(str(error))
    return found


def _words_of(
    wanted: Sequence[FlagGroup], rest: Sequence[str], groups: Sequence[FlagGroup]
) -> tuple[str, ...]:
    """The words of `rest` that belong to the wanted groups: those that no other
    group's flag takes."""
    others = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for group in groups:
        if group not in wanted:
            add_flags(others, group.config, only=group.names)
    return tuple(others.parse_known_args(rest)[1])


def run(fleet: Fleet) -> int:
    """Start the fleet, watch over it until it is told to end; the exit status."""
    rolling = Rolling(fleet)
    signal.signal(signal.SIGUSR1, lambda *_: rolling.ask())
    try:
        fleet.start()
        print("\n".join([greeting(fleet), *taken(fleet)]), flush=True)
        watch_over(fleet, rolling)
    except FleetError as error:
        print(f"effuse up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        stop(fleet)


def stop(fleet: Fleet) -> None:
    """End the fleet once what runs is answered; told to end a second time, at once."""
    is_told_again = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_told_again.set())
    print("effuse up: ends once what runs is answered, or at once if told again", flush=True)
    fleet.stop(is_told_again.is_set)


class Rolling:
    """Replaces the processes of a fleet one after the other, workers first, when it is asked to."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._is_asked = False
        self._steps: Iterator[None] | None = None

    def ask(self) -> None:
        """Has all be replaced, once more if they are being replaced. Safe in a signal's handler."""
        self._is_asked = True

    def advance(self) -> None:
        """Does what can be done without waiting."""
        if self._steps is None and self._is_asked:
            self._is_asked = False
            self._steps = self._replace_all()
        if self._steps is not None and next(self._steps, _OVER) is _OVER:
            self._steps = None

    def _replace_all(self) -> Iterator[None]:
        fleet = self._fleet
        for name in [*fleet.names("prefill"), *fleet.names("decode"), *fleet.names("router")]:
            while name not in fleet.processes or fleet.processes[name].returncode is not None:
                yield  # it ended by itself, and is being started again
            yield from fleet.roll(name)
            print(f"effuse up: {name} was replaced", file=sys.stderr)
        print("effuse up: all were replaced", file=sys.stderr)


def watch_over(fleet: Fleet, rolling: Rolling) -> NoReturn:
    """Report each process that ends and start it again, side by side, until interrupted."""
    restarts = Restarts()
    starting: set[str] = set()
    while True:
        now = time.monotonic()
        for process in fleet.dead():
            starting.discard(process.name)
            pause_s = restarts.ended(process.name, now)
            if pause_s is not None:
                _report(process, pause_s)
        for name in restarts.due(now):
            fleet.begin_restart(name)
            starting.add(name)
        for name in sorted(name for name in starting if fleet.is_back(name)):
            starting.discard(name)
            restarts.back(name, now)
            print(f"effuse up: {name} is back", file=sys.stderr)
        rolling.advance()
        time.sleep(_POLL_S)


def _report(process: Process, pause_s: float) -> None:
    again = f"it is started again in {pause_s:.0f} s" if pause_s else "it is started again"
    print(
        f"effuse up: {process.ending()}; {again}; its log ends:\n{process.tail()}", file=sys.stderr
    )


def taken(fleet: Fleet) -> list[str]:
    """A line for each source of what requests take by default, if the router tells it in time; one
    that answers none but its clients is not asked."""
    if any(value_of(fleet.config.router_flags, flag) for flag in ("--tls-cert", "--keys")):
        return []
    with suppress(EffuseError), Client(fleet.address, timeout_s=_ASK_S) as client:
        return [line for model in client.models() for line in taken_defaults(model)]
    return []


def greeting(fleet: Fleet) -> str:
    """The line that says that the fleet is ready, and where."""
    config = fleet.config
    places = "".join(f", {name} on {gpu}" for name, gpu in fleet.gpus.items())
    return (
        f"effuse is ready on {fleet.address} after {fleet.ready_s:.1f} s: {config.prefill} prefill "
        f"and {config.decode} decode workers{places}, {config.connector}, "
        f"Redis at {fleet.redis_url}"
    )
