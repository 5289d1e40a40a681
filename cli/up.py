"""`effuse up`: a whole fleet on this machine until Ctrl-C, SIGTERM or SIGHUP.

Flags that are not its own are those of the processes that it starts (their `config.py`). They are
checked here and passed on to those that accept them. `keeper.py` restarts processes that end;
SIGUSR1 replaces all of them.
"""

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast

from effuse.cli import page
from effuse.cli.arguments import command, directory, fleet_name, redis_url, whole
from effuse.cli.commands import LOOPBACK, SIZE_FLAG, FleetConfig, http_flags, value_of
from effuse.cli.fleet import Fleet
from effuse.cli.gpus import fleet_gpus, gpu_list
from effuse.cli.greeting import asks_who_calls
from effuse.cli.logs import keep_logs
from effuse.cli.ports import check_ports
from effuse.cli.process import end_as_by_ctrl_c
from effuse.cli.run_up import UpView, run
from effuse.cli.screen import Screen, follower
from effuse.config.decoding import Algorithm
from effuse.config.file import add_config_flag, with_file
from effuse.config.flags import add_flags, add_switch
from effuse.models.defaults import refuse_unserved
from effuse.models.preflight import check_checkpoint
from effuse.protos.channels import FleetAccess
from effuse.protos.tls import ServerTls, TlsFiles
from effuse.router.config import RouterConfig
from effuse.router.config import parse as parse_router
from effuse.router.tokenizer import TokenizerError, bundled_directory, read_backend
from effuse.telemetry import logs
from effuse.worker.config import DecodeConfig, PrefillConfig, WorkerConfig
from effuse.worker.gpus import gpus_here, no_gpu

# Flags that the fleet itself sets for each of its processes.
_GIVEN = {"worker_id", "ready_file", "share_port", "advertise_host", "connector_host"}
_ROUTERS_ALONE = {"metrics_port", "metrics_host", "health_port"}

Config = WorkerConfig | RouterConfig


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Flags that are passed on to the same processes."""

    title: str
    config: type[Config]  # which checks them
    names: set[str]  # the fields of it that they set


@dataclass(frozen=True, slots=True)
class FlagGroups:
    """All flags that are passed on, by the processes that accept them."""

    every: FlagGroup
    router: FlagGroup
    workers: FlagGroup
    prefill: FlagGroup
    decode: FlagGroup

    def all(self) -> tuple[FlagGroup, ...]:
        """The groups in the order in which help lists them."""
        return (self.every, self.router, self.workers, self.prefill, self.decode)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
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
            view = replace(view, verbose=True)
        else:
            logs.log_by(logging.Formatter("effuse up: %(message)s"))
        screen = Screen.of_errors(config.prefill + config.decode)
        if not view.quiet:
            shown = follower(fleet.log_dir, screen, verbose=view.verbose, as_json=is_json)
            stack.enter_context(shown)
        return run(fleet, view, screen)


def refuse_early(config: FleetConfig, view: UpView) -> None:
    """Raises ValueError or TokenizerError for a checkpoint that cannot be served, and OSError for a
    port that is taken, before any process starts. It needs no torch, so it takes less than a
    second.
    """
    directory, flags = config.model or bundled_directory(), config.worker_flags
    block_size = value_of(flags, "--block-size")
    blocks = int(block_size) if block_size else None
    algorithm = value_of(config.decode_flags, "--default-algorithm")
    check_checkpoint(
        directory,
        adapter=config.adapter,
        # A CPU computes weights in float32, in whatever type they are stored.
        dtype=value_of(flags, "--dtype") or "auto" if config.assignments() else "float32",
        block_size=blocks,
    )
    # flags were already checked
    refuse_unserved(directory, blocks, cast("Algorithm | None", algorithm))
    read_backend(directory)
    check_certificates(config)
    check_ports(_places(config, view))


def check_certificates(config: FleetConfig) -> None:
    """Raises OSError that names an unusable file of TLS or of the fleet's secret."""
    given = parse_router(config.router_flags)
    if given.tls_cert is not None:
        ServerTls(TlsFiles(cert=given.tls_cert, key=given.tls_key, ca=given.tls_client_ca))
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
    if not asks_who_calls(config):
        yield page.HOST, view.page_port or 0
    if routers.metrics:
        yield routers.metrics_host, routers.metrics_port


def make_parser() -> argparse.ArgumentParser:
    """The command's flags: its own, and by group those that are passed on."""
    parser = _own_parser()
    for group in _groups().all():
        add_flags(parser.add_argument_group(group.title), group.config, only=group.names)
    return parser


def _own_parser() -> argparse.ArgumentParser:
    parser = command("up", "Start a fleet on this machine.")
    _add_own(parser)
    return parser


def parse(argv: Sequence[str]) -> tuple[FleetConfig, UpView]:
    """The fleet, and its visible parts; exits with status 2 on bad flags."""
    parser, groups = make_parser(), _groups()
    argv = with_file(parser, argv)
    words = [word for word in argv if word not in ("-h", "--help")]
    _, rest = _own_parser().parse_known_args(words)
    found = _check_flags(parser, argv, rest, groups)
    try:
        page_port = found.page_port if found.page else None
        view = UpView(quiet=found.quiet, verbose=found.verbose, page_port=page_port)
        return _config(found, rest, groups), view
    except ValueError as error:
        parser.error(str(error))


