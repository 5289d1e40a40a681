# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernel of digests of pieces; for `kvtransfer.digest`.

xxh3_64 of 256 bytes and more, from xxHash's specification: eight accumulators of 64 bits take in
stripes of 64 bytes, and are scrambled after each round of 16 stripes. A stripe's addend depends
only on its bytes and its place in the round, so a warp divides a round among its threads: each
thread sums what two of its stripes add to one pair of accumulators, and only sums and scrambles are
ordered.

Bytes: every piece read once, in loads of 16 bytes. The next rounds are loaded meanwhile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.pages_digests import (
    LAST_WORD,
    LEAST_PIECE_BYTES,
    MERGE_WORD,
    START_WORD,
    STRIPE_BYTES,
)

# Rounds that are loaded together.
AHEAD = 4

_LAST, _MERGE, _START = tl.constexpr(LAST_WORD), tl.constexpr(MERGE_WORD), tl.constexpr(START_WORD)
_SCRAMBLE = tl.constexpr(16)
_STRIPES = tl.constexpr(16)  # of a round
_ROUND = tl.constexpr(128)  # words of a round
_SHARERS = tl.constexpr(8)  # of a round's stripes, four threads each
_PRIME_32 = tl.constexpr(0x9E3779B1)
_PRIME_64 = tl.constexpr(0x9E3779B185EBCA87)
_PRIME_END = tl.constexpr(0x165667919E3779F9)


class PoolDigests:
    """Digests of the pieces of one GPU's pool on one stream, for callers that must save the host's
    time.

    The pool is checked and the kernel looked up only once, because Triton's look-up by arguments
    takes the host longer than the launch. Arguments of calls are not checked. Not thread-safe.
    """

    def __init__(self, pages: Tensor, piece_bytes: int, stream: torch.cuda.Stream) -> None:
        """``pages`` [num_pages, elements] of any dtype has contiguous rows, each a page.

        Raises ValueError for pages that are not on a GPU, for pieces below 256 bytes, and if pieces
        or pages do not begin at multiples of 64 bytes.
        """
        stride = pages.stride(0) * pages.element_size()
        if pages.device.type != "cuda" or pages.dim() != 2 or pages.stride(1) != 1:
            raise ValueError(f"expected rows on a GPU, got {pages.shape} on {pages.device}")
        if piece_bytes < LEAST_PIECE_BYTES or piece_bytes % STRIPE_BYTES or stride % STRIPE_BYTES:
            raise ValueError(
                f"on {pages.device}: expected pieces of at least {LEAST_PIECE_BYTES} bytes at "
                f"multiples of {STRIPE_BYTES}, got pieces of {piece_bytes} in pages {stride} bytes "
                "apart"
            )
        self._words = pages.view(torch.int64)
        self._page_stripes = stride // STRIPE_BYTES
        self._piece_stripes = piece_bytes // STRIPE_BYTES
        self._stream = stream
        self._address, self._queue = self._words.data_ptr(), stream.cuda_stream
        self._kernel: Any = None

    def take(
        self,
        page_ids: Tensor,
        key: Tensor,
        out: Tensor,
        *,
        num_ids: int,
        first_piece: int,
        num_pieces: int,
        run_pieces: int,
        run_step: int,
    ) -> None:
        """Queues the digests of ``num_pieces`` pieces of each of the first ``num_ids`` pages of
        ``page_ids`` [at least num_ids] int32, under a key from `digest_key`.

        The pieces lie in runs of ``run_pieces``. The first run begins at ``first_piece`` of a page,
        each other run ``run_step`` pieces after the one before. The digests go to the beginning of
        ``out`` [at least num_ids * num_pieces] int64, page by page, with the bits of the unsigned
        numbers of ``xxhash.xxh3_64_intdigest(piece, seed)``. Ids and ``out`` are on the GPU or in
        pinned memory of the host, which saves copies; an id outside the pool is not detected.
        """
        grid = num_ids * num_pieces, 1, 1
        first = first_piece * self._piece_stripes
        sizes = self._page_stripes, first, num_pieces, run_pieces, run_step
        if self._kernel is not None:
            # Addresses instead of tensors, because Triton would query the driver for each tensor.
            places = self._address, page_ids.data_ptr(), key.data_ptr(), out.data_ptr()
            constants = self._piece_stripes, AHEAD
            self._kernel[grid](*places, *sizes, *constants, stream=self._queue)
            return
        with torch.cuda.stream(self._stream):
            self._kernel = launch(self._words, page_ids, key, out, grid, sizes, self._piece_stripes)


def launch(
    words: Tensor,
    page_ids: Tensor,
    key: Tensor,
    out: Tensor,
    grid: tuple[int, int, int],
    sizes: tuple[int, int, int, int, int],
    piece_stripes: int,
) -> Any:
    """Queues a launch over a pool's ``words`` [pages, words] int64; returns the compiled kernel."""
    return _digest_kernel[grid](
        words, page_ids, key, out, *sizes, piece_stripes, AHEAD, num_warps=1, enable_fp_fusion=True
    )


