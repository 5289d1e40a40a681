# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""How the kernel of `attention_triton` reads tiles of cached tokens from pages of either layout.

The unified layout holds a token's dimensions side by side, so a tile is rows of D elements. The
distinct one holds K in pieces of 16 bytes and V dimension by dimension, 16 bytes of tokens at a
time. That needs whole tiles without a mask, so that the compiler sees a page's tokens side by side.

``PIECE`` is 0 for the unified layout, otherwise the elements of a piece of K. ``present`` is None
for whole tiles.
"""

import triton
import triton.language as tl


@triton.jit
def places_of(
    pages, first, key, present, context,
    PAGE_SIZE: tl.constexpr, PIECE: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """(page of each token as int64, its offset within) of tokens first .. first + TILE_KEYS - 1.

    ``first`` is a multiple of the tile.
    """
    if PIECE == 0:
        if PAGE_SIZE % TILE_KEYS == 0:
            page = tl.load(pages + first // PAGE_SIZE)
            offset = first % PAGE_SIZE + key
        else:
            token = first + key
            if present is None:
                page = tl.load(pages + token // PAGE_SIZE)
            else:
                page = tl.load(pages + token // PAGE_SIZE, mask=present, other=0)
            offset = token % PAGE_SIZE
    elif PAGE_SIZE % TILE_KEYS == 0:
        page = tl.load(pages + first // PAGE_SIZE)
        offset = key
        if PAGE_SIZE > TILE_KEYS:
            offset += tl.multiple_of(first % PAGE_SIZE, TILE_KEYS)
    else:
        # After the last page of the sequence that page is read again: a mask would part its tokens.
        last = (context - 1) // PAGE_SIZE
        if TILE_KEYS % PAGE_SIZE == 0:
            place = tl.minimum(first // PAGE_SIZE + key // PAGE_SIZE, last)
            offset = key % PAGE_SIZE
        else:
            place = tl.minimum((first + key) // PAGE_SIZE, last)
            offset = (first + key) % PAGE_SIZE
        page = tl.load(pages + place)
    return page.to(tl.int64), offset


@triton.jit
def load_keys(
    cache, page, offset, head, dim, present, page_stride, token_stride, head_stride,
    PAGE_SIZE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """K [TILE_KEYS, HEAD_DIM] of cached tokens; undefined if they are not present."""
    if PIECE == 0:
        keys = _load_rows(
            cache, page, offset, head, dim, present, page_stride, token_stride, head_stride
        )
    else:
        tokens = page * page_stride + offset * PIECE
        dims = (dim // PIECE) * (PAGE_SIZE * PIECE) + dim % PIECE
        keys = tl.load(cache + head * head_stride + (tokens[:, None] + dims[None, :]))
    return keys


@triton.jit
def load_values(
    cache, page, offset, head, dim, present, page_stride, token_stride, head_stride,
    PAGE_SIZE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """V [TILE_KEYS, HEAD_DIM] of cached tokens; 0 if they are not present."""
    if PIECE == 0:
        values = _load_rows(
            cache, page, offset, head, dim, present, page_stride, token_stride, head_stride
        )
    else:
        tokens = page * page_stride + offset
        dims = dim * PAGE_SIZE
        values = tl.load(cache + head * head_stride + (dims[:, None] + tokens[None, :]))
        if present is not None:
            # Not by a mask either: absent values may be NaN.
            values = tl.where(present[None, :], values, 0.0)
        values = tl.trans(values)
    return values


@triton.jit
def _load_rows(cache, page, offset, head, dim, present, page_stride, token_stride, head_stride):
    """K or V of tokens in unified pages; 0 if they are not present."""
    row = page * page_stride + offset.to(tl.int64) * token_stride
    places = (row + head * head_stride)[:, None] + dim[None, :]
    if present is None:
        rows = tl.load(cache + places)
    else:
        rows = tl.load(cache + places, mask=present[:, None], other=0.0)
    return rows


@triton.jit
def rows_at(rows, place, dim, present, stride):
    """In-flight K or V [TILE_KEYS, HEAD_DIM] of these rows; 0 if they are not present."""
    at = place.to(tl.int64)[:, None] * stride + dim[None, :]
    return tl.load(rows + at, mask=present[:, None], other=0.0)


@triton.jit
def rows_of_both(
    cache, page, offset, rows, place, dim, present, flies, page_stride, token_stride, stride,
    IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """K or V [TILE_KEYS, HEAD_DIM] of cached tokens in unified pages and of in-flight rows."""
    cached = cache + page * page_stride + offset.to(tl.int64) * token_stride
    row = tl.where(present, cached, rows + place.to(tl.int64) * stride)
    if IS_ALIGNED:
        places = tl.multiple_of(row, 16)[:, None] + dim[None, :]
    else:
        places = row[:, None] + dim[None, :]
    return tl.load(places, mask=(present | flies)[:, None], other=0.0)
