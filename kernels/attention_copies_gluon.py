# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The producer warpgroup of `attention_gluon`: keys and values from memory to shared memory.

Tiles that only have cached tokens go page by page through the bulk copy engine, if the pages allow
it. The tile in which cached tokens end, and in-flight rows, go in pieces of 16 bytes for each
thread. The two ends of `early_start` are here too, because Gluon has no functions for them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# These have other names in Triton 3.6.
IS_RENAMED = gl.constexpr(hasattr(tma, "async_load"))
copy_pieces = async_copy.async_load if IS_RENAMED else async_copy.async_copy_global_to_shared
copy_box = tma.async_load if IS_RENAMED else tma.async_copy_global_to_shared


@gluon.jit
def produce(
    PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr,
    memory, barriers, rows, span, sources, boxes, strides,
):  # fmt: skip
    """Copy the tiles of keys and values, last first, each as soon as its stage is free."""
    _queries, keys, values = memory
    keys_full, keys_empty, values_full, values_empty = barriers
    _first, first_row, _num_rows, head, context, _origin = rows
    begin, end, num_tiles, _masked_tiles, piece_tiles = span
    k, v, k_cache, v_cache, pages = sources
    (
        k_token, k_head, v_token, v_head,
        kc_page, kc_token, kc_head, vc_page, vc_token, vc_head,
    ) = strides  # fmt: skip
    STAGES: gl.constexpr = keys.shape[0]
    TILE_KEYS: gl.constexpr = keys.shape[1]
    HEAD_DIM: gl.constexpr = keys.shape[2]
    k += (first_row - context).to(gl.int64) * k_token + head * k_head
    v += (first_row - context).to(gl.int64) * v_token + head * v_head
    cached_end = gl.minimum(context, end)
    for index in range(num_tiles):
        stage = index % STAGES
        phase = index // STAGES & 1 ^ 1
        start = begin + (num_tiles - 1 - index) * TILE_KEYS
        chunk_pages = ()
        for chunk in gl.static_range(0, TILE_KEYS, CHUNK):
            place = (start + chunk) // PAGE_SIZE
            page = gl.load(pages + place, mask=start + chunk < cached_end, other=0)
            chunk_pages += (page,)  # type: ignore[assignment]
        if len(boxes) == 2 and index >= piece_tiles:
            mbarrier.wait(keys_empty.index(stage), phase)
            _copy_boxes(
                keys.index(stage), keys_full.index(stage), boxes[0], chunk_pages, start,
                head * (kc_head // HEAD_DIM), kc_page // HEAD_DIM, PAGE_SIZE, CHUNK,
            )  # fmt: skip
            mbarrier.wait(values_empty.index(stage), phase)
            _copy_boxes(
                values.index(stage), values_full.index(stage), boxes[1], chunk_pages, start,
                head * (vc_head // HEAD_DIM), vc_page // HEAD_DIM, PAGE_SIZE, CHUNK,
            )  # fmt: skip
        else:
            mbarrier.wait(keys_empty.index(stage), phase)
            _copy_pieces(
                keys.index(stage), keys_full.index(stage), k_cache + head * kc_head, k,
                chunk_pages, start, cached_end, end, kc_page, kc_token, k_token, PAGE_SIZE, CHUNK,
            )  # fmt: skip
            mbarrier.wait(values_empty.index(stage), phase)
            _copy_pieces(
                values.index(stage), values_full.index(stage), v_cache + head * vc_head, v,
                chunk_pages, start, cached_end, end, vc_page, vc_token, v_token, PAGE_SIZE, CHUNK,
            )  # fmt: skip


@gluon.jit
def _copy_boxes(
    tile, full, boxes, chunk_pages, start, head_row, page_rows,
    PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """A tile in boxes of CHUNK tokens by 64 dims, the order of swizzled tiles in memory."""
    TILE_KEYS: gl.constexpr = tile.shape[0]
    HEAD_DIM: gl.constexpr = tile.shape[1]
    CHUNKS: gl.constexpr = TILE_KEYS // CHUNK
    shape: gl.constexpr = [CHUNKS * (HEAD_DIM // 64), CHUNK, 64]
    if IS_RENAMED:
        parts = tile.reinterpret(tile.dtype, shape, boxes.layout)
    else:
        parts = tile._reinterpret(tile.dtype, shape, boxes.layout)
    mbarrier.expect(full, TILE_KEYS * HEAD_DIM * 2)
    for chunk in gl.static_range(CHUNKS):
        row = chunk_pages[chunk] * page_rows + head_row + (start + chunk * CHUNK) % PAGE_SIZE
        for dims in gl.static_range(HEAD_DIM // 64):
            copy_box(boxes, [row, dims * 64], full, parts.index(dims * CHUNKS + chunk))


@gluon.jit
def _copy_pieces(
    tile, full, cache, in_flight, chunk_pages, start, cached_end, end, page_stride, token_stride,
    row_stride,
    PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """A tile of cached tokens, then in-flight rows, then zeros."""
    HEAD_DIM: gl.constexpr = tile.shape[1]
    LANES: gl.constexpr = HEAD_DIM // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    key = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    for chunk in gl.static_range(tile.shape[0] // CHUNK):
        first = start + chunk * CHUNK
        position = first + key
        page = cache + chunk_pages[chunk].to(gl.int64) * page_stride
        cached = page + (first % PAGE_SIZE + key) * token_stride
        row = gl.where(position < cached_end, cached, in_flight + position * row_stride)
        pointers = gl.multiple_of(row, 16)[:, None] + dim[None, :]
        present = (position < end)[:, None]
        copy_pieces(tile.slice(chunk * CHUNK, CHUNK), pointers, mask=present)
    # Each thread adds an arrival that its copies make; the last one lets the phase end.
    async_copy.mbarrier_arrive(full)
    mbarrier.arrive(full, count=1)


@gluon.jit
def await_kernel_before():
    """Continue once the previous kernel has ended and its writes can be read."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def allow_kernel_after():
    """Let the next kernel begin, once every program has called this or has ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
