"""Settings of either kind of worker: one frozen value, with one flag for each field.

Values found at run time (pages in the pool, the bound port) are in other modules.
"""

import math
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

import msgspec

from effuse.config import checks
from effuse.config.access import Access
from effuse.config.decoding import WINDOW, Algorithm
from effuse.config.flags import flag_of
from effuse.config.pool_address import PoolAddress
from effuse.kvtransfer.messages import MAX_LEASE_S, MAX_POOL_PAGES
from effuse.placement.records import Role, check_name

Attention = Literal["triton", "flex"]
Connector = Literal["auto", "nixl", "zmq"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVLayoutKind = Literal["unified", "distinct"]

END_S: Final = 10.0
"""Time for attempts that are ended at shutdown to leave the engine."""
STOP_S: Final = 20.0
"""Time for an engine to end that they do not leave; then it is killed."""
_LEAST_HANG_S: Final = 1.0
_MOST_RANKS: Final = 64
_MOST_STOP_IDS = 128  # more than a router accepts; a GPU has room for them in every slot


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Access):
    """A worker's model, and the devices that compute it."""

    model: Annotated[Path | None, "checkpoint directory (default: the bundled model)"] = None
    adapter: Annotated[Path | None, "LoRA adapter directory, merged when weights are loaded"] = None
    served_model_name: Annotated[
        str | None, "name that clients ask for (default: the directory's name)"
    ] = None
    device: Annotated[Device, "device of the engine"] = "auto"
    dtype: Annotated[Dtype, "data type of weights and KV; auto is float32 on a CPU"] = "auto"
    attention: Annotated[
        Attention, "attention kernels; flex is torch's, slow and only for comparison"
    ] = "triton"
    batch_invariant: Annotated[
        bool,
        "an answer never depends on what else runs; slower, and only on Hopper GPUs in 16-bit "
        "types (on a CPU in float32 it holds without the flag)",
    ] = False
    enforce_eager: Annotated[bool, "never capture CUDA graphs; the host runs each decode step"] = (
        False
    )

    # Several devices.
    tensor_parallel_size: Annotated[
        int, "devices that compute each layer together, each with a part of the weights"
    ] = 1
    expert_parallel: Annotated[
        bool, "spread whole experts over the devices; without it each expert is cut"
    ] = False


