"""The released tensors of each family: names, shapes, and the part for one rank.

Attention is cut by heads, the MLP by its inner columns, embedding and head by vocabulary (Shoeybi
et al., arXiv 1909.08053). Experts are cut by inner columns as well, or spread over the ranks whole.
Replicas hold everything else whole.
Knows no torch and no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from effuse.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
ROUTER: Final = "mlp.gate"
"""The module of a layer that chooses experts, in the releases of all families that have any."""


class SafeSlice(Protocol):
    """A tensor's description in an open file."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, at: slice | tuple[slice, slice]) -> Tensor: ...


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
class ModelShard:
    """One rank's part of a model. Ranges are of the whole model's numbers.

    KV heads that are fewer than ranks are replicated: several ranks hold the same one. Ranks that
    cut the context hold the same heads for different tokens, and compute queries of all of them.
    """

    rank: int
    size: int  # ranks in the group; a group of one holds all, or all but other replicas' experts
    heads: range
    queries: range  # heads whose queries it computes: its own, or those of its context group
    kv_heads: range
    vocabulary: range
    vocabularies: tuple[int, ...]  # rows of the head that each rank holds
    layers: range  # all of them, or those of a pipeline's stage
    experts: range | None = None  # routed experts that it holds whole; None cuts each expert


def whole(config: ModelConfig) -> ModelShard:
    """The shard of a group of one."""
    return shard_of(config, 0, 1)


def shard_of(
    config: ModelConfig,
    rank: int,
    size: int,
    *,
    expert_parallel: bool = False,
    context_degree: int = 1,
    layers: range | None = None,
) -> ModelShard:
    """The part of `rank` in a group of `size`, of which `context_degree` ranks each cut the context
    among them; of all layers, or only of these. Raises ValueError naming what does not divide."""
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a group of {size}")
    _check(config, size, expert_parallel=expert_parallel)
    if size % context_degree:
        raise ValueError(
            f"--decode-context-parallel-size {context_degree}: {size} tensor-parallel ranks are "
            "not a multiple of it"
        )
    group, groups = rank // context_degree, size // context_degree
    if config.num_kv_heads % groups and groups % config.num_kv_heads:
        raise ValueError(
            f"--decode-context-parallel-size {context_degree}: {groups} groups of ranks cannot "
            f"share {config.num_kv_heads} KV heads: neither number divides the other"
        )
    experts = None
    if config.experts is not None and expert_parallel:
        experts = _part(config.experts.routing.num_experts, rank, size)
    return ModelShard(
        rank,
        size,
        heads=_part(config.num_heads, rank, size),
        queries=_part(config.num_heads, group, groups),
        kv_heads=_kv_heads(config.num_kv_heads, group, groups),
        vocabulary=_part(config.vocab_size, rank, size),
        vocabularies=tuple(len(_part(config.vocab_size, one, size)) for one in range(size)),
        layers=range(config.num_layers) if layers is None else layers,
        experts=experts,
    )


def replica_of(config: ModelConfig, rank: int, size: int) -> ModelShard:
    """All of the model but its routed experts, of which `rank` of `size` replicas holds a part.

    Raises ValueError for a model without experts, or whose experts do not divide.
    """
    name, experts = "--data-parallel-size", config.experts
    if experts is None:
        raise ValueError(f"{name}: the model has no experts to share; start {size} workers instead")
    if config.shift_logits:
        raise ValueError(f"{name}: {config.architecture} shifts logits, which replicas do not")
    count = experts.routing.num_experts
    if count % size:
        raise ValueError(f"{name}: {count} experts are not a multiple of {size} replicas")
    return replace(whole(config), experts=_part(count, rank, size))


def _check(config: ModelConfig, size: int, *, expert_parallel: bool) -> None:
    name = "--tensor-parallel-size"
    kv_heads = config.num_kv_heads
    if config.num_heads % size:
        raise ValueError(
            f"{name} {size}: {config.num_heads} attention heads are not a multiple of it"
        )
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"{name} {size}: expected a divisor or a multiple of the {kv_heads} KV heads"
        )
    has_dense = config.experts is None or config.experts.num_dense_layers > 0
    if has_dense and config.intermediate_size % size:
        raise ValueError(
            f"{name} {size}: {config.intermediate_size} MLP columns are not a multiple of it"
        )
    if config.experts is None:
        if expert_parallel and size > 1:
            raise ValueError("--expert-parallel: the model has no experts")
        return
    count, inner = config.experts.routing.num_experts, config.experts.intermediate_size
    if expert_parallel and count % size:
        raise ValueError(f"--expert-parallel: {count} experts are not a multiple of {size} ranks")
    if not expert_parallel and inner % size:
        raise ValueError(
            f"{name} {size}: an expert's {inner} columns are not a multiple of it; "
            "--expert-parallel spreads whole experts"
        )


def _part(count: int, rank: int, size: int) -> range:
    """Part `rank` of `size` nearly equal ones of `count`, the larger ones first."""
    least, left = divmod(count, size)
    begin = rank * least + min(rank, left)
    return range(begin, begin + least + (rank < left))


