"""Digests against xxhash, pages that went wrong, and how often digests should agree by chance.

Used on the CPU, in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from effuse.kernels.pages_digests import LAST_WORD, SEED_WORD, digest_key

Bytes = NDArray[np.uint8]
Launch = Callable[[Tensor, Tensor, Tensor, int, int, Tensor], Tensor]
Corruption = Callable[[Bytes, Bytes, int, np.random.Generator], None]

# One stripe more or less than a round of 16, no whole round, several, and models' sizes.
LENGTHS = (256, 320, 1024, 1088, 2 * 1024 + 64, 16384)
SEEDS = (0, 1, 2**64 - 1, 0x9C6E5F0A3B21D487)
KINDS = ("random", "zeros", "ones", "secret")


def launch(
    pages: Tensor,
    page_ids: Tensor,
    key: Tensor,
    piece_bytes: int,
    first_byte: int,
    out: Tensor,
    runs: tuple[int, int] | None = None,
) -> Tensor:
    """Fills ``out`` [N, pieces] by the kernel. ``runs`` are the pieces of a run and from one run to
    the next; by default all pieces lie behind each other.
    """
    from effuse.kernels import pages_digests_triton

    if out.numel():
        words = pages.view(torch.int64)
        count = out.shape[1]
        sizes = (words.stride(0) // 8, first_byte // 64, count, *(runs or (count, 0)))
        grid = out.numel(), 1, 1
        pages_digests_triton.launch(words, page_ids, key, out, grid, sizes, piece_bytes // 64)
    return out


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
    """Digests [N, pieces] of a range of bytes of chosen pages: the kernel's on a GPU, and those of
    the library on the CPU.
    """
    if num_bytes is None:
        num_bytes = pages.shape[-1] * pages.element_size() - first_byte
    shape = len(page_ids), num_bytes // piece_bytes
    if out is None:
        out = torch.empty(shape, dtype=torch.int64, device=pages.device)
    if pages.is_cuda:
        return launch(pages, page_ids, key, piece_bytes, first_byte, out)
    seed = int(key[SEED_WORD]) % 2**64
    return out.copy_(expected(pages, page_ids, seed, piece_bytes, first_byte, shape[1]))


def filled(kind: str, num_pages: int, page_bytes: int, piece_bytes: int, seed: int) -> Tensor:
    """Pages [num_pages, page_bytes] uint8; "secret" is the hash's own input, so that every product
    in it is of zeros.
    """
    if kind == "random":
        generator = torch.Generator().manual_seed(piece_bytes)
        return torch.randint(256, (num_pages, page_bytes), dtype=torch.uint8, generator=generator)
    if kind == "secret":
        key, stripes = digest_key(seed), piece_bytes // 64
        words = torch.arange(8) + torch.arange(stripes)[:, None] % 16
        words[-1] = LAST_WORD + torch.arange(8)
        piece = key[words].view(torch.uint8).flatten()
        return piece.repeat(num_pages, page_bytes // piece_bytes)
    value = 0 if kind == "zeros" else 255
    return torch.full((num_pages, page_bytes), value, dtype=torch.uint8)


def expected(
    pages: Tensor, page_ids: Tensor, seed: int, piece_bytes: int, first_byte: int, count: int
) -> Tensor:
    """[N, count] by the library, piece by piece."""
    data = pages.view(torch.uint8).numpy()
    digests = [
        [
            xxhash.xxh3_64_intdigest(data[page, begin : begin + piece_bytes].tobytes(), seed)
            for begin in range(first_byte, first_byte + count * piece_bytes, piece_bytes)
        ]
        for page in page_ids.tolist()
    ]
    return torch.from_numpy(np.array(digests, dtype=np.uint64).view(np.int64))


def check(
    launch: Launch,
    device: torch.device,
    piece_bytes: int,
    kind: str,
    seeds: Sequence[int] = SEEDS,
) -> None:
    """The last two of three pieces of scattered pages, under each of the seeds."""
    ids = torch.tensor([4, 0, 4], dtype=torch.int32)
    for seed in seeds:
        pages = filled(kind, 5, 3 * piece_bytes, piece_bytes, seed)
        out = torch.full((3, 2), -1, dtype=torch.int64, device=device)
        key = digest_key(seed).to(device)
        launch(pages.to(device), ids.to(device), key, piece_bytes, piece_bytes, out)
        assert torch.equal(out.cpu(), expected(pages, ids, seed, piece_bytes, piece_bytes, 2))


def check_runs(launch: Callable[..., Tensor], device: torch.device, piece_bytes: int = 512) -> None:
    """Pages of three groups of four heads, a piece each: the second and third head of the last two
    groups."""
    pages = filled("random", 5, 12 * piece_bytes, piece_bytes, 0)
    ids = torch.tensor([4, 0, 4], dtype=torch.int32)
    out = torch.full((3, 4), -1, dtype=torch.int64, device=device)
    key = digest_key(SEEDS[0]).to(device)
    launch(pages.to(device), ids.to(device), key, piece_bytes, 5 * piece_bytes, out, (2, 4))
    parts = [expected(pages, ids, SEEDS[0], piece_bytes, at * piece_bytes, 2) for at in (5, 9)]
    assert torch.equal(out.cpu(), torch.cat(parts, dim=1))


def kv_like(num_bytes: int, seed: int) -> Bytes:
    """bf16 numbers like in a page; the last eighth was never written and is zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_bytes // 2, generator=generator).bfloat16()
    values[-(num_bytes // 16) :] = 0
    data: Bytes = values.view(torch.uint8).numpy()
    return data


def flipped_bit(page: Bytes, other: Bytes, piece_bytes: int, rng: np.random.Generator) -> None:
    page[rng.integers(len(page))] ^= np.uint8(1 << rng.integers(8))


def swapped_words(page: Bytes, other: Bytes, piece_bytes: int, rng: np.random.Generator) -> None:
    words = page.view(np.uint64)
    a, b = rng.integers(len(words), size=2)
    words[[a, b]] = words[[b, a]]


def swapped_stripes_of_a_lane(
    page: Bytes, other: Bytes, piece_bytes: int, rng: np.random.Generator
) -> None:
    """Words that enter one accumulator in one round, with an unchanged sum."""
    words = page.view(np.uint64)
    first = int(rng.integers(max(1, len(words) // 128))) * 128 + int(rng.integers(8))
    places = np.arange(first, min(len(words), first // 128 * 128 + 128), 8)
    a, b = rng.choice(places, 2, replace=False)
    words[[a, b]] = words[[b, a]]


def swapped_pieces(page: Bytes, other: Bytes, piece_bytes: int, rng: np.random.Generator) -> None:
    pieces = page.reshape(-1, piece_bytes)
    a, b = rng.choice(len(pieces), 2, replace=False)
    pieces[[a, b]] = pieces[[b, a]]


def zeroed_run(page: Bytes, other: Bytes, piece_bytes: int, rng: np.random.Generator) -> None:
    page[_run(page, rng)] = 0


def shifted_run(page: Bytes, other: Bytes, piece_bytes: int, rng: np.random.Generator) -> None:
    """A run written one word too far."""
    run = _run(page[:-8], rng)
    page[run.start + 8 : run.stop + 8] = page[run].copy()


def stale_run(page: Bytes, other: Bytes, piece_bytes: int, rng: np.random.Generator) -> None:
    run = _run(page, rng)
    page[run] = other[run]


def truncated_tail(page: Bytes, other: Bytes, piece_bytes: int, rng: np.random.Generator) -> None:
    """A write that ended early: after it there is the earlier content, or nothing."""
    cut = int(rng.integers(len(page)))
    page[cut:] = other[cut:] if rng.integers(2) else 0


CORRUPTIONS: dict[str, Corruption] = {
    function.__name__: function
    for function in (
        *(flipped_bit, swapped_words, swapped_stripes_of_a_lane, swapped_pieces),
        *(zeroed_run, shifted_run, stale_run, truncated_tail),
    )
}


def _run(page: Bytes, rng: np.random.Generator) -> slice:
    length = int(2 ** rng.uniform(0, math.log2(len(page))))
    begin = int(rng.integers(len(page) - length + 1))
    return slice(begin, begin + length)


def corrupted(
    page: Bytes, other: Bytes, piece_bytes: int, corruption: Corruption, count: int, seed: int
) -> Bytes:
    """[count, bytes] versions of a page, none equal to it."""
    rng = np.random.default_rng(seed)
    versions = np.repeat(page[None], count, axis=0)
    for version in versions:
        while np.array_equal(version, page):
            corruption(version, other, piece_bytes, rng)
    return versions


def batches_of_corruptions(
    count: int, num_pieces: int, piece_bytes: int
) -> Iterator[tuple[Bytes, Bytes]]:
    """(page, versions of it that went wrong), ``count`` versions in all, every kind equally
    often.
    """
    share, rest = divmod(count, len(CORRUPTIONS))
    for index, corruption in enumerate(CORRUPTIONS.values()):
        page, other = (kv_like(num_pieces * piece_bytes, 2 * index + k) for k in (0, 1))
        wanted = share + (rest if index == 0 else 0)
        yield page, corrupted(page, other, piece_bytes, corruption, wanted, index)


def check_corruptions(
    digests_of: Callable[[Tensor], Tensor], count: int, num_pieces: int, piece_bytes: int
) -> None:
    """Of ``count`` corrupted pages, exactly the pieces that changed have other digests.

    ``digests_of`` takes pages [N, bytes] uint8 on the CPU to digests [N, pieces].
    """
    seen = 0
    for page, versions in batches_of_corruptions(count, num_pieces, piece_bytes):
        clean = digests_of(torch.from_numpy(page)[None]).cpu()
        found = digests_of(torch.from_numpy(versions)).cpu() != clean
        changed = (versions != page).reshape(len(versions), num_pieces, piece_bytes).any(2)
        assert changed.any(1).all()
        assert torch.equal(found, torch.from_numpy(changed))
        seen += len(versions)
    assert seen == count


def versions_of_a_piece(count: int, piece_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """For each kind of corruption inside one piece, versions of it that all differ."""
    for index, (name, corruption) in enumerate(CORRUPTIONS.items()):
        if corruption is swapped_pieces:
            continue
        piece, other = (kv_like(piece_bytes, 100 + 2 * index + k) for k in (0, 1))
        piece[-piece_bytes // 8 :] = kv_like(piece_bytes, 99)[: piece_bytes // 8]
        versions = corrupted(piece, other, piece_bytes, corruption, count, index)
        yield name, torch.from_numpy(np.unique(versions, axis=0))


def chance_of(digests: Tensor) -> str:
    """Differences from a random function in digests [N] int64 of different data; "" for none.

    Pairs that agree in 16 or 20 bits of a digest are counted, at its low end, its high end and
    between. For a random function the counts are about Poisson distributed; a count with a chance
    below one in a million is reported.
    """
    unsigned = digests.numpy().view(np.uint64)
    for bits in (16, 20):
        mean = len(digests) * (len(digests) - 1) / 2 / 2**bits
        for shift in (0, 22, 64 - bits):
            low = (unsigned >> np.uint64(shift)) & np.uint64(2**bits - 1)
            counts = np.unique(low, return_counts=True)[1].astype(np.int64)
            pairs = int((counts * (counts - 1) // 2).sum())
            if _tail(pairs, mean) < 5e-7:
                return f"{pairs} pairs agree in {bits} bits from bit {shift}, not {mean:.0f}"
    return ""


def _tail(count: int, mean: float) -> float:
    """An upper bound of the Poisson probability of a count as far from the mean (Chernoff)."""
    if count == 0:
        return math.exp(-mean)
    return math.exp(count - mean - count * math.log(count / mean))