@triton.jit(
    do_not_specialize=["page_stripes", "first_stripe", "num_pieces", "run_pieces", "run_step"],
    do_not_specialize_on_alignment=["page_ids", "key", "out"],
)
def _digest_kernel(
    pages, page_ids, key, out, page_stripes, first_stripe, num_pieces, run_pieces, run_step,
    PIECE_STRIPES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    ROUNDS: tl.constexpr = (PIECE_STRIPES - 1) // _STRIPES  # that end in a scramble
    LOOPED: tl.constexpr = ROUNDS // AHEAD * AHEAD
    REST: tl.constexpr = PIECE_STRIPES - ROUNDS * _STRIPES
    ENDING: tl.constexpr = PIECE_STRIPES - LOOPED * _STRIPES
    thread = tl.arange(0, _SHARERS * 4)
    sharer, pair = thread // 4, thread % 4 * 2
    piece = tl.program_id(0)
    page = tl.load(page_ids + piece // num_pieces).to(tl.int64)
    place = piece % num_pieces
    place = place // run_pieces * run_step + place % run_pieces
    stripe = page * page_stripes + first_stripe + place * PIECE_STRIPES
    source = pages + (stripe + sharer) * 8 + pair
    keys = _round_keys(key, sharer, pair, _STRIPES, False)
    word = tl.arange(0, 4) * 2
    even, odd = _words(key + _START + word)
    scramble = _words(key + _SCRAMBLE + word)
    if LOOPED > 0:
        tiles = _load_stripes(source, AHEAD * _STRIPES, sharer)
        for first in range(AHEAD, LOOPED, AHEAD):
            coming = _load_stripes(source + first * _ROUND, AHEAD * _STRIPES, sharer)
            even, odd = _rounds(even, odd, tiles, AHEAD, keys, scramble)
            tiles = coming
        coming = _load_stripes(source + LOOPED * _ROUND, ENDING, sharer)
        even, odd = _rounds(even, odd, tiles, AHEAD, keys, scramble)
    else:
        coming = _load_stripes(source, ENDING, sharer)
    even, odd = _rounds(even, odd, coming, ROUNDS - LOOPED, keys, scramble)
    keys = _round_keys(key, sharer, pair, REST, True)
    even_sum, odd_sum = _sums(coming, ROUNDS - LOOPED, keys, REST, sharer)
    merge = _words(key + _MERGE + word)
    digest = _merged(even + even_sum, odd + odd_sum, merge, PIECE_STRIPES)
    tl.store(out + piece, digest.to(tl.int64, bitcast=True))


@triton.jit
def _words(source):
    """The words at even and at odd places, from pointers [N] to the even ones."""
    even, odd = tl.load(source), tl.load(source + 1)
    return even.to(tl.uint64, bitcast=True), odd.to(tl.uint64, bitcast=True)


@triton.jit
def _round_keys(key, sharer, pair, COUNT: tl.constexpr, IS_LAST: tl.constexpr):
    """The secret's words for stripes below COUNT, an even and an odd one for each [32]."""
    keys = ()
    for first in tl.static_range(0, COUNT, _SHARERS):
        stripe = first + sharer
        if IS_LAST:
            # The very last stripe has its own words.
            stripe = tl.where(stripe == COUNT - 1, _LAST, stripe)
        keys += (_words(key + stripe + pair),)  # type: ignore[assignment]
    return keys


@triton.jit
def _load_stripes(source, COUNT: tl.constexpr, sharer):
    """Stripes below COUNT, counted from ``source``, as pairs [32, 2]."""
    tiles = ()
    for first in tl.static_range(0, COUNT, _SHARERS):
        words = (source + first * 8)[:, None] + tl.arange(0, 2)[None, :]
        if first + _SHARERS <= COUNT:
            tile = tl.load(words)
        else:
            tile = tl.load(words, mask=(first + sharer < COUNT)[:, None], other=0)
        tiles += (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _rounds(even, odd, tiles, COUNT: tl.constexpr, keys, scramble):
    """The accumulators after the first COUNT whole rounds of ``tiles``."""
    for index in tl.static_range(COUNT):
        even_sum, odd_sum = _sums(tiles, index, keys, _STRIPES, 0)
        even, odd = _scramble(even + even_sum, scramble[0]), _scramble(odd + odd_sum, scramble[1])
    return even, odd


@triton.jit
def _sums(tiles, ROUND: tl.constexpr, keys, COUNT: tl.constexpr, sharer):
    """The sum that the first COUNT stripes of a round add to the even and to the odd accumulators
    [4]."""
    even_sum, odd_sum = tl.zeros_like(keys[0][0]), tl.zeros_like(keys[0][0])
    for first in tl.static_range(0, COUNT, _SHARERS):
        tile = tiles[(ROUND * _STRIPES + first) // _SHARERS].to(tl.uint64, bitcast=True)
        even, odd = tl.split(tile)
        even_key, odd_key = keys[first // _SHARERS]
        # Each word goes to its neighbour's accumulator, its product to its own.
        even_more, odd_more = odd + _product(even ^ even_key), even + _product(odd ^ odd_key)
        if first + _SHARERS > COUNT:
            even_more = tl.where(first + sharer < COUNT, even_more, 0)
            odd_more = tl.where(first + sharer < COUNT, odd_more, 0)
        even_sum += even_more
        odd_sum += odd_more
    return _over_sharers(even_sum), _over_sharers(odd_sum)


@triton.jit
def _product(word):
    return (word & 0xFFFFFFFF) * (word >> 32)


@triton.jit
def _over_sharers(value):
    return tl.sum(tl.reshape(value, (_SHARERS, 4)), 0)


@triton.jit
def _scramble(value, key):
    return (value ^ (value >> 47) ^ key) * tl.full((), _PRIME_32, tl.uint64)


@triton.jit
def _merged(even, odd, key, PIECE_STRIPES: tl.constexpr):
    even, odd = even ^ key[0], odd ^ key[1]
    length: tl.constexpr = PIECE_STRIPES * 64 * _PRIME_64 % 2**64
    digest = tl.sum((even * odd) ^ tl.umulhi(even, odd), 0) + tl.full((), length, tl.uint64)
    digest = (digest ^ (digest >> 37)) * tl.full((), _PRIME_END, tl.uint64)
    return digest ^ (digest >> 32)
