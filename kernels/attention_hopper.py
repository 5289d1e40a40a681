"""Block-parallel attention on Hopper in 16-bit types: when it can be used, and its launch.

`attention_triton` checks `is_supported` first and covers everything else; the device code is
`attention_gluon`. Launch parameters depend only on shapes.

Work: 4 * D FLOP for each (row, visible key) pair; bytes: q and out once, K and V of a sequence
once for each tile of 64 or 128 packed rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from effuse.kernels.attention_batch import AttentionBatch
from effuse.kernels.attention_splits_triton import (
    PART_KEYS,
    SPLIT_STEP,
    merge_parts,
    merge_splits,
    most_splits,
    num_parts,
    partial_results,
)

LOG2_E = 1.4426950408889634
PROCESSORS = 132


@dataclass(frozen=True, slots=True)
class Shape:
    """Launch parameters of one shape class."""

    consumers: int  # warpgroups of 64 rows each
    keys: int
    stages: int
    consumer_registers: int
    producer_registers: int
    registers: int | None  # of a thread at entry; None if one program has a processor to itself
    programs_per_processor: int


# 128 rows halve the traffic from L2 for each product. If heads share no keys, or if sequences have
# at most 64 rows, memory is the limit, and two programs of 64 rows keep more loads under way.
GROUPED = Shape(2, 128, 3, 216, 72, None, 1)
ALONE_TALL = Shape(2, 64, 4, 216, 72, None, 1)
SHORT = Shape(1, 64, 3, 184, 72, 128, 2)
# (query, head in group) of a sequence's largest possible window of small blocks.
MOST_SMALL_ROWS = 512
LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def shape_of(
    groups: int, max_seqlen: int, usual_rows: int, *, batch_invariant: bool = False
) -> Shape:
    """The shape class for ``groups`` query heads a KV head, at most ``max_seqlen`` rows of a
    sequence, and usually at most ``usual_rows``.

    With `batch_invariant` two sets of sums need registers, so its tiles have fewer keys.

    Rounding depends on the number of keys in a tile. A row gets the same result whatever shares a
    launch of this kind, unless its cache is split differently.
    """
    if batch_invariant:
        return ALONE_TALL
    if groups == 1:
        return SHORT if max_seqlen <= 64 else ALONE_TALL
    is_small = usual_rows * groups <= 64 and max_seqlen * groups <= MOST_SMALL_ROWS
    return SHORT if is_small else GROUPED


def is_supported(q: Tensor, others: tuple[Tensor, ...], page_size: int) -> bool:
    """Whether the kernel covers this device, these types and strides; ``others`` are k, v, caches.

    Rows are copied in pieces of 16 bytes, so strides must be multiples of 16 elements, and 16 keys
    at a time must lie in one page.
    """
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[2] in (64, 128)
        and page_size % 16 == 0
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and all(is_aligned(tensor) for tensor in (q, *others))
    )


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    out: Tensor,
    splits: int | None = None,
    batch_invariant: bool = False,
    lse: Tensor | None = None,
    cached_only: bool = False,
    parts: tuple[Tensor, Tensor] | None = None,
) -> None:
    """`attention_triton.launch` for arguments that `is_supported` accepts."""
    from effuse.kernels.attention_gluon import hopper_attention_kernel

    tokens, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    groups = q_heads // kv_heads
    num_seqs = len(batch.context_lens)
    shared = batch.shared
    is_part = parts is not None and shared is None
    # The block that is denoised, and the one before it, which is stored.
    usual_rows = batch.max_seqlen if cached_only else 2 * batch.block_size
    shape = shape_of(groups, batch.max_seqlen, usual_rows, batch_invariant=batch_invariant)
    tile_rows = 64 * shape.consumers
    # The most tiles that this many rows and sequences can have; the others end immediately.
    num_tiles = (tokens * groups + num_seqs * (tile_rows - 1)) // tile_rows
    # Graphs are captured for the largest possible number of sequences, with a block each; splits
    # suit the usual case of a window of four or, if blocks are small, of two blocks.
    usual_blocks = 2 if shape == SHORT and groups > 1 else 4
    usual_tiles = max(-(-tokens * groups // tile_rows), num_seqs // usual_blocks)
    wave = PROCESSORS * shape.programs_per_processor
    if splits is None and batch_invariant:
        max_keys = batch.max_context + batch.max_seqlen
        splits = num_parts(usual_tiles * kv_heads, wave, max_keys, 4 * q.numel())
    num_splits = splits or most_splits(usual_tiles * kv_heads, wave, batch.max_context)
    chunk = 32 if batch.page_size % 32 == 0 else 16
    boxes = _boxes(k_cache, v_cache, chunk) if batch.max_context else None
    partial_out, partial_lse = parts or partial_results(q, num_splits, 1 + batch_invariant)
    # Tiles come last, so that missing ones do not take a processor from others.
    hopper_attention_kernel[(kv_heads, num_splits, num_tiles)](
        q, k, v, k_cache, v_cache, *(boxes or (None, None)), out, lse, partial_out, partial_lse,
        batch.cu_seqlens, batch.context_lens, batch.page_table, batch.block_origins, num_seqs,
        *_of_shared(shared, partial_out), tokens, batch.page_table.stride(0), *q.stride()[:2],
        *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        *out.stride()[:2],
        *((0, 0) if lse is None else lse.stride()), scale * LOG2_E,
        GROUPS=groups, HEAD_DIM=head_dim, PAGE_SIZE=batch.page_size, BLOCK_SIZE=batch.block_size,
        CONSUMERS=shape.consumers, TILE_KEYS=shape.keys, CHUNK=chunk, STAGES=shape.stages,
        MAX_SEQS=max(64, 1 << (num_seqs - 1).bit_length()),
        SPLIT_STEP=SPLIT_STEP if num_splits > 1 or is_part else 0,
        PART_KEYS=PART_KEYS if batch_invariant else 0, CACHED_ONLY=cached_only, IS_PART=is_part,
        SHARED_STEP=SPLIT_STEP if shared else 0, CONSUMER_REGISTERS=shape.consumer_registers,
        PRODUCER_REGISTERS=shape.producer_registers,
        num_warps=4, maxnreg=shape.registers, enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip
    if parts is not None:
        return
    if num_splits > 1 and batch_invariant:
        merge_parts(partial_out, partial_lse, batch, out)
    elif num_splits > 1:
        merge_splits(partial_out, partial_lse, batch, out, lse)


def _of_shared(
    shared: AttentionBatch | None, partial_out: Tensor
) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The kernel's arguments about beginnings, and about their splits in ``partial_out``."""
    if shared is None:
        return None, None, 0, 0
    return shared.cu_seqlens, shared.context_lens, len(shared.context_lens), len(partial_out)


def is_aligned(tensor: Tensor) -> bool:
    """Whether each row begins at a multiple of 16 elements."""
    *outer, unit = tensor.stride()
    return unit == 1 and not any(stride % 16 for stride in outer) and tensor.data_ptr() % 16 == 0


def _boxes(
    k_cache: Tensor, v_cache: Tensor, chunk: int
) -> tuple[TensorDescriptor, TensorDescriptor] | None:
    """For the bulk copy engine: caches as rows of head_dim elements, if the strides allow it."""
    pages, page_size, heads, dim = k_cache.shape
    rows: list[int] = []
    for cache in (k_cache, v_cache):
        page_stride, token_stride, head_stride, _ = cache.stride()
        if token_stride != dim or page_stride % dim or head_stride % dim:
            return None
        rows.append(((pages - 1) * page_stride + (heads - 1) * head_stride) // dim + page_size)
    if max(rows) >= 2**31:
        return None
    k_boxes, v_boxes = (
        TensorDescriptor(cache, [count, dim], [dim, 1], [chunk, 64], LAYOUT)
        for cache, count in zip((k_cache, v_cache), rows, strict=True)
    )
    return k_boxes, v_boxes
