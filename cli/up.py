"""`effuse up`: a whole fleet on this machine until Ctrl-C, SIGTERM or SIGHUP.

Flags that are not its own are those of the processes that it starts (their `config.py`). They are
checked here and passed on to those that accept them. `keeper.py` restarts processes that end;
SIGUSR1 replaces all of them.
"""

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import NamedTuple, cast

from effuse.cli import page
from effuse.cli.arguments import command, directory, fleet_name, redis_url, whole
from effuse.cli.commands import (
    LOOPBACK,
    ROLE_SIZES,
    FleetConfig,
    http_flags,
    settle_roles,
    value_of,
)
from effuse.cli.fleet import Fleet, FleetError
from effuse.cli.gpus import fleet_gpus, gpu_list
from effuse.cli.keeper import LOG, Rolling, watch_over
from effuse.cli.logs import keep_logs
from effuse.cli.ports import check_ports
from effuse.cli.process import LogFollower, end_as_by_ctrl_c, interruptible
from effuse.cli.screen import Screen, asks_who_calls, columns, greeting
from effuse.config.decoding import Algorithm
from effuse.config.flags import add_config_flag, add_flags, add_switch, flag_of, with_file
from effuse.models.defaults import refuse_unserved
from effuse.models.preflight import check_checkpoint
from effuse.protos.channels import FleetAccess
from effuse.protos.tls import ServerTls, TlsFiles
from effuse.router.config import RouterConfig
from effuse.router.config import parse as parse_router
from effuse.router.tenants import KeyRing
from effuse.router.tokenizer import TokenizerError, bundled_directory, read_backend
from effuse.telemetry import logs
from effuse.worker.config import BothConfig, DecodeConfig, PrefillConfig, WorkerConfig
from effuse.worker.gpus import gpus_here, no_gpu

_GIVEN = {"worker_id", "ready_file", "share_port", "advertise_host", "connector_host"}
_GIVEN |= {"nnodes", "node_rank", "master_addr", "master_port"}  # which the fleet sets itself
_ROUTERS_ALONE = {"metrics_port", "metrics_host", "health_port"}
# Flags that are fields of the fleet's config, unchanged.
_SAME = (
    *("prefill", "decode", "workers", "routers", "connector", "model", "host", "port"),
    *("redis_url", "prefill_gpus", "decode_gpus", "gpu_sharing", "log_dir"),
)

Config = WorkerConfig | RouterConfig


class UpView(argparse.Namespace):
    """The visible parts of the fleet, among the values of the flags."""

    quiet: bool  # its logs stay in their files
    verbose: bool  # all of its logs are shown, and all that is known of it
    page_port: int | None  # where the page about it is; None serves none


class FlagGroup(NamedTuple):
    """Flags that are passed on to the same processes."""

    title: str
    config: type[Config]  # which checks them
    names: set[str]  # the fields of it that they set


def main(argv: Sequence[str]) -> int:
    config, view = parse(argv)
    try:
        refuse_early(config, view)
    except (ValueError, TokenizerError, OSError) as error:
        print(f"effuse up: {error}", file=sys.stderr)
        return 2
    end_as_by_ctrl_c()  # receives the fleet, even while it starts
    with ExitStack() as stack:
        config = keep_logs(config, stack)
        try:
            fleet = Fleet(config)
        except OSError as error:
            print(f"effuse up: {error}", file=sys.stderr)
            return 2
        is_json = value_of(config.router_flags, "--log-format") == "json"
        if is_json:  # which is for programs, and they get every line
            logs.set_up("up", "info", "json")
            view.verbose = True
        else:
            logs.log_by(logging.Formatter("effuse up: %(message)s"))
        screen = Screen.of_errors(config.prefill + config.decode + config.workers)
        if not view.quiet:
            stack.enter_context(
                LogFollower(
                    fleet.log_dir,
                    sys.stderr,
                    as_json=is_json,
                    shows=lambda name, _: name != "redis",
                )
                if view.verbose
                else LogFollower(fleet.log_dir, screen, shows=screen.shows)
            )
        return run(fleet, view, screen)


