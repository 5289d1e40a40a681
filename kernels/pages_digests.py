"""Digests of pieces of KV pages: how pages are cut, and the keys; the same bits on CPU and GPU.

A digest is xxh3_64 of a piece under a seed. It catches accidents: flipped bits, words, runs and
pieces in the wrong place, bytes that never arrived or belong to another page. Its rate of misses is
measured and not proven: in xxHash's own tests, and in ours with corrupted pages, digests of
different pieces agree as often as a random function's, once in 2**64. Each life of a receiver has
its own seed, so that one life finds errors that another misses. It is no defence against an
attacker, because xxh3 is not cryptographic.
"""

import struct

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
    """The key of a seed in 0 .. 2**64 - 1: [49] int64 on the CPU.

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
    signed = [word - 2**64 if word >= 2**63 else word for word in key]
    return torch.tensor(signed, dtype=torch.int64)
