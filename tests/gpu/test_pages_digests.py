"""Digests of pieces on a GPU: xxhash's bits, nothing that waits, and the corruptions of the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from operators import digests
from operators.digests import piece_digests
from torch import Tensor

from effuse.kernels.pages_digests import digest_key, piece_bytes_of
from effuse.kernels.pages_digests_triton import PoolDigests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
# (parts of a page, bytes of one): pages of 32 tokens, and of 16 for the bundled model. A part is
# a KV head of a group of layers.
PAGES = {"dream": (28, 65536), "llada": (256, 65536), "bundled": (7, 8192), "bundled32": (7, 16384)}


def random_pages(num_pages: int, page_bytes: int) -> Tensor:
    shape = num_pages, page_bytes // 8
    return torch.randint(-(2**63), 2**63 - 1, shape, dtype=torch.int64, device=CUDA)


def check_against_cpu(
    pages: Tensor, ids: Tensor, piece_bytes: int, first_byte: int = 0, num_bytes: int | None = None
) -> None:
    """The CPU's path is xxhash; it reads copies of the chosen pages."""
    call = partial(
        piece_digests, piece_bytes=piece_bytes, first_byte=first_byte, num_bytes=num_bytes
    )
    key = digest_key(0x1234_5678_9ABC_DEF0)
    found = call(pages, ids, key.to(CUDA))
    assert found.is_cuda
    chosen = pages[ids.long()].cpu()
    assert torch.equal(found.cpu(), call(chosen, torch.arange(len(ids)), key))


@pytest.mark.parametrize("kind", digests.KINDS)
@pytest.mark.parametrize("length", digests.LENGTHS)
def test_pieces_of_whole_pages_of_every_kind(length: int, kind: str) -> None:
    digests.check(digests.launch, CUDA, length, kind)


def test_some_heads_of_some_groups_of_layers() -> None:
    digests.check_runs(digests.launch, CUDA)
    digests.check_runs(digests.launch, CUDA, 16384)


@pytest.mark.parametrize("name", PAGES)
def test_pages_of_released_models(name: str) -> None:
    parts, part_bytes = PAGES[name]
    pages = random_pages(11, parts * part_bytes)
    ids = torch.tensor([7, 0, 10, 7, 3], device=CUDA)
    piece_bytes = piece_bytes_of(part_bytes)
    check_against_cpu(pages, ids, piece_bytes)
    check_against_cpu(pages, ids.int(), piece_bytes, 3 * part_bytes, 2 * part_bytes)
    check_against_cpu(pages, ids[:1], piece_bytes, (parts - 1) * part_bytes)


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "device"])
def test_a_pools_digests_are_those_of_single_calls(is_pinned: bool) -> None:
    """More than once, since only the first launch looks the kernel up; and of parts of pages."""
    pages = random_pages(9, 4 * 65536)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    pool = PoolDigests(pages, 16384, stream)
    for seed, ids, first, count in ((1, [8, 0, 3], 0, 16), (2, [5], 65536, 4), (1, [2, 2], 0, 1)):
        key = digest_key(seed).to(CUDA)
        kept_ids, found = torch.tensor([*ids, 999], dtype=torch.int32), torch.zeros(100).long()
        if is_pinned:
            kept_ids, found = kept_ids.pin_memory(), found.pin_memory()
        else:
            kept_ids, found = kept_ids.to(CUDA), found.to(CUDA)
        torch.cuda.synchronize()
        size = {"num_ids": len(ids), "first_piece": first // 16384, "num_pieces": count}
        pool.take(kept_ids, key, found, **size, run_pieces=count, run_step=count)
        torch.cuda.synchronize()
        expected = piece_digests(
            pages,
            torch.tensor(ids, device=CUDA),
            key,
            piece_bytes=16384,
            first_byte=first,
            num_bytes=count * 16384,
        )
        assert torch.equal(found[: expected.numel()].view(expected.shape).cpu(), expected.cpu())
        assert not found[expected.numel() :].any()


def test_a_pool_on_the_host_or_in_odd_pieces_is_refused() -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="rows on a GPU"):
        PoolDigests(torch.zeros(2, 512, dtype=torch.int64), 1024, stream)
    with pytest.raises(ValueError, match="pieces of at least 256"):
        PoolDigests(random_pages(2, 4096), 128, stream)


def test_no_pages() -> None:
    pages, none = random_pages(2, 4096), torch.zeros(0, dtype=torch.int64, device=CUDA)
    assert piece_digests(pages, none, digest_key(0).to(CUDA), piece_bytes=1024).shape == (0, 4)