def refuse_early(config: FleetConfig, view: UpView) -> None:
    """Raises ValueError or TokenizerError for a checkpoint that cannot be served, and OSError for a
    port that is taken, before any process starts. It needs no torch, so it takes less than a
    second."""
    directory, flags = config.model or bundled_directory(), config.worker_flags
    block_size, adapter = value_of(flags, "--block-size"), value_of(flags, "--adapter")
    blocks = int(block_size) if block_size else None
    algorithm = value_of(config.decode_flags, "--default-algorithm")
    check_checkpoint(
        directory,
        adapter=Path(adapter) if adapter else None,
        # A CPU computes weights in float32, in whatever type they are stored.
        dtype=value_of(flags, "--dtype") or "auto" if config.assignments() else "float32",
        block_size=blocks,
    )
    # flags were already checked
    asked = cast("Algorithm | None", algorithm)
    refuse_unserved(directory, blocks, asked, adapted=adapter is not None, limits=vars(view))
    read_backend(directory)
    check_access(config)
    check_ports(_places(config, view))


def check_access(config: FleetConfig) -> None:
    """Raises OSError that names an unusable file of TLS, keys, or the fleet's secret."""
    given = parse_router(config.router_flags)
    if given.tls_cert is not None:
        ServerTls(TlsFiles(cert=given.tls_cert, key=given.tls_key, ca=given.tls_client_ca))
    if given.keys is not None:
        KeyRing(given.keys)
    fleet = (given.fleet_cert, given.fleet_key, given.fleet_ca, given.fleet_secret)
    FleetAccess.read(*fleet).server_tls()
    if given.redis_ca is not None:
        TlsFiles(ca=given.redis_ca).check()


def _places(config: FleetConfig, view: UpView) -> Iterator[tuple[str, int]]:
    """Host and port of every server with a fixed address, except workers."""
    routers = parse_router(config.router_flags)
    yield config.host, config.port
    yield config.host, routers.health_port or 0
    yield config.host, routers.http_port or 0
    yield page.HOST, view.page_port or 0
    if routers.metrics:
        yield routers.metrics_host, routers.metrics_port


def make_parser() -> argparse.ArgumentParser:
    """The command's flags: its own, and by group those that are passed on."""
    parser = _own_parser()
    for group in _groups().values():
        add_flags(parser.add_argument_group(group.title), group.config, only=group.names)
    return parser


def _own_parser() -> argparse.ArgumentParser:
    parser = command("up", "Start a fleet on this machine.")
    add = parser.add_argument
    add("--prefill", type=whole(0, 64), metavar="X",
        help="prefill workers; 0 lets decode workers prefill (default: 1)")  # fmt: skip
    add("--decode", type=whole(1, 64), metavar="Y", help="decode workers (default: 1)")
    add("--workers", type=whole(0, 64), metavar="N",
        help="workers that prefill and decode, and may change their role (default: one for each "
        "of --gpus if no flag names or sizes a role, else 0)")  # fmt: skip
    add("--routers", type=whole(1, 16), default=1, metavar="Z",
        help="routers, which share the port")  # fmt: skip
    add("--connector", choices=("auto", "nixl", "zmq"), default="auto",
        help="how KV pages move; auto is nixl if it works, else zmq")  # fmt: skip
    add("--model", type=directory, metavar="DIR", help="checkpoint (default: the bundled model)")
    add("--adapter", type=directory, metavar="DIR", help="LoRA adapter, merged into the weights")
    add("--host", default=LOOPBACK, help="the routers' address; other sockets stay on loopback")
    add("--port", type=whole(0, 65535), default=50051,
        help="the routers' port; 0 takes a free one")  # fmt: skip
    add("--redis-url", type=redis_url, metavar="URL",
        help="use this running Redis (default: start an embedded one)")  # fmt: skip
    add("--fleet", type=fleet_name, metavar="NAME",
        help="namespace of the fleet in Redis (default: a new one)")  # fmt: skip
    add("--log-dir", type=Path, metavar="DIR",
        help="write log files to this directory (default: the one of `effuse logs`)")  # fmt: skip
    add("--http-port", type=whole(0, 65535), metavar="N",
        help="port of OpenAI's HTTP API; 0 takes a free one (default: 8000)")  # fmt: skip
    add_switch(parser, "--http", "serve OpenAI's HTTP API", default=True)
    add("--page-port", type=whole(0, 65535), default=0, metavar="N",
        help="port of the page about the fleet; 0 takes a free one (default: 0)")  # fmt: skip
    about_page = "serve a page about the fleet, unless --keys or --tls-cert is given"
    add_switch(parser, "--page", about_page, default=True)
    add_switch(parser, "--quiet", "do not show the processes' logs")
    add_switch(parser, "--verbose", "show all lines of the processes' logs, and each link")
    add_config_flag(parser)
    group = parser.add_argument_group(
        "GPUs, by number or id as for CUDA_VISIBLE_DEVICES",
        "Each worker gets its own, as many as its tensor-parallel size times its pipeline stages.",
    )
    add = group.add_argument
    add("--gpus", type=gpu_list, metavar="0,1,..",
        help="GPUs to use, prefill workers first (default: all of this machine)")  # fmt: skip
    for role, example in (("prefill", "0,.."), ("decode", "1,..")):
        add(f"--{role}-gpus", type=gpu_list, metavar=example,
            help=f"one for each {role} worker (default: from --gpus)")  # fmt: skip
    for role, (size, of) in product(("prefill", "decode"), ROLE_SIZES.items()):
        flag = flag_of(size).removeprefix("--")
        add(f"--{role}-{flag}", type=whole(1, 64), metavar="N",
            help=f"{of} of each {role} worker (default: --{flag})")  # fmt: skip
    add_switch(
        group,
        "--gpu-sharing",
        "let several workers share a GPU if there are too few, and divide --gpu-memory-utilization "
        "among them",
    )
    return parser


