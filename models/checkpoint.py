"""The released tensor names and shapes of each family, and reading them from safetensors files.

Files are single or sharded; every tensor is accounted for. Headers are read without torch.
`weights.py` merges products for speed; nothing is ever unpickled.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from safetensors import SafetensorError, safe_open

from effuse.config.lfs import pointer_problem
from effuse.models.config import ModelConfig
from effuse.models.config_experts import ExpertConfig
from effuse.models.config_keys import CheckpointError, ConfigKeys, read_json_object

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# names used by safetensors
_STORED_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_STORED_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
DTYPE_NAMES: Final = tuple(_STORED_NAMES.values())
"""Dtypes in which weights may be stored and computed."""

# Buffers that old releases store. Every family's code computes them from the configuration, and
# transformers drops them, so their values have no effect here either.
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorCut:
    """Ranges of a tensor's rows (`dim` 0) or columns (`dim` 1), to be read one after the other."""

    dim: int
    ranges: tuple[range, ...]

    def shape(self, whole: Shape) -> Shape:
        """Shape of the cut of a tensor of shape `whole`."""
        length = sum(map(len, self.ranges))
        return (*whole[: self.dim], length, *whole[self.dim + 1 :])

    def of(self, tensor: Tensor | SafeSlice) -> list[Tensor]:
        """The ranges of a tensor, or of one in a file, of which nothing else is read."""
        slices = [slice(part.start, part.stop) for part in self.ranges]
        return [tensor[:, one] if self.dim else tensor[one] for one in slices]


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Released module names of one gated MLP, each with a `.weight`."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Released module names of one layer, each with a `.weight` (and, of qkv, a `.bias`)."""

    attn_norm: str
    qkv: tuple[str, ...]  # q, k and v, or one module for all three
    q_norm: str
    k_norm: str
    attn_out: str
    mlp_norm: str
    mlps: tuple[MlpNames, ...]  # one, or every expert, with the shared one last
    router: str | None = None  # if there are experts
    router_bias: str | None = None  # a tensor, not a module


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Released module names outside the layers, and of every layer."""

    embedding: str
    norm: str
    head: str
    layers: tuple[LayerNames, ...]


def module_names(config: ModelConfig) -> ModelNames:
    """The names of modules in this family's releases."""
    numbers = range(config.num_layers)
    if config.architecture == "llada":
        top = "model.transformer"
        layers = tuple(_llada_layer(f"{top}.blocks.{i}") for i in numbers)
        return ModelNames(f"{top}.wte", f"{top}.ln_f", f"{top}.ff_out", layers)
    if config.architecture == "llada2_moe":
        layers = tuple(_llada2_layer(config, i) for i in numbers)
        return ModelNames("model.word_embeddings", "model.norm", "lm_head", layers)
    layers = tuple(_qwen_layer(config, i) for i in numbers)
    return ModelNames("model.embed_tokens", "model.norm", "lm_head", layers)


def _qwen_layer(config: ModelConfig, number: int) -> LayerNames:
    at = f"model.layers.{number}"
    experts = config.experts_of(number)
    return LayerNames(
        attn_norm=f"{at}.input_layernorm",
        qkv=tuple(f"{at}.self_attn.{name}_proj" for name in "qkv"),
        q_norm=f"{at}.self_attn.q_norm",
        k_norm=f"{at}.self_attn.k_norm",
        attn_out=f"{at}.self_attn.o_proj",
        mlp_norm=f"{at}.post_attention_layernorm",
        mlps=_mlps(f"{at}.mlp", experts),
        router=f"{at}.mlp.gate" if experts else None,
    )


def _llada2_layer(config: ModelConfig, number: int) -> LayerNames:
    at = f"model.layers.{number}"
    experts = config.experts_of(number)
    return LayerNames(
        attn_norm=f"{at}.input_layernorm",
        qkv=(f"{at}.attention.query_key_value",),
        q_norm=f"{at}.attention.query_layernorm",
        k_norm=f"{at}.attention.key_layernorm",
        attn_out=f"{at}.attention.dense",
        mlp_norm=f"{at}.post_attention_layernorm",
        mlps=_mlps(f"{at}.mlp", experts),
        router=f"{at}.mlp.gate" if experts else None,
        router_bias=f"{at}.mlp.gate.expert_bias" if experts else None,
    )


def _mlps(at: str, experts: ExpertConfig | None) -> tuple[MlpNames, ...]:
    if experts is None:
        return (_mlp(at),)
    routed = (f"{at}.experts.{number}" for number in range(experts.routing.num_experts))
    shared = (f"{at}.shared_experts",) * experts.routing.num_shared
    return tuple(_mlp(name) for name in (*routed, *shared))


