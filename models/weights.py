"""From a checkpoint directory, with an optional LoRA adapter, to a transformer.

Checks that every tensor is there, merges adapters in fp32, and puts q, k, v and gate, up next to
each other, so that each group is one product. Also computes the digest by which two workers know
that they have the same weights. Names and files are in `checkpoint.py`.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from effuse.kernels.attention import Attend, block_attention
from effuse.models.adapter import CONFIG_FILE, TENSOR_FILE, Adapter, open_adapter
from effuse.models.checkpoint import (
    TensorFiles,
    checked_tensors,
    dtype_name,
    open_tensors,
    weight_files,
)
from effuse.models.config import ModelConfig
from effuse.models.config_keys import CheckpointError
from effuse.models.group import ALL, RankPlace
from effuse.models.progress import progress_log
from effuse.models.tensors import (
    ROUTER,
    ModelShard,
    Released,
    layer_at,
    mlps_of,
    tensor_shapes,
    tensors_of,
)
from effuse.models.transformer import LayerWeights, ModelWeights, Transformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MEASURED_LAYERS = 2


def load_model(
    path: Path | str,
    *,
    adapter: Path | str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    block_size: int | None = None,
    most_positions: int | None = None,
    attend: Attend = block_attention,
    place: RankPlace = ALL,
    batch_invariant: bool = False,
) -> Transformer:
    """Load a published checkpoint directory; `block_size` overrides the configuration's, and
    `most_positions` its positions if these are more.

    Of a group of ranks only this one's part is read. Raises CheckpointError naming the
    configuration key, or the missing, surplus or wrongly shaped tensor, with what was expected and
    what was found; or how much memory is short, before anything is read; ValueError if the model
    cannot be cut into so many parts.
    """
    directory, device = Path(path), torch.device(device)
    config = ModelConfig.from_dir(directory, block_size=block_size)
    if most_positions is not None and most_positions < config.max_position_embeddings:
        config = replace(config, max_position_embeddings=most_positions)
    shard = place.shard(config)
    shapes, held = tensor_shapes(config), tensors_of(config, shard)
    check_memory(directory, config, held, dtype, device)
    opened = open_tensors(weight_files(directory), device)
    files = checked_tensors(directory, config, opened, shapes)
    _check_tied_head(directory, config, opened)
    merged = None if adapter is None else open_adapter(Path(adapter), shapes, device)
    with progress_log("weights", files.num_bytes(), unit="GB", per_unit=1e9) as add_progress:
        loader = _Loader(files, merged, dtype, device, add_progress, held)
        weights = loader.model(config, shard)
    return Transformer(
        config,
        weights,
        attend,
        shard,
        place.group,
        place.replicas,
        batch_invariant=batch_invariant,
        context=place.context,
        stage=place.stage,
    )


def measure_products(model: Transformer) -> None:
    """Chooses the tiles of a batch-invariant model's products on this GPU: a few seconds, and a
    minute for kernels that no earlier process has compiled. Without a GPU it does nothing."""
    if model.device.type == "cpu":
        return
    from effuse.kernels.products_hopper import measure  # imports Triton, which a CPU does not need

    first_kv = len(model.shard.queries) * model.config.head_dim
    layers, head = model.weights.layers, model.weights.head
    dense = [layer for layer in layers if layer.router is None]
    routers = [layer.router for layer in layers if layer.router is not None]
    products = (
        ([layer.qkv for layer in layers], 1, None),
        ([layer.qkv[first_kv:] for layer in layers], 1, None),
        ([layer.attn_out for layer in layers], 1, None),
        ([layer.gate_up for layer in dense], 1, None),
        ([layer.down for layer in dense], 2 if model.shard.size == 1 else 1, None),
        ([head], 1, None),
        (routers, 1, torch.float32),
    )
    for weights, shares, out_dtype in products:
        if weights:
            measure(weights[:_MEASURED_LAYERS], shares=shares, out_dtype=out_dtype)
    torch.cuda.empty_cache()  # the pool gets what is free


def select_dtype(name: str, path: Path | str) -> torch.dtype:
    """The dtype `name`, one of DTYPES; for `auto` that in the checkpoint's config.json, or
    otherwise that of most of its weights.

    Raises CheckpointError for any other name.
    """
    return DTYPES[dtype_name(name, Path(path))]


def weights_digest(path: Path | str, adapter: Path | str | None = None) -> str:
    """xxh3-128 in hex over names and bytes of config.json and the weights' files, and of the
    adapter's two files, so that workers with different ones never agree. Other files do not
    count. Reads every byte once: seconds for 16 GB in the page cache. Raises CheckpointError for a
    missing file.
    """
    files = [Path(path) / "config.json", *weight_files(Path(path))]
    if adapter is not None:
        files += [Path(adapter) / name for name in (CONFIG_FILE, TENSOR_FILE)]
    digest = xxhash.xxh3_128()
    for file in files:
        if not file.is_file():  # also a broken link
            raise CheckpointError(f"{file}: no such file")
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb", buffering=0) as stream:
            hashlib.file_digest(stream, lambda: digest)
    return str(digest.hexdigest())


def check_memory(
    directory: Path,
    config: ModelConfig,
    tensors: Mapping[str, Released],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise CheckpointError if what is read, and the rotary table, do not fit into the device's
    free memory."""
    needed = sum(math.prod(one.held) for one in tensors.values()) * dtype.itemsize
    table = math.prod(config.rotary_shape) * torch.float32.itemsize
    free = free_bytes(device)
    if needed + table > free:
        raise CheckpointError(
            f"{directory}: the weights are {needed / 1e9:.1f} GB in {dtype}, the table of "
            f"{config.max_position_embeddings} positions {table / 1e9:.1f} GB, {device} has "
            f"{free / 1e9:.1f} GB free; --tensor-parallel-size and --pipeline-parallel-size spread "
            "weights over several devices, --max-model-len limits positions"
        )


