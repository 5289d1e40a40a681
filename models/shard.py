"""What one rank of a tensor-parallel group holds of a model, and the sums that the ranks share.

Attention is cut by heads, the MLP by its inner columns, embedding and head by vocabulary (Shoeybi
et al., arXiv 1909.08053). Experts are cut by inner columns as well, or spread over the ranks whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import Tensor

from effuse.kernels.experts import NO_EXPERT, Routes
from effuse.models.checkpoint import LayerNames, ModelNames, Shape, TensorCut, module_names
from effuse.models.config import ModelConfig


class Group(Protocol):
    """The ranks of one model. All of them call the same methods in the same order."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors of this shape, in a fixed order of ranks; may overwrite
        ``x``."""
        ...

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """All ranks' ``x`` [R, sizes[rank]] side by side: [R, sum of sizes]."""
        ...

    def deal(self, x: Tensor) -> Tensor:
        """From each rank its part for this rank; x: [N, ...], part n for rank n: [N, ...]."""
        ...

    def share(self, x: Tensor) -> Tensor:
        """Rank 0's tensor; the others give one of the same shape, which is overwritten."""
        ...

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        ...

    def close(self) -> None:
        """Ends its threads, if it has any."""
        ...


class Alone:
    """The group of one rank: nothing is exchanged."""

    def sum(self, x: Tensor) -> Tensor:
        """``x``."""
        return x

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """``x``."""
        return x

    def deal(self, x: Tensor) -> Tensor:
        """``x``."""
        return x

    def share(self, x: Tensor) -> Tensor:
        """``x``."""
        return x

    def least(self, number: int) -> int:
        """The number."""
        return number

    def close(self) -> None:
        """Nothing is to be ended."""


ALONE: Final = Alone()


@dataclass(frozen=True, slots=True)
class ModelShard:
    """One rank's part of a model. Ranges are of the whole model's numbers.

    KV heads that are fewer than ranks are replicated: several ranks hold the same one.
    """

    rank: int
    size: int  # ranks in the group
    heads: range
    kv_heads: range
    vocabulary: range
    experts: range | None = None  # routed experts that it holds whole; None cuts each expert

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds all of the model."""
        return self.size == 1


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a process stands in the group that serves a model together."""

    rank: int = 0
    size: int = 1
    expert_parallel: bool = False
    group: Group = ALONE

    def shard(self, config: ModelConfig) -> ModelShard:
        """Its part of a model. Raises ValueError naming what does not divide."""
        return shard_of(config, self.rank, self.size, expert_parallel=self.expert_parallel)


ALL: Final = RankPlace()
"""The place of a process that serves a model by itself."""


def whole(config: ModelConfig) -> ModelShard:
    """The shard of a group of one."""
    return shard_of(config, 0, 1)


def shard_of(
    config: ModelConfig, rank: int, size: int, *, expert_parallel: bool = False
) -> ModelShard:
    """The part of `rank` in a group of `size`. Raises ValueError naming what does not divide."""
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a group of {size}")
    _check(config, size, expert_parallel=expert_parallel)
    experts = None
    if config.experts is not None and expert_parallel:
        experts = _part(config.experts.routing.num_experts, rank, size)
    return ModelShard(
        rank,
        size,
        heads=_part(config.num_heads, rank, size),
        kv_heads=_kv_heads(config.num_kv_heads, rank, size),
        vocabulary=_part(config.vocab_size, rank, size),
        experts=experts,
    )


