"""Compiles the kernels for sm_90 as the models would launch them; one JSON line for each group.

A program of its own (`python -m operators.compiled`): it must not be the process that runs
the interpreter, and it needs no GPU. Shapes are Dream-7B's, LLaDA-8B's and the bundled model's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, product

import torch
from torch import Tensor

from effuse.kernels import (
    attention_gluon,
    attention_hopper,
    attention_ranks_triton,
    attention_splits_triton,
    attention_triton,
    experts_routes_triton,
    experts_triton,
    pages_copy_triton,
    pages_digests_triton,
    pages_triton,
    peers_triton,
    products_gluon,
    products_hopper,
    rotary_triton,
    rowwise_triton,
    sampling_edits_triton,
    sampling_filters_triton,
    sampling_finish_triton,
    sampling_triton,
)
from effuse.kernels.attention import empty_partials
from effuse.kernels.attention_batch import make_attention_batch
from effuse.kernels.experts_routing import Routing
from effuse.kernels.values import LogitEdits, RowSampling, WeightedParts
from operators import digests
from operators.compiled_steps import compiled
from operators.device_code import Kernel, codes_of, kernels_of
from operators.pool import layer_of

BF16, FP32, INT32, INT64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
Variants = Iterator[tuple[str, list[Kernel]]]


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention launch."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype = BF16
    sequences: int = 16
    rows: int = 64  # of each


SHAPES = {
    "dream_page_64": Shape(28, 4, 128, 64),
    "dream_page_32_split": Shape(28, 4, 128, 32, sequences=1),
    "dream_page_16": Shape(28, 4, 128, 16),
    "llada_page_32": Shape(32, 32, 128, 32),
    "head_dim_64": Shape(16, 2, 64, 32),
    "bundled_bf16": Shape(6, 2, 32, 16),
    "bundled_fp32": Shape(6, 2, 32, 16, dtype=FP32),
}
# If heads share no keys, longer sequences have launch parameters of their own.
HOPPER_SHAPES = {
    **{name: shape for name, shape in SHAPES.items() if shape.head_dim in (64, 128)},
    "llada_long": Shape(32, 32, 128, 32, sequences=1, rows=96),
}

LLADA2_ROUTING = Routing(
    num_experts=256,
    top_k=8,
    scores="sigmoid",
    renormalises=True,
    scale=2.5,
    num_groups=8,
    top_groups=4,
    num_shared=1,
)
SDAR_ROUTING = Routing(num_experts=128, top_k=8, scores="softmax", renormalises=True)


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def cache(shape: Shape) -> tuple[Tensor, Tensor]:
    sizes = 64, shape.page_size, shape.kv_heads, shape.head_dim
    return layer_of(sizes, shape.dtype, "meta")


def distinct_cache(shape: Shape) -> tuple[Tensor, Tensor]:
    sizes = 64, shape.page_size, shape.kv_heads, shape.head_dim
    return layer_of(sizes, shape.dtype, "meta", kind="distinct")


def launch_attention(
    shape: Shape,
    *,
    distinct: bool = False,
    hopper: bool = False,
    invariant: bool = False,
    partial_results: bool = False,
    shares: bool = False,
) -> None:
    rows, context = shape.rows, 2048
    heads = shape.q_heads + 2 * shape.kv_heads
    fused = meta(shape.sequences * rows, heads, shape.head_dim, dtype=shape.dtype)
    q, k, v = torch.split(fused, [shape.q_heads, shape.kv_heads, shape.kv_heads], dim=1)
    batch = make_attention_batch(
        [rows] * shape.sequences,
        [context] * shape.sequences,
        [[0] * (context // shape.page_size)] * shape.sequences,
        [0] * shape.sequences,
        block_size=4 if shares else 32,
        page_size=shape.page_size,
        device=torch.device("cpu"),
    )
    pages = distinct_cache(shape) if distinct else cache(shape)
    launch = attention_hopper.launch if hopper else attention_triton.launch
    if shares:
        parts = attention_splits_triton.partial_results(q, 4)
        shared = replace(batch, max_seqlen=len(q))
        together = replace(batch, shared=shared)
        for one, splits in ((shared, 4), (batch, 4), (together, 1)):
            launch(
                q, k, v, *pages, one,
                scale=0.1, out=q, splits=splits, cached_only=one is shared, parts=parts,
            )  # fmt: skip
        attention_splits_triton.merge_splits(*parts, together, q)
        return
    made = empty_partials(len(q), shape.q_heads, shape.head_dim, q) if partial_results else None
    out, lse = (torch.empty_like(q), None) if made is None else (made.out, made.lse)
    launch(
        q, k, v, *pages, batch,
        scale=0.1, out=out, batch_invariant=invariant, lse=lse, cached_only=partial_results,
    )  # fmt: skip


def launch_merge_of_ranks() -> None:
    dealt, own = (empty_partials(64, heads, 128, meta(1)) for heads in (32, 8))
    attention_ranks_triton.launch_merge(dealt.out, dealt.lse, own.out, own.lse)


def launch_sampling(
    rows: int, vocab_size: int, dtype: torch.dtype, *, top_k_first: bool = False
) -> None:
    logits = meta(rows, vocab_size, dtype=dtype)
    sampling_triton.launch(logits, settings_of(rows), 5, top_k_first=top_k_first)


def settings_of(rows: int) -> RowSampling:
    fp32, int32 = meta(rows, dtype=FP32), meta(rows, dtype=INT32)
    seed, score = meta(rows, dtype=INT64), meta(rows, dtype=torch.int8)
    return RowSampling(fp32, fp32, int32, seed, int32, int32, int32, score)


def launch_share(rows: int, vocab_size: int) -> None:
    settings = settings_of(rows)
    record = sampling_triton.launch_record(meta(rows, vocab_size), settings, 5, vocab_size)
    records = record.expand(4, -1, -1).contiguous()
    sampling_finish_triton.launch_shares(records, settings, 5)


def launch_edits(rows: int, vocab_size: int) -> None:
    fp32, int32 = meta(512, dtype=FP32), meta(512, dtype=INT32)
    ends = meta(rows, dtype=INT32)
    edits = LogitEdits(ends, ends, int32, fp32, fp32, meta(rows, dtype=FP32))
    sampling_edits_triton.launch(meta(rows, vocab_size, dtype=FP32), edits, 5)


def launch_rotary(*, stores: bool, rotary_dim: int = 128) -> None:
    shape = SHAPES["dream_page_32_split"]
    q, k, v = torch.split(meta(64, 36, 128), [28, 4, 4], dim=1)
    slots = meta(64, dtype=INT64)
    stored = (v, *cache(shape), slots) if stores else None
    rotary_triton.launch(q, k, meta(4096, rotary_dim, dtype=FP32), slots, stored)


def launch_pages(*, distinct: bool = False) -> None:
    shape = SHAPES["dream_page_64"]
    k_cache, v_cache = distinct_cache(shape) if distinct else cache(shape)
    _, k, v = torch.split(meta(64, 36, 128), [28, 4, 4], dim=1)
    slots = meta(64, dtype=INT64)
    pages_triton.launch_store(k, v, k_cache, v_cache, slots)


def attention_variants() -> Variants:
    for name, shape in SHAPES.items():
        modules = [attention_triton, attention_splits_triton]
        yield name, kernels_of(modules, partial(launch_attention, shape))


def hopper_variants() -> Variants:
    for name, shape in HOPPER_SHAPES.items():
        launch = partial(launch_attention, shape, hopper=True)
        yield name, kernels_of([attention_gluon, attention_splits_triton], launch)
        invariant = partial(launch, invariant=True)
        modules = [attention_gluon, attention_splits_triton]
        yield f"{name}_invariant", kernels_of(modules, invariant)
    partly = partial(launch, partial_results=True)
    yield f"{name}_partial", kernels_of(modules, partly)
    small = partial(launch_attention, Shape(32, 8, 128, 32, sequences=32, rows=4), hopper=True)
    yield "sdar_shares", kernels_of(modules, partial(small, shares=True))
    yield "ranks", kernels_of([attention_ranks_triton], launch_merge_of_ranks)


def distinct_variants() -> Variants:
    for name, shape in SHAPES.items():
        modules = [attention_triton, attention_splits_triton]
        yield name, kernels_of(modules, partial(launch_attention, shape, distinct=True))
    yield "pages", kernels_of([pages_triton], partial(launch_pages, distinct=True))


def launch_sum(size: int, *, shares: bool, num_parts: int = 0, is_alike: bool = False) -> None:
    x, turns = meta(132, 3584), meta(1170, dtype=INT32)
    given: Tensor | WeightedParts = x
    if num_parts:
        shape = 132, num_parts
        places, weights = meta(*shape, dtype=INT32), meta(*shape, dtype=FP32)
        given = WeightedParts(meta(132 * num_parts, 3584), places, weights)
    args = given, x, meta(3584), 1e-6, meta(size, dtype=INT64), turns
    peers_triton.launch(*args, rank=1, size=size, shares=shares, is_alike=is_alike)


def peer_variants() -> Variants:
    cases = ((2, False, 0), (4, False, 0), (4, True, 0), (8, True, 0), (2, False, 9), (4, True, 9))
    for size, shares, num_parts in cases:
        launch = partial(launch_sum, size, shares=shares, num_parts=num_parts)
        name = f"{size}_ranks{'_share' * shares}{'_parts' * bool(num_parts)}"
        yield name, kernels_of([peers_triton], launch)
        yield f"{name}_alike", kernels_of([peers_triton], partial(launch, is_alike=True))


def row_variants() -> Variants:
    x, weight, parts = meta(64, 3584), meta(3584), meta(2, 64, 3584, dtype=FP32)
    places = meta(64 * 9, dtype=torch.int32)
    given = WeightedParts(meta(64 * 9, 3584), places, meta(64, 9, dtype=FP32))
    launches: dict[str, Callable[[], object]] = {
        "norm": lambda: rowwise_triton.launch_norm(x, weight, 1e-6),
        "norm_residual": lambda: rowwise_triton.launch_norm_residual(x, x, weight, 1e-6),
        "norm_of_parts": lambda: rowwise_triton.launch_norm_residual(parts, x, weight, 1e-6),
        "norm_of_experts": lambda: rowwise_triton.launch_norm_residual(given, x, weight, 1e-6),
        "lookup": lambda: rowwise_triton.launch_lookup(
            meta(64, dtype=torch.int64), meta(512, 3584), 512
        ),
        "total_of_experts": lambda: rowwise_triton.launch_total(given),
        "norm_of_heads": lambda: rowwise_triton.launch_norm(
            meta(64, 36, 128)[:, :28], meta(128), 1e-6
        ),
        "swiglu": lambda: rowwise_triton.launch_swiglu(meta(64, 2 * 18944)),
        "rotary": lambda: launch_rotary(stores=False),
        "rotary_store": lambda: launch_rotary(stores=True),
        "rotary_half_store": lambda: launch_rotary(stores=True, rotary_dim=64),
        "pages": launch_pages,
    }
    modules = [rowwise_triton, rotary_triton, pages_triton]
    for name, launch in launches.items():
        yield name, kernels_of(modules, launch)


# (rows, H, I): steps of 1, 32, 48 and 64 blocks of 32 rows of LLaDA2.0-mini, and one in fp32.
EXPERT_SHAPES = {
    "llada2_1": (32, 2048, 512, LLADA2_ROUTING, BF16),
    "llada2_32": (1024, 2048, 512, LLADA2_ROUTING, BF16),
    "llada2_48": (1536, 2048, 512, LLADA2_ROUTING, BF16),
    "llada2_64": (2048, 2048, 512, LLADA2_ROUTING, BF16),
    "experts_fp32": (32, 256, 96, SDAR_ROUTING, FP32),
}


def launch_experts(
    rows: int, hidden: int, inner: int, routing: Routing, dtype: torch.dtype, *,
    invariant: bool = False,
) -> None:  # fmt: skip
    bias = meta(routing.num_experts, dtype=FP32)
    logits = meta(rows, routing.num_experts, dtype=FP32)
    routes = experts_routes_triton.launch_route(logits, bias, routing)
    num_routed = routing.num_experts
    experts_routes_triton.launch_own(*routes, range(num_routed // 2), num_routed, 1, 2)
    gate_up = meta(routing.num_weights, 2 * inner, hidden, dtype=dtype)
    down = meta(routing.num_weights, hidden, inner, dtype=dtype)
    launch = partial(experts_triton.launch_mlp, meta(rows, hidden, dtype=dtype), gate_up, down)
    launch(*routes, batch_invariant=invariant)


def expert_variants() -> Variants:
    for name, shape in EXPERT_SHAPES.items():
        modules = [experts_routes_triton, experts_triton]
        yield name, kernels_of(modules, partial(launch_experts, *shape))


def invariant_expert_variants() -> Variants:
    """Weights come first: one instruction for tiles of any number of rows."""
    for name in ("llada2_1", "llada2_32", "llada2_64"):
        launch = partial(launch_experts, *EXPERT_SHAPES[name], invariant=True)
        yield name, kernels_of([experts_routes_triton, experts_triton], launch)


def sampling_variants() -> Variants:
    modules = [sampling_filters_triton, sampling_triton]
    yield "dream_bf16", kernels_of(modules, lambda: launch_sampling(2048, 152_064, BF16))
    yield "bundled_fp32", kernels_of(modules, lambda: launch_sampling(64, 301, FP32))
    sdar = partial(launch_sampling, 2048, 151_936, BF16, top_k_first=True)
    yield "sdar_bf16", kernels_of(modules, sdar)
    share = partial(launch_share, 128, 152_064 // 4)
    yield "dream_share", kernels_of([*modules, sampling_finish_triton], share)
    for name, rows, vocab_size in (("dream_edits", 256, 152_064), ("bundled_edits", 64, 301)):
        launch = partial(launch_edits, rows, vocab_size)
        yield name, kernels_of([sampling_edits_triton], launch)


def digest_variants() -> Variants:
    """Scattered pages of Dream-7B and LLaDA-8B, a layer of them, and pieces of an odd length."""
    for name, page_bytes, num_bytes, piece_bytes in (
        ("dream", 28 << 16, 28 << 16, 16384),
        ("llada_layer", 32 << 19, 1 << 19, 16384),
        ("bundled_bf16", 7 << 13, 7 << 13, 8192),
        ("odd_length", 3 * 2112, 3 * 2112, 2112),
    ):
        pages, ids, key = meta(64, page_bytes // 2), meta(64, dtype=INT64), meta(49, dtype=INT64)
        out = meta(64, num_bytes // piece_bytes, dtype=INT64)
        launch = partial(digests.launch, pages, ids, key, piece_bytes, 0, out)
        yield name, kernels_of([pages_digests_triton], launch)


def product_variants() -> Variants:
    """Every tile; results of routers and of shares are fp32."""
    x, weight = meta(264, 3584), meta(4608, 3584)
    tiles = products_hopper.TILES
    largest = (tile for tile in tiles if tile.rows > 128 + 32 and tile.consumers < 3)
    for tile, dtype in (*product(tiles, (BF16,)), *product(largest, (FP32,))):
        plan = products_hopper.Plan(tile)
        launch = partial(products_hopper.launch, x, weight, out_dtype=dtype, plan=plan)
        yield f"{tile.rows}x{tile.consumers} {dtype}", kernels_of([products_gluon], launch)
    for tile in (tile for tile in tiles if tile.rows == 128 + 32):
        plan = products_hopper.Plan(tile)
        launch = partial(products_hopper.launch, x, weight, shares=2, plan=plan)
        yield f"{tile.rows}x{tile.consumers} shares", kernels_of([products_gluon], launch)


def launch_copies() -> None:
    pages, order = meta(64, 28 << 13, dtype=INT64), meta(129, dtype=INT64)
    sizes, ids = ((28 << 10, 512, 4096), (14 << 10, 0, 2048)), order[1:65]
    count = {"num_runs": 7, "run_stripes": 1024}
    pages_copy_triton.launch(pages, ids, sizes[0], order, order[65:], sizes[1], **count)


def copy_variants() -> Variants:
    """Half of the heads of Dream-7B."""
    yield "dream", kernels_of([pages_copy_triton], launch_copies)


def step_variants() -> Variants:
    """Block size x window, as in an engine's slots."""
    yield "32x8", compiled(32, 8)
    yield "4x8", compiled(4, 8)


GROUPS = {
    "attention": attention_variants,
    "products": product_variants,
    "invariant_experts": invariant_expert_variants,
    "hopper": hopper_variants,
    "distinct": distinct_variants,
    "experts": expert_variants,
    "rows": row_variants,
    "peers": peer_variants,
    "sampling": sampling_variants,
    "digests": digest_variants,
    "copies": copy_variants,
    "steps": step_variants,
}


def main() -> None:
    for group, variants in GROUPS.items():
        found = list(variants())
        codes = iter(codes_of([kernel for _, kernels in found for kernel in kernels]))
        lines = [
            {"variant": name, **asdict(code)}
            for name, kernels in found
            for code in islice(codes, len(kernels))
        ]
        print(json.dumps({"name": group, "codes": lines}), flush=True)


if __name__ == "__main__":
    main()