@dataclass(frozen=True, kw_only=True)
class EngineSettings(ModelSettings):
    """A worker's KV memory and batches."""

    # KV memory.
    page_size: Annotated[int, "tokens in a KV page"] = 16
    num_pages: Annotated[
        int | None, "pages in the pool (default: as many as gpu-memory-utilization allows)"
    ] = None
    gpu_memory_utilization: Annotated[float, "share of device memory to use, in (0, 1]"] = 0.9
    kv_layout: Annotated[KVLayoutKind, "order of KV memory in a page"] = "unified"
    enable_prefix_caching: Annotated[
        bool, "keep the KV of ended requests for later ones that begin with the same tokens"
    ] = True
    kv_unit_tokens: Annotated[
        int | None,
        "tokens in a unit of kept KV, the same for all workers of a fleet (default: the fewest "
        "that fill whole pages and blocks)",
    ] = None
    kv_offloading_size: Annotated[
        float, "GiB of host memory, of all devices together, for kept KV without room in the pool"
    ] = 0.0
    kv_offloading_dir: Annotated[
        Path | None, "directory for kept KV that has no room in host memory either"
    ] = None
    kv_offloading_dir_size: Annotated[float, "most GiB of files in that directory"] = 64.0
    kv_pool: Annotated[
        str | None,
        "keep KV also in this Mooncake Store, for all workers with the same model and layout: "
        "mooncake://host:port/namespace (extra `mooncake`)",
    ] = None

    # Batching.
    block_size: Annotated[int | None, "tokens in a diffusion block (default: the model's)"] = None
    max_num_batched_tokens: Annotated[int, "most tokens in one forward"] = 2048
    max_num_seqs: Annotated[int, "most requests in one forward"] = 64
    max_model_len: Annotated[
        int | None, "most tokens of prompt and answer (default: the model's)"
    ] = None

    def __post_init__(self) -> None:
        Access.__post_init__(self)
        for name in (
            *("page_size", "max_num_batched_tokens", "max_num_seqs", "block_size"),
            "kv_unit_tokens",
        ):
            checks.whole(name, getattr(self, name), 1)
        checks.whole("max_model_len", self.max_model_len, 1)
        checks.whole("tensor_parallel_size", self.tensor_parallel_size, 1, _MOST_RANKS)
        checks.choice("device", self.device, get_args(Device))
        checks.choice("dtype", self.dtype, get_args(Dtype))
        checks.whole("num_pages", self.num_pages, 1, MAX_POOL_PAGES)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"--gpu-memory-utilization: expected a share in (0, 1], "
                f"got {self.gpu_memory_utilization:g}"
            )
        self._check_offloading()
        if self.attention == "flex" and self.kv_layout != "unified":
            raise ValueError(
                f"--attention flex: expected --kv-layout unified, got {self.kv_layout}"
            )
        if self.batch_invariant and self.attention != "triton":
            raise ValueError(
                f"--batch-invariant: expected --attention triton with it, got {self.attention}"
            )
        checks.model_name("served_model_name", self.served_model_name)
        checks.directory("model", self.model)
        checks.directory("adapter", self.adapter)

    def _check_offloading(self) -> None:
        for name in ("kv_offloading_size", "kv_offloading_dir_size"):
            found = getattr(self, name)
            if not (math.isfinite(found) and found >= 0):
                raise ValueError(f"{flag_of(name)}: expected 0 or more GiB, got {found:g}")
        size = self.kv_offloading_size
        stores = [name for name in ("kv_offloading_dir", "kv_pool") if getattr(self, name)]
        for name in stores:
            if not size:
                raise ValueError(
                    f"{flag_of(name)}: expected --kv-offloading-size with it, because KV goes "
                    "there through host memory"
                )
            if self.tensor_parallel_size > 1:
                raise ValueError(
                    f"{flag_of(name)}: expected --tensor-parallel-size 1 with it, "
                    f"got {self.tensor_parallel_size}"
                )
        if self.kv_offloading_dir is not None and not self.kv_offloading_dir_size:
            raise ValueError("--kv-offloading-dir-size: expected more than 0 GiB, got 0")
        if size and not self.enable_prefix_caching:
            raise ValueError("--kv-offloading-size: expected --enable-prefix-caching with it")
        if self.kv_pool is not None:
            try:
                host = PoolAddress.parse(self.kv_pool).host
            except ValueError as error:
                raise ValueError(f"--kv-pool: {error}") from error
            self.check_plaintext("kv_pool", host, "pages")


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
    startup_timeout_s: Annotated[float, "most time for loading weights and warming up"] = 300.0
    hang_timeout_s: Annotated[
        float,
        "replace an engine that makes no progress for this long, or for ten of its steps if that "
        "is longer",
    ] = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fleet_cert is None:
            self.check_plaintext("host", self.host, "calls")
        if self.encrypt_pages and self.connector == "nixl":
            raise ValueError(f"--encrypt-pages: expected --connector zmq, got {self.connector}")
        if not self.encrypt_pages:
            self.check_plaintext("host", self.host, "pages")
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

    @property
    def num_replicas(self) -> int:
        """Ranks that compute requests of their own."""
        return 1

    @property
    def context_degree(self) -> int:
        """Ranks that hold the same KV heads, each for other tokens."""
        return 1

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.num_replicas

    @property
    def runs_graphs(self) -> bool:
        """Whether a GPU may run captured graphs; FlexAttention compiles for new lengths."""
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

    reservation_s: Annotated[float, "most time that a computed prompt waits for a reservation"] = (
        60.0
    )
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


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """Settings of a decode worker. Raises ValueError that names the accepted form."""

    default_algorithm: Annotated[
        Algorithm | None, "algorithm of requests that name none (default: the model's)"
    ] = None
    handoff_lease_s: Annotated[
        float,
        "most time to push a computed prompt, and longest silence of its writer before",
    ] = 60.0
    data_parallel_size: Annotated[
        int, "devices with requests and KV of their own, and each layer's experts in common"
    ] = 1
    decode_context_parallel_size: Annotated[
        int,
        "devices, of those of tensor-parallel-size, that hold the same KV heads, each for other "
        "tokens of every request",
    ] = 1
    cp_kv_cache_interleave_size: Annotated[
        int | None, "tokens that lie on one of these devices one after another (default: page-size)"
    ] = None
    max_window: Annotated[int, "most blocks in flight for one request"] = 8
    max_stop_ids: Annotated[int, "most stop ids of a request, including end-of-sequence ids"] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.seconds("handoff_lease_s", self.handoff_lease_s, MAX_LEASE_S)
        checks.whole("data_parallel_size", self.data_parallel_size, 1, _MOST_RANKS)
        if self.data_parallel_size > 1 and self.tensor_parallel_size > 1:
            raise ValueError(
                "--data-parallel-size: expected --tensor-parallel-size 1 with it, "
                f"got {self.tensor_parallel_size}"
            )
        if self.data_parallel_size > 1 and self.kv_offloading_size:
            raise ValueError(
                "--kv-offloading-size: expected --data-parallel-size 1 with it, "
                f"got {self.data_parallel_size}"
            )
        self._check_context()
        checks.whole("max_window", self.max_window, int(WINDOW.low), int(WINDOW.high))
        checks.whole("max_stop_ids", self.max_stop_ids, 1, _MOST_STOP_IDS)

    def _check_context(self) -> None:
        degree, name = self.decode_context_parallel_size, "--decode-context-parallel-size"
        checks.whole("decode_context_parallel_size", degree, 1, _MOST_RANKS)
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
        if self.attention == "flex":
            raise ValueError(
                f"{name} {degree}: expected --attention triton with it, because flex returns no "
                "log-sum-exp, by which devices merge their results"
            )
        if self.batch_invariant:
            raise ValueError(
                f"{name} {degree}: expected no --batch-invariant with it, because a result rounds "
                "by how many of its keys are cached"
            )

    @property
    def num_replicas(self) -> int:
        return self.data_parallel_size

    @property
    def context_degree(self) -> int:
        """Ranks that hold the same KV heads, each for other tokens."""
        return self.decode_context_parallel_size


@dataclass(frozen=True, kw_only=True)
class BothConfig(PrefillConfig, DecodeConfig):
    """Settings of a worker whose role may change. Raises ValueError that names what is accepted."""

    role: Annotated[Role, "what it does at first; SetRole changes it at any time"] = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("role", self.role, get_args(Role))
        if self.data_parallel_size > 1:
            raise ValueError(
                "--data-parallel-size: expected 1 for a worker that also computes prompts for "
                f"others, got {self.data_parallel_size}"
            )
        if self.context_degree > 1:
            raise ValueError(
                "--decode-context-parallel-size: expected 1 for a worker that also computes "
                f"prompts for others, got {self.context_degree}"
            )


def to_json(config: WorkerConfig) -> bytes:
    """Returns the config in the form in which the engine process gets it."""
    return msgspec.json.encode(config, enc_hook=str)
