"""Digests of pieces: detected errors, the rate of misses, and the kernel's code.

The kernel in Triton's interpreter is held to xxhash by `test_interpreter.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from operators import digests
from operators.digests import piece_digests
from torch import Tensor

from effuse.kernels.pages_digests import digest_key, piece_bytes_of


def test_other_seeds_give_other_digests() -> None:
    pages = digests.filled("zeros", 1, 1024, 256, 0)
    ids = torch.tensor([0])
    found = {
        tuple(piece_digests(pages, ids, digest_key(seed), piece_bytes=256)[0].tolist())
        for seed in (0, 1, 2, 2**63, 2**64 - 1)
    }
    assert len(found) == 5


@pytest.mark.parametrize(
    ("head_bytes", "piece_bytes"),
    [
        (65536, 16384),  # Dream-7B over NIXL, 32 tokens a page: 4 layers of a head
        (32768, 16384),  # the same with 16 tokens a page
        (8192, 8192),  # the bundled model
        (16384, 16384),
        (16448, 64 * 257),  # 257 stripes, a prime number of them
        (49152, 16384),
        (49216, 64 * 769),  # a prime number again
        (64 * 3 * 257, 64 * 3 * 257),  # in pieces of 192 bytes at most
        (64 * 4 * 257, 256),
        (3 * 7168, 10752),
        (128, 128),
        (1000, 1000),
        (100_000, 100_000),
    ],
)
def test_heads_are_cut_into_equal_pieces(head_bytes: int, piece_bytes: int) -> None:
    assert piece_bytes_of(head_bytes) == piece_bytes
    assert head_bytes % piece_bytes == 0


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_of_more_than_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed"):
        digest_key(seed)


def test_ten_thousand_corruptions_are_noticed_and_placed() -> None:
    def digests_of(pages: Tensor) -> Tensor:
        return piece_digests(pages, torch.arange(len(pages)), digest_key(77), piece_bytes=512)

    digests.check_corruptions(digests_of, 10_000, num_pieces=8, piece_bytes=512)


@pytest.fixture(scope="module")
def versions() -> dict[str, Tensor]:
    """By kind of corruption, 4000 versions of a piece of 1088 bytes, or as many as there are."""
    found = dict(digests.versions_of_a_piece(4000, 1088))
    assert all(len(pieces) > 500 for pieces in found.values())
    return found


def digests_of_pieces(pieces: Tensor, seed: int) -> Tensor:
    ids = torch.arange(len(pieces))
    return piece_digests(pieces, ids, digest_key(seed), piece_bytes=pieces.shape[1])[:, 0]


@pytest.mark.parametrize("seed", digests.SEEDS)
def test_digests_of_like_pieces_agree_as_often_as_by_chance(
    seed: int, versions: dict[str, Tensor]
) -> None:
    found = {name: digests_of_pieces(pieces, seed) for name, pieces in versions.items()}
    odd = {name: said for name, one in found.items() if (said := digests.chance_of(one))}
    assert not odd
    assert not digests.chance_of(torch.cat(list(found.values())))


def test_another_seed_parts_pieces_that_agreed(versions: dict[str, Tensor]) -> None:
    """In 16 bits, of which some thousand pairs agree by chance under each seed."""
    pieces = torch.cat(list(versions.values()))
    pairs = [agreeing_pairs(digests_of_pieces(pieces, seed) & 0xFFFF) for seed in (1, 2)]
    assert min(map(len, pairs)) > 1000
    assert len(pairs[0] & pairs[1]) <= 3


def agreeing_pairs(digests_cut: Tensor) -> set[tuple[int, int]]:
    order = digests_cut.argsort(stable=True)
    same = (digests_cut[order][1:] == digests_cut[order][:-1]).nonzero().flatten()
    return {(int(order[i]), int(order[i + 1])) for i in same.tolist()}


def sum_of_words(pieces: Tensor) -> Tensor:
    return pieces.view(torch.int64).sum(1)


def xor_of_words(pieces: Tensor) -> Tensor:
    return torch.from_numpy(np.bitwise_xor.reduce(pieces.numpy().view(np.int64), axis=1))


def with_dead_bits(pieces: Tensor) -> Tensor:
    return digests_of_pieces(pieces, 1) & ~0b11


@pytest.mark.parametrize("weak", [sum_of_words, xor_of_words, with_dead_bits])
def test_weak_digests_are_found_out(
    weak: Callable[[Tensor], Tensor], versions: dict[str, Tensor]
) -> None:
    assert digests.chance_of(weak(torch.cat(list(versions.values()))))
    assert digests.chance_of(weak(versions["swapped_words"]))
    assert digests.chance_of(weak(versions["flipped_bit"]))