def _config(found: argparse.Namespace, rest: Sequence[str], groups: FlagGroups) -> FleetConfig:
    """The fleet from the flags. Raises ValueError if there are too few GPUs."""

    def words(*wanted: FlagGroup) -> tuple[str, ...]:
        return _words_of(wanted, rest, groups.all())

    http = http_flags(found.http_port, beside=found.port) if found.http else ()
    asked = _asks_for_gpus(found)
    # Named GPUs imply --device cuda, so that an unusable one is an error instead of a fall-back to
    # the CPU. A given --device comes later and takes precedence.
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
        router_flags=(*words(groups.every, groups.router), *http),
        worker_flags=(*device, *words(groups.every, groups.workers)),
        prefill_flags=(*words(groups.prefill), *_of_role(found, "prefill")),
        decode_flags=(*words(groups.decode), *_of_role(found, "decode")),
        gpus=_gpus(found, asked),
        prefill_gpus=found.prefill_gpus,
        decode_gpus=found.decode_gpus,
        gpu_sharing=found.gpu_sharing,
        log_dir=found.log_dir,
    )


def _of_role(found: argparse.Namespace, role: str) -> tuple[str, ...]:
    """Flags of every worker that are set for one role by a name of their own."""
    size = getattr(found, f"{role}_tensor_parallel_size")
    return () if size is None else (SIZE_FLAG, str(size))


def _asks_for_gpus(found: argparse.Namespace) -> bool:
    return bool(found.gpus or found.prefill_gpus or found.decode_gpus)


def _gpus(found: argparse.Namespace, asked: bool) -> tuple[str, ...] | None:
    """The GPUs that the fleet may use; None for the CPU, which a machine without GPUs takes.

    Raises ValueError if requested GPUs are missing.
    """
    if found.device == "cpu" and not asked:
        return None
    here = gpus_here()
    if not here:
        if asked or found.device == "cuda":
            raise ValueError(no_gpu("--gpus" if asked else "--device cuda"))
        return None
    return fleet_gpus(here, found.gpus, (*(found.prefill_gpus or ()), *(found.decode_gpus or ())))


def _add_own(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prefill", type=whole(0, 64), default=1, metavar="X",
        help="prefill workers; 0 lets decode workers prefill (default: 1)")  # fmt: skip
    add("--decode", type=whole(1, 64), default=1, metavar="Y", help="decode workers (default: 1)")
    add("--routers", type=whole(1, 16), default=1, metavar="Z",
        help="routers, which share the port (default: 1)")  # fmt: skip
    add("--connector", choices=("auto", "nixl", "zmq"), default="auto",
        help="how KV pages move; auto is nixl if it works, else zmq (default: auto)")  # fmt: skip
    add("--model", type=directory, metavar="DIR", help="checkpoint (default: the bundled model)")
    add("--adapter", type=directory, metavar="DIR", help="LoRA adapter, merged into the weights")
    add("--host", default=LOOPBACK,
        help="the routers' address; others stay on loopback (default: 127.0.0.1)")  # fmt: skip
    add("--port", type=whole(0, 65535), default=50051,
        help="the routers' port; 0 takes a free one (default: 50051)")  # fmt: skip
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
    add_switch(parser, "--page", "serve a page about the fleet", default=True)
    add_switch(parser, "--quiet", "do not show the processes' logs")
    add_switch(parser, "--verbose", "show all lines of the processes' logs, and each link")
    add_config_flag(parser)
    _add_gpus(parser)


def _add_gpus(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "GPUs, by number or id as for CUDA_VISIBLE_DEVICES",
        "Each worker gets its own, as many as its tensor-parallel size.",
    )
    add = group.add_argument
    add("--gpus", type=gpu_list, metavar="0,1,..",
        help="GPUs to use, prefill workers first (default: all of this machine)")  # fmt: skip
    add("--prefill-gpus", type=gpu_list, metavar="0,..",
        help="one for each prefill worker (default: from --gpus)")  # fmt: skip
    add("--decode-gpus", type=gpu_list, metavar="1,..",
        help="one for each decode worker (default: from --gpus)")  # fmt: skip
    for role in ("prefill", "decode"):
        add(f"--{role}-tensor-parallel-size", type=whole(1, 64), metavar="N",
            help=f"devices of each {role} worker (default: --tensor-parallel-size)")  # fmt: skip
    add_switch(
        group,
        "--gpu-sharing",
        "let several workers share a GPU if there are too few, and divide --gpu-memory-utilization "
        "among them",
    )


def _groups() -> FlagGroups:
    """Flags of the processes by the processes that accept them, without those of `up` itself."""
    own = set(vars(_own_parser().parse_args([])))
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
    """The values of all flags; exits with status 2 on a bad one."""
    for flag in rest:
        if flag.split("=")[0].removeprefix("--").replace("-", "_") in _GIVEN:
            parser.error(f"{flag}: not a flag of `effuse up`, which sets it for each process")
    found = parser.parse_args(argv)
    try:
        for group in groups.all():
            names = group.names | groups.every.names  # may be checked together
            if group is groups.router:
                names = names | {"host"}  # which only the routers have
            group.config(**{name: getattr(found, name) for name in names})
    except ValueError as error:
        parser.error(str(error))
    return found


def _words_of(
    wanted: Sequence[FlagGroup], rest: Sequence[str], groups: Sequence[FlagGroup]
) -> tuple[str, ...]:
    """The words of `rest` for the wanted groups: those whose flag belongs to no other group."""
    others = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for group in groups:
        if group not in wanted:
            add_flags(others, group.config, only=group.names)
    return tuple(others.parse_known_args(rest)[1])