def parse(argv: Sequence[str]) -> tuple[FleetConfig, UpView]:
    """The fleet, and its visible parts; exits with status 2 on bad flags."""
    parser, groups = make_parser(), _groups()
    words = with_file(parser, argv)
    _, rest = _own_parser().parse_known_args([one for one in words if one not in ("-h", "--help")])
    found = _check_flags(parser, words, rest, groups)
    for name in ("http", "page"):  # a typed flag may turn off what a file sets up
        if value_of(argv, f"--{name}-port") and not getattr(found, name):
            parser.error(f"--{name}-port: expected only with --{name}")
    try:
        config = _config(found, rest, groups)
    except ValueError as error:
        parser.error(str(error))
    if found.page and asks_who_calls(config):
        names_port = value_of(argv, "--page-port") and found.page_port != 0
        if names_port or "--page" in argv:
            flag = "--page-port" if names_port else "--page"
            why = "a browser could open the page without a token"
            parser.error(f"{flag}: expected without --keys and --tls-cert, because {why}")
        found.page = False
    found.page_port = found.page_port if found.page else None
    return config, found


def _config(found: UpView, rest: Sequence[str], groups: Mapping[str, FlagGroup]) -> FleetConfig:
    """The fleet from the flags. Raises ValueError if there are too few GPUs, or if some flags need
    others or exclude them."""

    def words(*wanted: str) -> tuple[str, ...]:
        """The words of `rest` for these groups: those whose flag belongs to no other group."""
        others = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for name in groups.keys() - wanted:
            add_flags(others, groups[name].config, only=groups[name].names)
        return tuple(others.parse_known_args(rest)[1])

    settle_roles(found)
    if found.workers:
        names = set().union(*(groups[name].names for name in groups.keys() - {"router"}))
        BothConfig(**{name: getattr(found, name) for name in names})
    if found.kv_mode == "pool" and not found.kv_pool:
        raise ValueError("--kv-mode pool: expected --kv-pool with it, because KV goes there")
    http = http_flags(found.http_port, beside=found.port) if found.http else ()
    # Named GPUs imply --device cuda, so an unusable one is an error. A given --device comes later.
    named = ("gpus", "prefill_gpus", "decode_gpus")
    asked = [flag_of(name) for name in named if getattr(found, name)]
    device = ("--device", "cuda") if asked else ()
    adapter = ("--adapter", str(found.adapter)) if found.adapter else ()
    return FleetConfig(
        **{name: getattr(found, name) for name in _SAME},
        name=found.fleet,
        router_flags=(*words("every", "router"), *http),
        worker_flags=(*device, *adapter, *words("every", "workers")),
        prefill_flags=(*words("prefill"), *_of_role(found, "prefill")),
        decode_flags=(*words("decode"), *_of_role(found, "decode")),
        gpus=_gpus(found, asked),
    )


def _of_role(found: argparse.Namespace, role: str) -> tuple[str, ...]:
    sizes = ((flag_of(name), getattr(found, f"{role}_{name}")) for name in ROLE_SIZES)
    return tuple(word for flag, size in sizes if size is not None for word in (flag, str(size)))


