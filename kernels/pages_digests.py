"""Digests of pieces of KV pages, the same bits on a CPU and on a GPU: pages never move to the host.

A digest is xxh3_64 of a piece under a seed. It catches accidents: flipped bits, words, runs and
pieces in the wrong place, bytes that never arrived or belong to another page. Its rate of misses is
measured and not proven: in xxHash's own tests, and in ours with corrupted pages, digests of
different pieces agree as often as a random function's, once in 2**64. Each life of a receiver has
its own seed, so that one life finds errors that another misses. It is no defence against an
attacker, because xxh3 is not cryptographic.
"""

from __future__ import annotations

import struct
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

STRIPE_BYTES = 64
MOST_PIECE_BYTES = 16384
# Shorter inputs take other paths through xxh3 than the one that the kernel computes.
LEAST_PIECE_BYTES = 256

# Offsets of a key's parts, in words of 64 bits.
SECRET_WORD, LAST_WORD, MERGE_WORD, START_WORD, SEED_WORD, KEY_WORDS = 0, 24, 32, 40, 48, 49

# The constants of xxh3's specification: its primes and its secret.
_PRIMES_32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIMES_64 = (
    *(0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5),
)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def piece_bytes_of(head_bytes: int) -> int:
    """Bytes of a piece of a page in which a KV head of a group of layers takes ``head_bytes``.

    The longest multiple of 64 that divides the head's share and is at most 16384; the whole share
    if that would be below 256, or if the share is not a multiple of 64.
    """
    stripes, rest = divmod(head_bytes, STRIPE_BYTES)
    if rest or stripes <= 0:
        return head_bytes
    most = min(stripes, MOST_PIECE_BYTES // STRIPE_BYTES)
    longest = next(count for count in range(most, 0, -1) if stripes % count == 0)
    piece_bytes = longest * STRIPE_BYTES
    return piece_bytes if piece_bytes >= LEAST_PIECE_BYTES else head_bytes


def digest_key(seed: int) -> Tensor:
    """The key of a seed in 0 .. 2**64 - 1 for `piece_digests`: [49] int64 on the CPU.

    Made once for a seed and copied to the pages' device. It holds the seed's secret (24 words),
    the secret's words for the last stripe and for the end (8 each), the first accumulators (8) and
    the seed. Raises ValueError for another seed.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"a seed must be within 0..2**64 - 1, got {seed}")
    words = [
        (word + (-seed if index % 2 else seed)) % 2**64
        for index, word in enumerate(struct.unpack("<24Q", _SECRET))
    ]
    secret = struct.pack("<24Q", *words)
    p64, p32 = _PRIMES_64, _PRIMES_32
    start = (p32[2], p64[0], p64[1], p64[2], p64[3], p32[1], p64[4], p32[0])
    last, merge = struct.unpack_from("<8Q", secret, 121), struct.unpack_from("<8Q", secret, 11)
    key = [*words, *last, *merge, *start, seed]
    return torch.tensor([_signed(word) for word in key], dtype=torch.int64)


def piece_digests(
    pages: Tensor,
    page_ids: Tensor,
    key: Tensor,
    *,
    piece_bytes: int,
    first_byte: int = 0,
    num_bytes: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Digests [N, num_bytes / piece_bytes] int64 of a range of bytes of chosen pages.

    ``pages`` [num_pages, elements] of any dtype has contiguous rows, each a page; ``page_ids`` [N]
    int32 or int64 may come in any order and repeat; ``key`` is `digest_key`'s; ``out``, if given,
    is filled and returned. All are on one device; on a GPU nothing waits for the host, and an id
    outside the pool is not detected. The range begins at ``first_byte`` of a page and is
    ``num_bytes`` long, by default the rest of it. A digest has the bits of the unsigned number that
    ``xxhash.xxh3_64_intdigest(piece, seed)`` is.

    Raises ValueError for a range that is not whole pieces inside a page, and for tensors of other
    shapes, dtypes or devices. On a GPU it also raises it for pieces below 256 bytes, and if pieces,
    the range or the pages do not begin at multiples of 64 bytes. IndexError for ids outside a CPU's
    pool.
    """
    page_bytes = pages.shape[-1] * pages.element_size()
    if num_bytes is None:
        num_bytes = page_bytes - first_byte
    if not _is_whole(page_bytes, piece_bytes, first_byte, num_bytes):
        raise ValueError(
            f"expected whole pieces of {piece_bytes} bytes within a page of {page_bytes}, got "
            f"{num_bytes} bytes from byte {first_byte}"
        )
    shape = len(page_ids), num_bytes // piece_bytes
    if out is None:
        out = torch.empty(shape, dtype=torch.int64, device=pages.device)
    _check(pages, page_ids, key, out, shape)
    if pages.device.type == "cpu":
        return out.copy_(_on_host(pages, page_ids, key, piece_bytes, first_byte, shape[1]))
    _check_stripes(pages, piece_bytes, first_byte)
    from effuse.kernels import pages_digests_triton

    return pages_digests_triton.launch(pages, page_ids, key, piece_bytes, first_byte, out)


class PoolDigests:
    """`piece_digests` of one GPU's pool on one stream, for callers that must save the host's time.

    The pool is checked and the kernel looked up only once; arguments of calls are not checked. Not
    thread-safe.
    """

    def __init__(self, pages: Tensor, piece_bytes: int, stream: torch.cuda.Stream) -> None:
        """``pages`` and ``piece_bytes`` as in `piece_digests`. Raises ValueError like it, and for
        pages that are not on a GPU.
        """
        from effuse.kernels.pages_digests_triton import Launcher

        if pages.device.type != "cuda" or pages.dim() != 2 or pages.stride(1) != 1:
            raise ValueError(f"expected rows on a GPU, got {pages.shape} on {pages.device}")
        _check_stripes(pages, piece_bytes, 0)
        self._launch = Launcher(pages, piece_bytes, stream)

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
        ``page_ids`` [at least num_ids] int32.

        The pieces lie in runs of ``run_pieces``. The first run begins at ``first_piece`` of a page,
        each other run ``run_step`` pieces after the one before. The digests go to the beginning of
        ``out`` [at least num_ids * num_pieces] int64, page by page. Both are on the GPU or in
        pinned memory of the host, which saves copies.
        """
        runs = run_pieces, run_step
        self._launch(page_ids, key, out, num_ids, first_piece, num_pieces, runs)


def _check_stripes(pages: Tensor, piece_bytes: int, first_byte: int) -> None:
    """Raises ValueError if the kernel could not read such pieces."""
    stride = pages.stride(0) * pages.element_size()
    if piece_bytes < LEAST_PIECE_BYTES or any(
        count % STRIPE_BYTES for count in (piece_bytes, first_byte, stride)
    ):
        raise ValueError(
            f"on {pages.device}: expected pieces of at least {LEAST_PIECE_BYTES} bytes at "
            f"multiples of {STRIPE_BYTES}, got pieces of {piece_bytes} from byte {first_byte} in "
            f"pages {stride} bytes apart"
        )


def _is_whole(page_bytes: int, piece_bytes: int, first_byte: int, num_bytes: int) -> bool:
    if piece_bytes <= 0 or num_bytes <= 0 or num_bytes % piece_bytes:
        return False
    return 0 <= first_byte <= page_bytes - num_bytes


def _check(
    pages: Tensor, page_ids: Tensor, key: Tensor, out: Tensor, shape: tuple[int, int]
) -> None:
    if pages.dim() != 2 or pages.stride(1) != 1:
        raise ValueError(f"pages must have two dimensions and contiguous rows, got {pages.shape}")
    if page_ids.dim() != 1 or page_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"expected [N] int32 or int64 page ids, got {page_ids.shape} {page_ids.dtype}"
        )
    if not page_ids.is_contiguous():
        raise ValueError("page ids must be contiguous")
    if key.shape != (KEY_WORDS,) or key.dtype != torch.int64 or not key.is_contiguous():
        raise ValueError(f"expected a key from digest_key, got {key.shape} {key.dtype}")
    if out.shape != shape or out.dtype != torch.int64 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {shape} int64, got {out.shape} {out.dtype}")
    devices = {tensor.device for tensor in (pages, page_ids, key, out)}
    if len(devices) > 1:
        raise ValueError(f"expected one device, got {sorted(map(str, devices))}")


def _on_host(
    pages: Tensor, page_ids: Tensor, key: Tensor, piece_bytes: int, first_byte: int, count: int
) -> Tensor:
    import xxhash

    seeds = repeat(int(key[SEED_WORD]) % 2**64)
    rows = pages.view(torch.uint8).numpy()[:, first_byte : first_byte + count * piece_bytes]
    found = np.empty((len(page_ids), count), dtype=np.uint64)
    for digests, page_id in zip(found, page_ids.tolist(), strict=True):
        if not 0 <= page_id < len(pages):
            raise IndexError(f"page {page_id} of a pool of {len(pages)}")
        pieces = rows[page_id].reshape(count, piece_bytes)
        digests[:] = list(map(xxhash.xxh3_64_intdigest, pieces, seeds))
    return torch.from_numpy(found.view(np.int64))


def _signed(word: int) -> int:
    """The int64 with the same bits."""
    return word - 2**64 if word >= 2**63 else word