def free_bytes(device: torch.device) -> int:
    """Memory for new tensors: on a GPU the free memory. On the host, the free memory without file
    caches, within the limit of this process's control group.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    free = int(meminfo.partition("MemAvailable:")[2].split()[0]) << 10
    group = Path("/sys/fs/cgroup/memory.max")
    limit = group.read_text(encoding="ascii").strip() if group.exists() else "max"
    return free if limit == "max" else min(free, int(limit))


@dataclass(frozen=True, slots=True)
class _Loader:
    """Takes tensors by name: adapter added in fp32, then cast."""

    files: TensorFiles
    adapter: Adapter | None
    dtype: torch.dtype
    device: torch.device
    add_progress: Callable[[float], None]  # bytes
    tensors: Mapping[str, Released]

    def model(self, config: ModelConfig, shard: ModelShard) -> ModelWeights:
        def held(name: str, load: Callable[[str], Tensor]) -> Tensor:
            """None of it in a stage that does not need it."""
            if f"{name}.weight" in self.tensors:
                return load(name)
            return torch.empty(0, config.hidden_size, dtype=self.dtype, device=self.device)

        layout = config.family.layout
        embedding = held(layout.embedding, self.matrix)
        return ModelWeights(
            embedding=embedding,
            layers=tuple(self.layer(config, shard, number) for number in shard.layers),
            norm=held(layout.norm, lambda name: self.take(f"{name}.weight")),
            head=embedding if config.tie_embeddings else held(layout.head, self.matrix),
        )

    def layer(self, config: ModelConfig, shard: ModelShard, number: int) -> LayerWeights:
        names, at = config.family.layout, layer_at(config, number)
        experts, qkv = config.experts_of(number), [f"{at}{name}" for name in names.qkv]
        biases = [self.take(f"{name}.bias") for name in qkv] if config.qkv_bias else None
        mlps = mlps_of(config, shard, number)
        gate_up, down = self.mlp(*mlps[0]) if experts is None else self.experts(mlps)
        has_bias = experts is not None and experts.has_bias
        return LayerWeights(
            attn_norm=self.take(f"{at}{names.attn_norm}.weight"),
            qkv=torch.cat([self.matrix(name) for name in qkv]),
            qkv_bias=None if biases is None else torch.cat(biases),
            q_norm=self.take(f"{at}{names.q_norm}.weight") if config.qk_norm else None,
            k_norm=self.take(f"{at}{names.k_norm}.weight") if config.qk_norm else None,
            attn_out=self.matrix(f"{at}{names.attn_out}"),
            mlp_norm=self.take(f"{at}{names.mlp_norm}.weight"),
            gate_up=gate_up,
            down=down,
            router=None if experts is None else self.matrix(f"{at}{ROUTER}"),
            router_bias=self.read(f"{at}{ROUTER}.expert_bias").float() if has_bias else None,
        )

    def mlp(self, gate: str, up: str, down: str) -> tuple[Tensor, Tensor]:
        """gate_up [2I, H] and down [H, I] of a layer without experts."""
        return torch.cat([self.matrix(gate), self.matrix(up)]), self.matrix(down)

    def experts(self, mlps: Sequence[tuple[str, str, str]]) -> tuple[Tensor, Tensor]:
        """The same of E experts, [E, 2I, H] and [E, H, I]. Each is read directly into its place
        among all, so that a layer is never in memory twice.
        """
        hidden, inner = self.tensors[f"{mlps[0][2]}.weight"].held
        empty = partial(torch.empty, dtype=self.dtype, device=self.device)
        gate_ups, downs = empty(len(mlps), 2 * inner, hidden), empty(len(mlps), hidden, inner)
        for (gate, up, down), gate_up, into in zip(mlps, gate_ups, downs, strict=True):
            gate_up[:inner] = self.matrix(gate)
            gate_up[inner:] = self.matrix(up)
            into.copy_(self.matrix(down))
        return gate_ups, downs

    def matrix(self, module: str) -> Tensor:
        """A module's weight with its adapter merged."""
        weight = self.read(f"{module}.weight")
        delta = None
        if self.adapter is not None:
            delta = self.adapter.delta(module, self.tensors[f"{module}.weight"].cut)
        if delta is not None:
            weight = weight.float() + delta
        return weight.to(self.dtype)

    def take(self, name: str) -> Tensor:
        return self.read(name).to(self.dtype)

    def read(self, name: str) -> Tensor:
        cut = self.tensors[name].cut
        tensor = self.files.take(name, cut)
        self.add_progress(tensor.nbytes)
        if cut is not None or tensor.device.type != "cpu":
            return tensor
        # It is the mapped file itself: a process that rewrites the file would change it.
        return tensor.clone()


def _check_tied_head(directory: Path, config: ModelConfig, files: TensorFiles) -> None:
    """Some releases of tied models also store the head, which must equal the embedding."""
    names = config.family.layout
    head = f"{names.head}.weight"
    if not config.tie_embeddings or head not in files.locations:
        return
    if not torch.equal(files.take(head), files.take(f"{names.embedding}.weight")):
        raise CheckpointError(
            f"{directory}: tensor {head} differs from {names.embedding}.weight, although the "
            "configuration ties them"
        )
