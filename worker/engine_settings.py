"""Settings of a worker's engine: its model, devices, KV memory and batches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

import effuse.models
from effuse.config import checks
from effuse.config.access import Access
from effuse.config.decoding import SETTINGS
from effuse.config.flags import flag_of
from effuse.config.pool_address import PoolAddress
from effuse.kvtransfer.messages import MAX_POOL_PAGES

Attention = Literal["triton", "flex"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVLayoutKind = Literal["unified", "distinct"]

MOST_RANKS: Final = 64


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
    pipeline_parallel_size: Annotated[
        int,
        "pipeline stages, each of tensor-parallel-size devices; as many forwards run at a time",
    ] = 1
    expert_parallel: Annotated[
        bool, "spread whole experts over the devices; without it each expert is split"
    ] = False
    nnodes: Annotated[int, "hosts of the worker's devices; start the same command on each"] = 1
    node_rank: Annotated[int, "number of this host, from 0; routers call host 0"] = 0
    master_addr: Annotated[
        str | None, "name or address of host 0, at which the other hosts reach it"
    ] = None
    master_port: Annotated[int, "port of host 0 for the other hosts"] = 29501

    @property
    def directory(self) -> Path:
        """Directory of the checkpoint; without one in the flags the bundled model's."""
        return self.model or Path(next(iter(effuse.models.__path__))) / "bundled"


@dataclass(frozen=True, kw_only=True)
class EngineSettings(ModelSettings):
    """A worker's KV memory and batches."""

    # KV memory.
    page_size: Annotated[int, "tokens in a KV page"] = 16
    num_pages: Annotated[
        int | None, "pages in the pool (default: as many as gpu-memory-utilization allows)"
    ] = None
    gpu_memory_utilization: Annotated[float, "share of device memory to use, in (0, 1]"] = 0.9
    kv_layout: Annotated[KVLayoutKind, "memory order of KV within a page"] = "unified"
    enable_prefix_caching: Annotated[
        bool, "keep the KV of ended requests for later ones that begin with the same tokens"
    ] = True
    kv_unit_tokens: Annotated[
        int | None,
        "tokens in a unit of kept KV, the same for all workers of a fleet (default: the fewest "
        "that fill whole pages and blocks)",
    ] = None
    kv_offloading_size: Annotated[
        float, "GiB of host memory, for all devices together, for kept KV without room in the pool"
    ] = 0.0
    kv_offloading_dir: Annotated[
        Path | None, "directory for kept KV without room in host memory"
    ] = None
    kv_offloading_dir_size: Annotated[float, "maximum GiB of files in that directory"] = 64.0
    kv_pool: Annotated[
        str | None,
        "keep KV also in this store, for all workers with the same model and layout: "
        "mooncake://host:port/namespace (extra `mooncake`), or lmcache://host:port/namespace",
    ] = None

    # Batching.
    block_size: Annotated[int | None, "tokens in a diffusion block (default: the model's)"] = None
    max_num_batched_tokens: Annotated[int, "maximum tokens in one forward"] = 2048
    max_num_seqs: Annotated[int, "maximum requests in one forward"] = 64
    max_model_len: Annotated[
        int | None, "maximum tokens of prompt and answer (default: the model's)"
    ] = None

    def __post_init__(self) -> None:
        Access.__post_init__(self)
        for name in ("page_size", "max_num_batched_tokens", "max_num_seqs"):
            checks.whole(name, getattr(self, name), 1)
        most = int(SETTINGS["denoising_steps"].high)  # a block's, by default one for each token
        checks.whole("block_size", self.block_size, 1, most)
        checks.whole("kv_unit_tokens", self.kv_unit_tokens, 1)
        checks.whole("max_model_len", self.max_model_len, 2)  # a prompt and an answer
        checks.whole("tensor_parallel_size", self.tensor_parallel_size, 1, MOST_RANKS)
        checks.whole("pipeline_parallel_size", self.pipeline_parallel_size, 1, MOST_RANKS)
        checks.choice("device", self.device, get_args(Device))
        checks.choice("dtype", self.dtype, get_args(Dtype))
        checks.whole("num_pages", self.num_pages, 1, MAX_POOL_PAGES)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"--gpu-memory-utilization: expected a share in (0, 1], "
                f"got {self.gpu_memory_utilization:g}"
            )
        self._check_offloading()
        if self.attention == "flex":
            self.expect_beside("--attention flex", {"kv_layout": "unified"})
        if self.batch_invariant:
            self.expect_beside("--batch-invariant", {"attention": "triton"})
        checks.model_name("served_model_name", self.served_model_name)
        checks.directory("model", self.model)
        checks.directory("adapter", self.adapter)

    def expect_beside(self, name: str, accepted: Mapping[str, object], why: str = "") -> None:
        """Raises ValueError for another value of a setting than the accepted one, which a flag
        needs. `name` is that of the flag in the error, and `why` the reason."""
        for other, value in accepted.items():
            if (found := getattr(self, other, value)) != value:
                wanted = f"{flag_of(other)} {value}" if value else f"no {flag_of(other)}"
                because = f", because {why}" if why else ""
                raise ValueError(f"{name}: expected {wanted} with it{because}, got {found}")

    def expect_devices(self, name: str, count: int) -> None:
        """Raises ValueError if so many times the tensor-parallel devices are too many."""
        if count * self.tensor_parallel_size > MOST_RANKS:
            raise ValueError(
                f"{name}: expected at most {MOST_RANKS} devices, got {count} times "
                f"--tensor-parallel-size {self.tensor_parallel_size}"
            )

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
            if self.nnodes > 1:
                raise ValueError(
                    f"{flag_of(name)}: expected --nnodes 1 with it, because ranks share that "
                    f"memory, got {self.nnodes}"
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