def _gpus(found: argparse.Namespace, asked: Sequence[str]) -> tuple[str, ...] | None:
    """The GPUs that the fleet may use; None for the CPU, which a machine without GPUs takes. Raises
    ValueError if requested GPUs are missing. asked: the flags that request some."""
    if found.device == "cpu" and not asked:
        return None
    here = gpus_here()
    if not here:
        if asked or found.device == "cuda":
            raise ValueError(no_gpu(asked[0] if asked else "--device cuda"))
        return None
    return fleet_gpus(here, found.gpus, (*(found.prefill_gpus or ()), *(found.decode_gpus or ())))


def _groups() -> dict[str, FlagGroup]:
    """Flags of the processes by the processes that accept them, without those of `up` itself; in
    the order in which help lists them."""
    own = set(vars(_own_parser().parse_args([]))) | _GIVEN
    worker, router, prefill, decode = (
        {one.name for one in fields(config)}
        for config in (WorkerConfig, RouterConfig, PrefillConfig, DecodeConfig)
    )
    both = (worker & router) - own - _ROUTERS_ALONE
    of_routers = (router - worker - own) | _ROUTERS_ALONE
    return {
        "every": FlagGroup("flags of every process", WorkerConfig, both),
        "router": FlagGroup("flags of the routers", RouterConfig, of_routers),
        "workers": FlagGroup("flags of every worker", WorkerConfig, worker - router - own),
        "prefill": FlagGroup("flags of prefill workers", PrefillConfig, prefill - worker),
        "decode": FlagGroup("flags of decode workers", DecodeConfig, decode - worker),
    }


def _check_flags(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    rest: Sequence[str],
    groups: Mapping[str, FlagGroup],
) -> UpView:
    """The values of all flags; exits with status 2 on a bad one."""
    for flag in rest:
        if flag.split("=")[0].removeprefix("--").replace("-", "_") in _GIVEN:
            parser.error(f"{flag}: not a flag of `effuse up`, which sets it on its one host")
    found: UpView = parser.parse_args(argv, UpView())
    try:
        for name, group in groups.items():
            names = group.names | groups["every"].names  # may be checked together
            names = names | {"host" if name == "router" else "connector"}  # which only these have
            if name in ("prefill", "decode"):  # whose flags exclude some of every worker's
                names = names | groups["workers"].names
            given = {one: getattr(found, one) for one in names}
            for size in ROLE_SIZES:
                if (of_role := getattr(found, f"{name}_{size}", None)) is not None:
                    given[size] = of_role
            group.config(**given)
    except ValueError as error:
        parser.error(str(error))
    return found


def run(fleet: Fleet, view: UpView, screen: Screen) -> int:
    """Start the fleet, watch over it until a signal ends it; the exit status."""
    rolling = Rolling(fleet)
    signal.signal(signal.SIGUSR1, lambda *_: rolling.ask())
    shows_logs = view.verbose and not view.quiet
    try:
        with interruptible(), screen:
            fleet.start()
        with interruptible(), _page(fleet, view) as page_address:
            width = columns() if sys.stdout.isatty() else None
            _print(greeting(fleet, page_address, width=width, verbose=view.verbose))
            watch_over(fleet, rolling, shows_logs=shows_logs)
    except (FleetError, OSError) as error:
        LOG.error("%s", getattr(error, "why", error) if shows_logs else error)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        stop(fleet)


def stop(fleet: Fleet) -> None:
    """End the fleet once running requests have ended; at a second signal, immediately."""
    second_signal = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: second_signal.set())
    # a shell passes on a signal that it received itself
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if fleet.processes:
        _print(["effuse up: stopping after running requests end; press Ctrl-C again to stop now"])
    fleet.stop(second_signal.is_set)


def _print(lines: Sequence[str]) -> None:
    """With one write: on unbuffered output a log line could come before the line end."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


@contextmanager
def _page(fleet: Fleet, view: UpView) -> Iterator[str | None]:
    """Serves the page about it; yields its address. Raises OSError."""
    if view.page_port is None:
        yield None
        return
    source = page.PageSource(fleet.address, fleet.metrics)
    with page.served(source, view.page_port) as address:
        fleet.home.write_page(address)
        yield address