def test_pages_past_the_reach_of_32_bits() -> None:
    """Offsets of more than 2**31 words, whatever the unit they are counted in."""
    page_bytes = 28 * 65536
    last = 2**34 // page_bytes + 5
    pages = torch.empty((last + 1, page_bytes), dtype=torch.uint8, device=CUDA)
    pages[last] = random_pages(1, page_bytes).view(torch.uint8)[0]
    near = 2**31 // page_bytes + 1
    pages[near] = random_pages(1, page_bytes).view(torch.uint8)[0]
    check_against_cpu(pages, torch.tensor([last, near], device=CUDA), 16384)


def test_digests_follow_their_stream_and_wait_for_nothing() -> None:
    """Pages written on one stream late, digested on another behind an event."""
    pages, fresh = random_pages(64, 28 * 65536), random_pages(64, 28 * 65536)
    ids, key = torch.randperm(64, device=CUDA), digest_key(3).to(CUDA)
    # Compiled before, since loading code may wait.
    before = piece_digests(pages, ids, key, piece_bytes=16384)
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    written = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # It prints that it is a prototype.
            torch.cuda.set_sync_debug_mode("error")
        with torch.cuda.stream(writer):
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
            pages.copy_(fresh)
            written.record()
        with torch.cuda.stream(reader):
            reader.wait_event(written)
            found = piece_digests(pages, ids, key, piece_bytes=16384)
        waited = written.query()  # type: ignore[no-untyped-call]
        assert not waited, "the call waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert not torch.equal(found, before)
    alone = piece_digests(fresh.cpu(), ids.cpu(), digest_key(3), piece_bytes=16384)
    assert torch.equal(found.cpu(), alone)


def test_digests_replay_in_a_graph_with_other_pages_and_seeds() -> None:
    pages, ids = random_pages(9, 4 * 4096), torch.tensor([8, 1], device=CUDA)
    key, out = digest_key(1).to(CUDA), torch.empty(2, 4, dtype=torch.int64, device=CUDA)
    call = partial(piece_digests, pages, ids, key, piece_bytes=4096, out=out)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    pages.copy_(random_pages(9, 4 * 4096))
    ids.copy_(torch.tensor([2, 5]))
    key.copy_(digest_key(2))
    graph.replay()
    alone = piece_digests(pages.cpu(), ids.cpu(), digest_key(2), piece_bytes=4096)
    assert torch.equal(out.cpu(), alone)


def test_no_number_of_pages_compiles_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does another part of the pages, or a part of a longer list of ids or digests."""
    pages, key = random_pages(64, 4 * 1024), digest_key(1).to(CUDA)
    ids, out = torch.arange(70, device=CUDA), torch.empty(300, dtype=torch.int64, device=CUDA)
    call = partial(piece_digests, pages, key=key, piece_bytes=1024)
    call(page_ids=ids[:5])

    def refuse(*args: object, **named: object) -> None:
        raise AssertionError("a kernel was compiled")

    monkeypatch.setattr("triton.runtime.jit.JITFunction._do_compile", refuse)
    for first, count in ((0, 1), (1, 2), (3, 16), (0, 17), (0, 64)):
        for pieces in (1, 3, 4):
            place = out[first : first + count * pieces].view(count, pieces)
            chosen = ids[first : first + count]
            call(page_ids=chosen, first_byte=0, num_bytes=pieces * 1024, out=place)
    call(page_ids=ids[:3], first_byte=1024, num_bytes=1024)


def digester(piece_bytes: int, seed: int) -> Callable[[Tensor], Tensor]:
    key = digest_key(seed).to(CUDA)

    def digests_of(pages: Tensor) -> Tensor:
        ids = torch.arange(len(pages), device=CUDA)
        return piece_digests(pages.to(CUDA), ids, key, piece_bytes=piece_bytes)

    return digests_of


def test_ten_thousand_corruptions_are_noticed_and_placed() -> None:
    digests.check_corruptions(digester(512, 77), 10_000, num_pieces=8, piece_bytes=512)
    digests.check_corruptions(digester(4096, 78), 1000, num_pieces=14, piece_bytes=4096)


@pytest.fixture(scope="module")
def versions() -> dict[str, Tensor]:
    """By kind of corruption, 4000 versions of a piece of 1088 bytes, or as many as there are."""
    return dict(digests.versions_of_a_piece(4000, 1088))


@pytest.mark.parametrize("seed", digests.SEEDS)
def test_digests_of_like_pieces_agree_as_often_as_by_chance(
    seed: int, versions: dict[str, Tensor]
) -> None:
    digests_of = digester(1088, seed)
    found = {name: digests_of(pieces)[:, 0].cpu() for name, pieces in versions.items()}
    odd = {name: said for name, one in found.items() if (said := digests.chance_of(one))}
    assert not odd
    assert not digests.chance_of(torch.cat(list(found.values())))