def _mlp(at: str) -> MlpNames:
    return MlpNames(f"{at}.gate_proj", f"{at}.up_proj", f"{at}.down_proj")


def _llada_layer(at: str) -> LayerNames:
    return LayerNames(
        attn_norm=f"{at}.attn_norm",
        qkv=tuple(f"{at}.{name}_proj" for name in "qkv"),
        q_norm=f"{at}.q_norm",
        k_norm=f"{at}.k_norm",
        attn_out=f"{at}.attn_out",
        mlp_norm=f"{at}.ff_norm",
        mlps=(MlpNames(f"{at}.ff_proj", f"{at}.up_proj", f"{at}.ff_out"),),
    )


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of a release with this configuration, with its shape."""
    names = module_names(config)
    shapes: dict[str, Shape] = {
        f"{names.embedding}.weight": (config.vocab_size, config.hidden_size),
        f"{names.norm}.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes[f"{names.head}.weight"] = (config.vocab_size, config.hidden_size)
    for number, layer in enumerate(names.layers):
        shapes |= _attention_shapes(config, layer)
        shapes |= _mlp_shapes(config, layer, config.experts_of(number))
    return shapes


def _attention_shapes(config: ModelConfig, layer: LayerNames) -> dict[str, Shape]:
    hidden, dim = config.hidden_size, config.head_dim
    q_dim, kv_dim = config.num_heads * dim, config.num_kv_heads * dim
    rows = (q_dim, kv_dim, kv_dim) if len(layer.qkv) == 3 else (q_dim + 2 * kv_dim,)
    shapes: dict[str, Shape] = {
        f"{layer.attn_norm}.weight": (hidden,),
        f"{layer.attn_out}.weight": (hidden, q_dim),
    }
    for name, count in zip(layer.qkv, rows, strict=True):
        shapes[f"{name}.weight"] = (count, hidden)
        if config.qkv_bias:
            shapes[f"{name}.bias"] = (count,)
    if config.qk_norm:
        shapes |= {f"{name}.weight": (dim,) for name in (layer.q_norm, layer.k_norm)}
    return shapes


def _mlp_shapes(
    config: ModelConfig, layer: LayerNames, experts: ExpertConfig | None
) -> dict[str, Shape]:
    hidden = config.hidden_size
    inner = config.intermediate_size if experts is None else experts.intermediate_size
    shapes: dict[str, Shape] = {f"{layer.mlp_norm}.weight": (hidden,)}
    for mlp in layer.mlps:
        shapes |= {f"{name}.weight": (inner, hidden) for name in (mlp.gate, mlp.up)}
        shapes[f"{mlp.down}.weight"] = (hidden, inner)
    if experts is not None:
        num_experts = experts.routing.num_experts
        shapes[f"{layer.router}.weight"] = (num_experts, hidden)
        if layer.router_bias is not None:
            shapes[layer.router_bias] = (num_experts,)
    return shapes


class SafeSlice(Protocol):
    """A tensor's description in an open file."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, at: slice | tuple[slice, slice]) -> Tensor: ...


