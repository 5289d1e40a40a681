"""Copies of parts of pages between pools that hold different heads, against plain slices.

Used in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from kvtransfer.groups import layouts_of
from torch import Tensor

from effuse.kernels import pages_copy_triton
from effuse.kvtransfer.layout import KVLayout, PageMemory
from effuse.kvtransfer.messages import PageRef
from effuse.kvtransfer.nixl_peers import cuts
from effuse.kvtransfer.peer_copies import order_of, queue
from effuse.kvtransfer.transport import Chunk

# Three groups of layers and four heads of 2 KiB, a page of 24 KiB.
LAYOUT = KVLayout("unified", 6, 4, 16, 8, "float32", most_groups=3)
ODD = KVLayout("unified", 4, 4, 24, 2, "float32", most_groups=2)  # heads of 768 bytes
NUM_PAGES = 5
SOURCES, TARGETS = (4, 0, 3), (1, 2, 0)
DEGREES = ((1, 2), (2, 1), (1, 4), (4, 2), (2, 2), (1, 8), (8, 1))


def check(
    layout: KVLayout, sending: int, receiving: int, groups: range, device: torch.device
) -> None:
    """Every pair of ranks that share heads; no other byte of either pool changes."""
    for first in range(sending):
        ours = PageMemory(layouts_of(layout, sending)[first], NUM_PAGES, device)
        ours.tensor.copy_(torch.rand(ours.tensor.shape))
        for second in range(receiving):
            theirs = PageMemory(layouts_of(layout, receiving)[second], NUM_PAGES, device)
            check_pair(ours, theirs, groups)


def check_pair(ours: PageMemory, theirs: PageMemory, groups: range) -> None:
    mine, other = ours.layout.heads, theirs.layout.heads
    heads = range(max(mine.start, other.start), min(mine.stop, other.stop))
    if not heads:
        return
    theirs.tensor.copy_(torch.rand(theirs.tensor.shape))
    before, expected = ours.tensor.clone(), theirs.tensor.clone()
    copied = place(ours, SOURCES, groups, heads)
    place_of_heads(theirs.layout, expected, groups, heads)[list(TARGETS)] = copied
    targets = tuple(PageRef(page, 1) for page in TARGETS)
    chunk = Chunk(0, SOURCES, targets, groups, heads)
    queue(ours, chunk, cuts(ours.layout, other), order_of(chunk, theirs.address).to(ours.device))
    assert torch.equal(theirs.tensor, expected) and torch.equal(ours.tensor, before)


def place(memory: PageMemory, pages: tuple[int, ...], groups: range, heads: range) -> Tensor:
    return place_of_heads(memory.layout, memory.tensor, groups, heads)[list(pages)]


def place_of_heads(layout: KVLayout, pages: Tensor, groups: range, heads: range) -> Tensor:
    """These heads of these groups of all pages: a view."""
    own = layout.place_of(heads)
    return pages[:, groups.start : groups.stop, own.start : own.stop]


def check_in_small_tiles() -> None:
    """Runs that are not whole numbers of tiles, and programs with many tiles."""
    sizes = pages_copy_triton.PROGRAMS, pages_copy_triton.TILE_STRIPES
    pages_copy_triton.PROGRAMS, pages_copy_triton.TILE_STRIPES = 4, 8
    try:
        check(ODD, 1, 2, range(2), torch.device("cpu"))
        check(ODD, 2, 1, range(2), torch.device("cpu"))
    finally:
        pages_copy_triton.PROGRAMS, pages_copy_triton.TILE_STRIPES = sizes


def checks(device: torch.device) -> Iterator[tuple[str, Callable[[], None]]]:
    for sending, receiving in DEGREES:
        name = f"{sending}-{receiving}"
        yield name, partial(check, LAYOUT, sending, receiving, range(3), device)
    yield "some-groups", partial(check, LAYOUT, 2, 1, range(1, 3), device)
    yield "odd", partial(check, ODD, 1, 2, range(2), device)