def _kv_heads(count: int, rank: int, size: int) -> range:
    if count % size == 0:
        return _part(count, rank, size)
    only = rank * count // size
    return range(only, only + 1)


@dataclass(frozen=True, slots=True)
class Released:
    """A released tensor of which a rank reads something: all of it, or a cut."""

    shape: Shape  # of all of it
    cut: TensorCut | None = None

    @property
    def held(self) -> Shape:
        """Shape of the rank's part."""
        return self.shape if self.cut is None else self.cut.shape(self.shape)


def layer_at(config: ModelConfig, number: int) -> str:
    """The prefix of the names of a layer's modules in this family's releases."""
    return f"{config.family.layout.layers}.{number}."


def mlps_of(config: ModelConfig, shard: ModelShard, number: int) -> list[tuple[str, str, str]]:
    """The modules gate, up and down of a layer's gated MLPs: of the only one, or of each expert,
    with the shared one last. Of experts that are spread only those of the rank.
    """
    layout, experts = config.family.layout, config.experts_of(number)
    at = layer_at(config, number) + layout.mlp
    places = [at]
    if experts is not None:
        routed = range(experts.routing.num_experts) if shard.experts is None else shard.experts
        places = [f"{at}experts.{one}." for one in routed]
        places += [f"{at}shared_experts."] * experts.routing.num_shared
    return [(one + layout.gate, one + layout.up, one + layout.down) for one in places]


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of a release with this configuration, with its shape."""
    return {name: one.shape for name, one in tensors_of(config, whole(config)).items()}


def tensors_of(config: ModelConfig, shard: ModelShard) -> dict[str, Released]:
    """By name every tensor of a release of which the rank reads something."""
    layout, hidden = config.family.layout, config.hidden_size
    rows = Released((config.vocab_size, hidden), _cut(shard, 0, shard.vocabulary))
    is_first, is_last = shard.layers.start == 0, shard.layers.stop == config.num_layers
    found = {}
    if is_first or (is_last and config.tie_embeddings):
        found[f"{layout.embedding}.weight"] = rows
    if is_last:
        found[f"{layout.norm}.weight"] = Released((hidden,))
        if not config.tie_embeddings:
            found[f"{layout.head}.weight"] = rows
    for number in shard.layers:
        found |= _attention(config, shard, layer_at(config, number))
        found |= _mlp(config, shard, number)
    return found


def _attention(config: ModelConfig, shard: ModelShard, at: str) -> Mapping[str, Released]:
    layout, hidden, dim = config.family.layout, config.hidden_size, config.head_dim
    q_dim, kv_dim = config.num_heads * dim, config.num_kv_heads * dim
    q, kv = _rows(shard.queries, dim), _rows(shard.kv_heads, dim)
    of_kv = kv_dim, (kv,)
    parts: Sequence[tuple[int, tuple[range, ...]]] = ((q_dim, (q,)), of_kv, of_kv)
    if len(layout.qkv) == 1:
        joined = (q, _moved(kv, q_dim), _moved(kv, q_dim + kv_dim))
        parts = ((q_dim + 2 * kv_dim, joined),)
    found = {
        f"{at}{layout.attn_norm}.weight": Released((hidden,)),
        f"{at}{layout.attn_out}.weight": Released(
            (hidden, q_dim), _cut(shard, 1, _rows(shard.heads, dim))
        ),
    }
    for name, (count, ranges) in zip(layout.qkv, parts, strict=True):
        found[f"{at}{name}.weight"] = Released((count, hidden), _cut(shard, 0, *ranges))
        if config.qkv_bias:
            found[f"{at}{name}.bias"] = Released((count,), _cut(shard, 0, *ranges))
    if config.qk_norm:
        norms = (layout.q_norm, layout.k_norm)
        found |= {f"{at}{name}.weight": Released((dim,)) for name in norms}
    return found


def _mlp(config: ModelConfig, shard: ModelShard, number: int) -> Mapping[str, Released]:
    hidden, experts, at = config.hidden_size, config.experts_of(number), layer_at(config, number)
    inner = config.intermediate_size if experts is None else experts.intermediate_size
    is_cut = experts is None or shard.experts is None
    own = _part(inner, shard.rank, shard.size) if is_cut else range(inner)
    found = {f"{at}{config.family.layout.mlp_norm}.weight": Released((hidden,))}
    for gate, up, down in mlps_of(config, shard, number):
        for name in (gate, up):
            found[f"{name}.weight"] = Released((inner, hidden), _cut(shard, 0, own))
        found[f"{down}.weight"] = Released((hidden, inner), _cut(shard, 1, own))
    if experts is not None:
        num_experts = experts.routing.num_experts
        found[f"{at}{ROUTER}.weight"] = Released((num_experts, hidden))
        if experts.has_bias:
            found[f"{at}{ROUTER}.expert_bias"] = Released((num_experts,))
    return found


def _cut(shard: ModelShard, dim: int, *ranges: range) -> TensorCut | None:
    """A rank that holds the whole model reads every tensor whole."""
    return None if shard.size == 1 else TensorCut(dim, ranges)


def _rows(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