class SafeFile(Protocol):
    """The used part of an open safetensors file; the library has no types for it."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> SafeSlice: ...
    def get_tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """Open safetensors files; each of their tensors is known by name, and read when it is used."""

    locations: Mapping[str, tuple[Path, SafeFile]]

    def shape(self, name: str) -> Shape:
        """Shape of a tensor without reading it."""
        _, file = self.locations[name]
        return tuple(file.get_slice(name).get_shape())

    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(
            math.prod(self.shape(name)) * _STORED_BYTES.get(file.get_slice(name).get_dtype(), 0)
            for name, (_, file) in self.locations.items()
        )

    def take(self, name: str, cut: TensorCut | None = None) -> Tensor:
        """Read one tensor, or a cut of it, on the device that the files were opened for, in its
        stored dtype."""
        self.check_dtype(name)
        file = self.locations[name][1]
        if cut is None:
            return file.get_tensor(name)
        import torch

        return torch.cat(cut.of(file.get_slice(name)), dim=cut.dim)

    def check_dtype(self, name: str) -> None:
        """Raise CheckpointError if a tensor is stored in an unsupported dtype."""
        path, file = self.locations[name]
        stored = file.get_slice(name).get_dtype()
        if stored not in _STORED_NAMES:
            raise CheckpointError(
                f"{path}: tensor {name} has dtype {stored}; "
                f"expected one of {', '.join(_STORED_NAMES)}"
            )


@contextmanager
def open_tensors(paths: list[Path], device: torch.device | None) -> Iterator[TensorFiles]:
    """Open files together, to be read on `device`, or only their headers without torch. A tensor in
    two of them is an error; buffers of rotary numbers are left out.
    """
    locations: dict[str, tuple[Path, SafeFile]] = {}
    with ExitStack() as stack:
        for path in paths:
            file = stack.enter_context(_open(path, device))
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if _COMPUTED.search(name):
                    continue
                if name in locations:
                    raise CheckpointError(
                        f"tensor {name} is in both {locations[name][0].name} and {path.name}"
                    )
                locations[name] = (path, file)
        yield TensorFiles(locations)


def _open(path: Path, device: torch.device | None) -> AbstractContextManager[SafeFile]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        if device is None:
            opened = safe_open(path, framework="np")
        else:
            opened = safe_open(path, framework="pt", device=str(device))
    except SafetensorError as error:
        problem = pointer_problem(path) or f"not a safetensors file: {error}"
        raise CheckpointError(f"{path}: {problem}") from None
    return cast("AbstractContextManager[SafeFile]", opened)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the single one, or the shards in its index."""
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    if not (directory / INDEX_FILE).exists():
        raise CheckpointError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    return [directory / name for name in sorted(set(weight_map(directory).values()))]


def stored_dtype(directory: Path) -> str:
    """The dtype of most of a checkpoint's elements: float32, bfloat16, float16, or another one by
    safetensors' name. Reads no tensor. Raises CheckpointError.
    """
    counts: Counter[str] = Counter()
    with open_tensors(weight_files(directory), None) as files:
        for name, (_, file) in files.locations.items():
            counts[file.get_slice(name).get_dtype()] += math.prod(files.shape(name))
    most = max(counts, key=lambda dtype: counts[dtype], default="F32")
    return _STORED_NAMES.get(most, most)


def dtype_name(name: str, directory: Path) -> str:
    """`name`, one of DTYPE_NAMES; for `auto` the dtype in the checkpoint's config.json, or
    otherwise that of most of its weights. Raises CheckpointError for any other name.
    """
    if name == "auto":
        keys = ConfigKeys.read(directory / "config.json")
        stated = [keys.values[key] for key in ("dtype", "torch_dtype") if keys.values.get(key)]
        name = str(stated[0]) if stated else stored_dtype(directory)
    if name not in DTYPE_NAMES:
        raise CheckpointError(
            f"dtype {name!r} is not supported; accepted: auto, {', '.join(DTYPE_NAMES)}"
        )
    return name


def weight_map(directory: Path) -> dict[str, str]:
    """The shard of each tensor, from a sharded checkpoint's index."""
    path = directory / INDEX_FILE
    entries = read_json_object(path).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise CheckpointError(f"{path}: weight_map: expected an object that names shards")
    for name, shard in entries.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{path}: {name}: {shard!r} is not the name of a file in its directory"
            )
    return entries


def check_tensors(directory: Path, files: TensorFiles, expected: Mapping[str, Shape]) -> None:
    """Raise CheckpointError that names the first missing, extra or wrongly shaped tensor."""
    for name, shape in expected.items():
        if name not in files.locations:
            raise CheckpointError(f"{directory}: tensor {name} of shape {list(shape)} is missing")
        found = files.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{directory}: tensor {name} has shape {list(found)}, expected {list(shape)}"
            )
    for name in sorted(files.locations.keys() - expected.keys()):
        raise CheckpointError(
            f"{directory}: tensor {name} of shape {list(files.shape(name))} is not part of "
            "this architecture"
        )


def without_tied_head(config: ModelConfig, files: TensorFiles) -> TensorFiles:
    """A tied model may also store its head; only the values show if it equals the embedding."""
    head = f"{module_names(config).head}.weight"
    if not config.tie_embeddings:
        return files
    return TensorFiles({name: at for name, at in files.locations.items() if name != head})


def check_index(directory: Path, files: TensorFiles) -> None:
    """Raise CheckpointError that names a tensor that is not in its shard of the index."""
    if (directory / SINGLE_FILE).exists():
        return
    for name, shard in weight_map(directory).items():
        found = files.locations.get(name)
        if _COMPUTED.search(name):
            continue
        if found is None or found[0].name != shard:
            where = "no shard" if found is None else found[0].name
            raise CheckpointError(
                f"{directory / INDEX_FILE}: tensor {name}: expected in {shard}, found in {where}"
            )
