# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The producer warpgroup of `attention_gluon`: keys and values from memory to shared memory."""

import triton.experimental.gluon.language.nvidia.ampere.async_copy as copies
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# The function has another name in Triton 3.6.
async_load = (
    copies.async_load if hasattr(copies, "async_load") else copies.async_copy_global_to_shared
)


@gluon.jit
def produce(
    PAGE_SIZE: gl.constexpr,
    CHUNK: gl.constexpr,
    memory,
    barriers,
    rows,
    span,
    sources,
    strides,
):
    """Copy the tiles of keys and values, last first, each as soon as its stage is free."""
    _queries, keys, values = memory
    keys_full, keys_empty, values_full, values_empty = barriers
    _first, first_row, _num_rows, head, context, _origin = rows
    begin, end, num_tiles, _masked_tiles = span
    k, v, k_cache, v_cache, pages = sources
    (
        k_token, k_head, v_token, v_head,
        kc_page, kc_token, kc_head, vc_page, vc_token, vc_head,
    ) = strides  # fmt: skip
    STAGES: gl.constexpr = keys.shape[0]
    TILE_KEYS: gl.constexpr = keys.shape[1]
    HEAD_DIM: gl.constexpr = keys.shape[2]
    LANES: gl.constexpr = HEAD_DIM // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    key = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    k_cache += head * kc_head
    v_cache += head * vc_head
    k += (first_row - context).to(gl.int64) * k_token + head * k_head
    v += (first_row - context).to(gl.int64) * v_token + head * v_head
    cached_end = gl.minimum(context, end)
    for index in range(num_tiles):
        stage = index % STAGES
        phase = index // STAGES & 1
        start = begin + (num_tiles - 1 - index) * TILE_KEYS
        mbarrier.wait(keys_empty.index(stage), phase ^ 1)
        for chunk in gl.static_range(0, TILE_KEYS, CHUNK):
            _copy(
                keys.index(stage).slice(chunk, CHUNK), k_cache, k, pages, start + chunk, cached_end,
                end, key, dim, kc_page, kc_token, k_token, PAGE_SIZE,
            )  # fmt: skip
        copies.mbarrier_arrive(keys_full.index(stage), increment_count=False)
        mbarrier.wait(values_empty.index(stage), phase ^ 1)
        for chunk in gl.static_range(0, TILE_KEYS, CHUNK):
            _copy(
                values.index(stage).slice(chunk, CHUNK), v_cache, v, pages, start + chunk,
                cached_end, end, key, dim, vc_page, vc_token, v_token, PAGE_SIZE,
            )  # fmt: skip
        copies.mbarrier_arrive(values_full.index(stage), increment_count=False)


@gluon.jit
def _copy(
    target,
    cache,
    in_flight,
    pages,
    start,
    cached_end,
    end,
    key,
    dim,
    page_stride,
    cache_stride,
    row_stride,
    PAGE_SIZE: gl.constexpr,
):
    """Positions start .. start + CHUNK - 1, all in one page as far as they are cached."""
    position = start + key
    page = gl.load(pages + start // PAGE_SIZE, mask=start < cached_end, other=0).to(gl.int64)
    cached = cache + page * page_stride + (start % PAGE_SIZE + key) * cache_stride
    row = gl.where(position < cached_end, cached, in_flight + position * row_stride)
    pointers = gl.multiple_of(row, 16)[:, None] + dim[None, :]
    async_load(target, pointers, mask=(position < end)[:, None])