def _check(config: ModelConfig, size: int, *, expert_parallel: bool) -> None:
    name = "--tensor-parallel-size"
    kv_heads = config.num_kv_heads
    if config.num_heads % size:
        raise ValueError(f"{name} {size}: {config.num_heads} attention heads do not divide by it")
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"{name} {size}: expected a divisor or a multiple of the {kv_heads} KV heads"
        )
    has_dense = config.experts is None or config.experts.num_dense_layers > 0
    if has_dense and config.intermediate_size % size:
        raise ValueError(f"{name} {size}: {config.intermediate_size} MLP columns do not divide")
    if config.experts is None:
        if expert_parallel and size > 1:
            raise ValueError("--expert-parallel: the model has no experts")
        return
    count, inner = config.experts.routing.num_experts, config.experts.intermediate_size
    if expert_parallel and count % size:
        raise ValueError(f"--expert-parallel: {count} experts do not divide by {size} ranks")
    if not expert_parallel and inner % size:
        raise ValueError(
            f"{name} {size}: an expert's {inner} columns do not divide by it; "
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


def cuts_of(config: ModelConfig, shard: ModelShard) -> Mapping[str, TensorCut]:
    """By tensor name which rows or columns of it the rank reads; others it reads whole."""
    if shard.is_whole:
        return {}
    names, rows = module_names(config), TensorCut(0, (shard.vocabulary,))
    cuts = {f"{names.embedding}.weight": rows, f"{names.head}.weight": rows}
    for number, layer in enumerate(names.layers):
        cuts |= _attention_cuts(config, shard, layer)
        if config.experts_of(number) is None:
            cuts |= _mlp_cuts(layer, _part(config.intermediate_size, shard.rank, shard.size))
        elif config.experts is not None and shard.experts is None:
            inner = _part(config.experts.intermediate_size, shard.rank, shard.size)
            cuts |= _mlp_cuts(layer, inner)
    return cuts


def _attention_cuts(
    config: ModelConfig, shard: ModelShard, layer: LayerNames
) -> dict[str, TensorCut]:
    q, kv = _rows(shard.heads, config.head_dim), _rows(shard.kv_heads, config.head_dim)
    by_name: tuple[tuple[range, ...], ...] = ((q,), (kv,), (kv,))
    if len(layer.qkv) == 1:
        k_begin = config.num_heads * config.head_dim
        v_begin = k_begin + config.num_kv_heads * config.head_dim
        by_name = ((q, _moved(kv, k_begin), _moved(kv, v_begin)),)
    cuts = {f"{layer.attn_out}.weight": TensorCut(1, (q,))}
    for name, ranges in zip(layer.qkv, by_name, strict=True):
        cuts |= {f"{name}.{kind}": TensorCut(0, ranges) for kind in ("weight", "bias")}
    return cuts


def _mlp_cuts(layer: LayerNames, inner: range) -> dict[str, TensorCut]:
    cuts: dict[str, TensorCut] = {}
    for mlp in layer.mlps:
        cuts |= {f"{name}.weight": TensorCut(0, (inner,)) for name in (mlp.gate, mlp.up)}
        cuts[f"{mlp.down}.weight"] = TensorCut(1, (inner,))
    return cuts


def held_names(config: ModelConfig, shard: ModelShard) -> ModelNames:
    """The modules of which the rank holds a part: of experts that are spread only its own, and
    shared ones."""
    names = module_names(config)
    if shard.experts is None or config.experts is None:
        return names
    own, shared = shard.experts, config.experts.routing.num_experts
    layers = [
        layer
        if len(layer.mlps) == 1
        else replace(layer, mlps=layer.mlps[own.start : own.stop] + layer.mlps[shared:])
        for layer in names.layers
    ]
    return replace(names, layers=tuple(layers))


def held_shapes(
    config: ModelConfig,
    shard: ModelShard,
    shapes: Mapping[str, Shape],
    cuts: Mapping[str, TensorCut],
) -> dict[str, Shape]:
    """Shapes of what the rank holds of tensors of `shapes`."""
    own = {mlp.gate for layer in held_names(config, shard).layers for mlp in layer.mlps}
    others = {
        f"{name}.weight"
        for layer in module_names(config).layers
        for mlp in layer.mlps
        if mlp.gate not in own
        for name in (mlp.gate, mlp.up, mlp.down)
    }
    return {
        name: cuts[name].shape(shape) if name in cuts else shape
        for name, shape in shapes.items()
        if name not in others
    }


def _rows(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)


def own_routes(routes: Routes, num_routed: int, shard: ModelShard) -> Routes:
    """Routes [T, K] by the numbers of the experts that the rank holds; NO_EXPERT for others.

    Every rank has the shared experts, and each row's are computed by one of the ranks, in turn.
    """
    own = shard.experts
    assert own is not None, "experts are cut, not spread"
    experts = routes.experts
    is_own = (experts >= own.start) & (experts < own.stop)
    turns = torch.arange(len(experts), device=experts.device)[:, None] % shard.size
    is_shared = (experts >= num_routed) & (turns == shard.rank)
    local = torch.where(is_shared, experts - num_routed + len(own), experts - own.start)
    is_held = is_own | is_shared
    return Routes(
        torch.where(is_held, local, NO_EXPERT).int(),
        torch.where(is_held, routes.weights, 0.0),
        is_spread=True,
    )


def vocabulary_sizes(config: ModelConfig, size: int) -> list[int]:
    """Rows of the head that each rank of a group of `size` holds."""
    return [len(_part(config.vocab_size, rank, size)) for rank in range(size)]


def whole_rows(own: Tensor, config: ModelConfig, shard: ModelShard, group: Group) -> Tensor:
    """Logits [S, V] of this rank's share of rows; own: [R, its vocabulary], of all rows.

    Rank n gets rows n * S to n * S + S, with S = R / N rounded up; a row beyond the last one is the
    last one again. Each logit moves once, so that N ranks move 1 / N of what a gather moves.
    """
    widths = vocabulary_sizes(config, shard.size)
    rows = _shares(len(own), shard.size, own.device).flatten()
    padded = torch.nn.functional.pad(own, (0, max(widths) - own.shape[1]))
    dealt = group.deal(padded[rows].view(shard.size, -1, max(widths)))
    return torch.cat([part[:, :width] for part, width in zip(dealt, widths, strict=True)], dim=1)


def own_rows(count: int, shard: ModelShard, device: torch.device) -> Tensor:
    """Numbers [S] of this rank's share of `count` rows, see `whole_rows`."""
    return _shares(count, shard.size, device)[shard.rank]


def _shares(count: int, size: int, device: torch.device) -> Tensor:
    share = -(-count // size)
    return torch.arange(size * share, device=device).clamp_(max=count - 1).view(size, share)


def embed(token_ids: Tensor, rows: Tensor, shard: ModelShard, group: Group) -> Tensor:
    """Embeddings [T, H] of token_ids [T], of which this rank holds `rows` [its vocabulary, H]."""
    if shard.is_whole:
        return torch.nn.functional.embedding(token_ids, rows)
    own = token_ids - shard.vocabulary.start
    is_ours = (own >= 0) & (own < len(rows))
    found = torch.nn.functional.embedding(own.clamp(0, len(rows) - 1), rows)
    return group.sum(found.masked_fill(~is_ours[:, None], 0))
