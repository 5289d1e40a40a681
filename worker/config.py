"""Settings of either kind of worker: one frozen value, with one flag for each field.

Values found at run time (pages in the pool, the bound port) are in other modules.
"""

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

import msgspec

from effuse.config import checks
from effuse.config.decoding import WINDOW, Algorithm
from effuse.kvtransfer.messages import MAX_LEASE_S
from effuse.placement.records import Role, check_name
from effuse.worker.engine_settings import MOST_RANKS, EngineSettings

Connector = Literal["auto", "nixl", "zmq"]

END_S: Final = 10.0
"""Time for attempts that are ended at shutdown to leave the engine."""
STOP_S: Final = 20.0
"""Time for an engine to end that they do not leave; then it is killed."""
_LEAST_HANG_S: Final = 1.0
_WITH_STAGES: Final[Mapping[str, object]] = {
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "attention": "triton",
    "kv_layout": "unified",
    "batch_invariant": False,
    "kv_offloading_size": 0.0,
}
"""The values of other settings with which pipelines are built."""
_MOST_STOP_IDS = 128  # more than a router accepts; a GPU has room for them in every slot


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(EngineSettings):
    """Settings of a prefill or decode worker. Raises ValueError that names the accepted form."""

    # The network.
    port: Annotated[int, "port to listen on; 0 takes a free one"] = 0
    advertise_host: Annotated[
        str | None, "name or address at which other processes reach this worker (default: host)"
    ] = None
    connector: Annotated[
        Connector,
        "how KV pages move between workers; auto is nixl if it works and pages are on GPUs or all "
        "workers on one host, else zmq",
    ] = "auto"
    encrypt_pages: Annotated[
        bool,
        "encrypt pages over zmq for processes with the fleet-secret (CURVE)",
    ] = False
    connector_host: Annotated[
        str | None, "address of the zmq connector (default: advertise-host)"
    ] = None

    # The fleet.
    redis_url: Annotated[
        str | None, "announce this worker in this Redis, as redis://host:port/db"
    ] = None
    worker_id: Annotated[str | None, "name of this worker (default: its role, host and port)"] = (
        None
    )
    ready_file: Annotated[
        Path | None, "write address, incarnation and pid to this file once ready"
    ] = None

    # Time, in seconds.
    startup_timeout_s: Annotated[float, "longest time for loading weights and warming up"] = 300.0
    hang_timeout_s: Annotated[
        float,
        "replace an engine that makes no progress for this long, or for ten of its steps if that "
        "is longer",
    ] = 3.0

    def __post_init__(self) -> None:
        for one in fields(self):  # the engine gets them as JSON
            checks.utf8(one.name, getattr(self, one.name))
        super().__post_init__()
        if self.fleet_cert is None:
            self.check_plaintext("host", self.host, "calls")
        if self.encrypt_pages and self.connector == "nixl":
            raise ValueError(f"--encrypt-pages: expected --connector zmq, got {self.connector}")
        if not self.encrypt_pages:
            self.check_plaintext("host", self.host, "pages")
        self._check_stages()
        checks.whole("port", self.port, 0, 65535)
        for name in ("startup_timeout_s", "hang_timeout_s"):
            checks.seconds(name, getattr(self, name))
        if self.hang_timeout_s < _LEAST_HANG_S:
            raise ValueError(
                f"--hang-timeout-s: expected {_LEAST_HANG_S:g} s or more, because an idle engine "
                f"reports only twice a second, got {self.hang_timeout_s:g}"
            )
        checks.redis_url("redis_url", self.redis_url)
        check_name("fleet", self.fleet)
        if self.worker_id is not None:
            check_name("worker id", self.worker_id)
        self._check_nodes()

    def _check_nodes(self) -> None:
        """Refuses hosts that cannot share the devices or cannot reach each other."""
        checks.whole("nnodes", self.nnodes, 1, MOST_RANKS)
        checks.whole("node_rank", self.node_rank, 0, self.nnodes - 1)
        checks.whole("master_port", self.master_port, 1, 65535)
        if self.nnodes == 1:
            return
        name = f"--nnodes {self.nnodes}"
        if self.num_ranks % self.nnodes:
            raise ValueError(f"{name}: expected a divisor of the worker's {self.num_ranks} devices")
        if self.master_addr is None:
            raise ValueError(f"{name}: expected --master-addr with it")
        if checks.is_loopback(self.host) != checks.is_loopback(self.master_addr):
            raise ValueError(
                f"--host: expected an address that --master-addr {self.master_addr} reaches, "
                f"got {self.host!r}"
            )
        # Collectives have no encryption; commands have it if there is a secret.
        self.check_plaintext("host", self.host, "tensors")
        if self.fleet_secret is None:
            self.check_plaintext("host", self.host, "commands")

    def _check_stages(self) -> None:
        """The combinations of a pipeline that are built."""
        if (count := self.pipeline_parallel_size) > 1:
            name = f"--pipeline-parallel-size {count}"
            self.expect_devices(name, count)
            self.expect_beside(name, _WITH_STAGES)

    @property
    def num_replicas(self) -> int:
        """Ranks that compute requests of their own."""
        return 1

    @property
    def context_degree(self) -> int:
        """Ranks that hold the same KV heads, each for different tokens."""
        return 1

    @property
    def cuts_rows(self) -> bool:
        """Whether these ranks also compute different rows, each with all weights of its group."""
        return False

    @property
    def num_ranks(self) -> int:
        rows = self.context_degree if self.cuts_rows else 1
        cut = self.tensor_parallel_size * self.pipeline_parallel_size
        return cut * self.num_replicas * rows

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.nnodes

    @property
    def runs_graphs(self) -> bool:
        """Whether a GPU may run captured graphs. FlexAttention compiles for new lengths."""
        return not self.enforce_eager and self.attention != "flex"

    @property
    def longest_end_s(self) -> float:
        return self.drain_s + 2 * END_S + STOP_S

    def reachable_host(self) -> str:
        """Returns the host for other processes: never a wildcard address."""
        if self.advertise_host is not None:
            return self.advertise_host
        return socket.gethostname() if self.host in ("0.0.0.0", "::", "[::]") else self.host


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """Settings of a prefill worker. Raises ValueError that names the accepted form."""

    prefill_context_parallel_size: Annotated[
        int,
        "devices per tensor-parallel rank, each of which computes and holds an equal part of "
        "every prompt",
    ] = 1
    reservation_s: Annotated[
        float, "longest time that a computed prompt waits for a reservation"
    ] = 60.0
    min_handoff_gbps: Annotated[
        float,
        "refuse links to decode workers slower than this, in 10^9 bytes a second, once several "
        "measurements agree; 0 refuses none",
    ] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.seconds("reservation_s", self.reservation_s)
        if not (math.isfinite(self.min_handoff_gbps) and self.min_handoff_gbps >= 0):
            raise ValueError(
                f"--min-handoff-gbps: expected 0 or more GB/s, got {self.min_handoff_gbps:g}"
            )
        self._check_rows()

    def _check_rows(self) -> None:
        degree = self.prefill_context_parallel_size
        checks.whole("prefill_context_parallel_size", degree, 1, MOST_RANKS)
        if degree == 1:
            return
        name = f"--prefill-context-parallel-size {degree}"
        self.expect_devices(name, degree)
        why = "others attend to no keys of other devices"
        self.expect_beside(name, {"attention": "triton", "kv_layout": "unified"}, why)
        none = {"batch_invariant": False, "kv_offloading_dir": None, "kv_pool": None}
        self.expect_beside(name, none)

    @property
    def context_degree(self) -> int:
        return self.prefill_context_parallel_size

    @property
    def cuts_rows(self) -> bool:
        return self.prefill_context_parallel_size > 1


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """Settings of a decode worker. Raises ValueError that names the accepted form."""

    default_algorithm: Annotated[
        Algorithm | None, "algorithm for requests that name none (default: the model's)"
    ] = None
    handoff_lease_s: Annotated[
        float,
        "longest time to push a computed prompt, and longest silence of its writer before the push",
    ] = 60.0
    data_parallel_size: Annotated[
        int, "replicas, each a device with its own requests and KV, that share experts"
    ] = 1
    decode_context_parallel_size: Annotated[
        int,
        "devices within tensor-parallel-size that hold the same KV heads, each for different "
        "tokens of every request",
    ] = 1
    cp_kv_cache_interleave_size: Annotated[
        int | None, "consecutive tokens that lie on one of these devices (default: page-size)"
    ] = None
    max_window: Annotated[int, "maximum blocks in flight for one request"] = 8
    max_stop_ids: Annotated[int, "maximum stop ids of a request, including end-of-sequence ids"] = (
        16
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.seconds("handoff_lease_s", self.handoff_lease_s, MAX_LEASE_S)
        checks.whole("data_parallel_size", self.data_parallel_size, 1, MOST_RANKS)
        if self.data_parallel_size > 1:
            alone = {"tensor_parallel_size": 1, "kv_offloading_size": 0.0}
            self.expect_beside("--data-parallel-size", alone)
        self._check_context()
        checks.whole("max_window", self.max_window, int(WINDOW.low), int(WINDOW.high))
        checks.whole("max_stop_ids", self.max_stop_ids, 1, _MOST_STOP_IDS)

    def _check_context(self) -> None:
        degree, name = self.decode_context_parallel_size, "--decode-context-parallel-size"
        checks.whole("decode_context_parallel_size", degree, 1, MOST_RANKS)
        if self.tensor_parallel_size % degree:
            raise ValueError(
                f"{name}: expected a divisor of --tensor-parallel-size "
                f"{self.tensor_parallel_size}, got {degree}"
            )
        interleave = self.cp_kv_cache_interleave_size
        if interleave not in (None, self.page_size):
            raise ValueError(
                "--cp-kv-cache-interleave-size: expected --page-size "
                f"{self.page_size}, because a device holds whole pages of tokens that follow each "
                f"other, got {interleave}"
            )
        if degree == 1:
            return
        name = f"{name} {degree}"
        why = "flex returns no log-sum-exp, by which devices merge their results"
        self.expect_beside(name, {"attention": "triton"}, why)
        why = "the number of cached keys changes a result's rounding"
        self.expect_beside(name, {"batch_invariant": False}, why)
        self.expect_beside(name, {"kv_offloading_dir": None, "kv_pool": None})

    @property
    def num_replicas(self) -> int:
        return self.data_parallel_size

    @property
    def context_degree(self) -> int:
        return self.decode_context_parallel_size


@dataclass(frozen=True, kw_only=True)
class BothConfig(PrefillConfig, DecodeConfig):
    """Settings of a worker whose role may change. Raises ValueError that names what is accepted."""

    role: Annotated[Role, "role at the start; SetRole changes it at any time"] = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("role", self.role, get_args(Role))
        if self.data_parallel_size > 1:
            raise ValueError(
                "--data-parallel-size: expected 1 for a worker that also computes prompts for "
                f"others, got {self.data_parallel_size}"
            )
        cuts = self.prefill_context_parallel_size, self.decode_context_parallel_size
        for kind, degree in zip(("prefill", "decode"), cuts, strict=True):
            if degree > 1:
                raise ValueError(
                    f"--{kind}-context-parallel-size: expected 1 for a worker that both computes "
                    f"prompts for others and writes answers, got {degree}"
                )


def to_json(config: WorkerConfig) -> bytes:
    """Returns the config in the form in which the engine process gets it."""
    return msgspec.json.encode(config, enc_hook=str)
