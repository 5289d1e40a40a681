"""The pool's tensor: one page after the other, each contiguous with all of its layers.

Views and bytes of pages; pool.py knows their holders. Digests are in digest.py, copies between a
GPU's pages and the host in staging.py.
"""

import contextlib
import functools
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from math import gcd

import torch
from torch import Tensor

from effuse.kernels.pages import distinct_views, zero_distinct_tail
from effuse.kvtransfer.layout import KVLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PageMemory:
    """`num_pages` pages of KV in one tensor [pages, *page_shape]; only `layers` knows its order."""

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device | str = "cpu"
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.page_bytes = layout.page_bytes
        shape, dtype = (num_pages, *layout.page_shape), DTYPES[layout.dtype]
        if num_pages and torch.device(device).type == "cpu":
            self.tensor = torch.frombuffer(huge_pages(self.num_bytes), dtype=dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._host = bytes_of(self.tensor) if self.tensor.device.type == "cpu" else None

    @property
    def address(self) -> int:
        """Address of page 0 on its device."""
        return self.tensor.data_ptr()

    @property
    def device(self) -> torch.device:
        """The device of the pages."""
        return self.tensor.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream:
        """The stream on which pages on a GPU are digested and copied: beside all forwards, with
        higher priority.
        """
        return torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer in either layout, as views [pages, kv_heads, page_size, head_dim]
        in which a head of a page is contiguous."""
        return [
            (layer[:, :, 0], layer[:, :, 1])
            for group in self.tensor.unbind(1)
            for layer in group.unbind(2)
        ]

    def layer_views(self) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer, as strided views of [pages, page_size, kv_heads, head_dim] or as
        in `kernels.pages`.
        """
        if self.layout.kind == "distinct":
            return [distinct_views(*layer) for layer in self.layers()]
        return [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in self.layers()]

    def byte_rows(self) -> Tensor:
        """The pool's bytes, one page in each row: [pages, page_bytes] uint8, without a copy."""
        return self.tensor.view(self.num_pages, -1).view(torch.uint8)

    def byte_parts(self, groups: range, heads: range) -> Tensor:
        """Bytes of these groups of layers and KV heads of all pages, in the model's numbers,
        without a copy: [pages, groups, heads, head_bytes] uint8."""
        place, part = self.layout.place_of(heads), self.layout.place_of_groups(groups)
        rows = self.byte_rows().view(self.num_pages, *self.layout.page_shape[:2], -1)
        return rows[:, part.start : part.stop, place.start : place.stop]

    def bytes_at(self, page_id: int, count: int = 1) -> memoryview:
        """Writable raw bytes of `count` consecutive pages, without a copy. Host memory only."""
        if self._host is None:
            raise ValueError(f"the host cannot see pages on {self.device}")
        if not 0 <= page_id <= page_id + count <= self.num_pages:
            raise IndexError(f"pages {page_id}..{page_id + count} of a pool of {self.num_pages}")
        start, size = page_id * self.page_bytes, count * self.page_bytes
        return self._host[start : start + size]

    def views(
        self, page_ids: Sequence[int], groups: range, heads: range | None = None
    ) -> list[memoryview]:
        """Raw bytes of these groups of layers of these pages in order, in as few pieces as
        possible, without a copy. Host memory only.

        groups: in the model's numbers. heads: some of the model's KV heads, by default all heads in
        the pool.
        """
        heads = self.layout.heads if heads is None else heads
        if groups == self.layout.groups and len(heads) == len(self.layout.heads):
            return [self.bytes_at(first, count) for first, count in consecutive_runs(page_ids)]
        return list(self._parts(page_ids, groups, heads))

    def write(
        self,
        page_ids: Sequence[int],
        groups: range,
        payload: Sequence[memoryview],
        heads: range | None = None,
    ) -> None:
        """Overwrites these groups of layers of these pages. Host memory only.

        payload: their bytes in order, split only between groups of layers. The sender's pool may
        hold other heads than this one, and contiguous parts of other lengths.
        """
        heads = self.layout.heads if heads is None else heads
        size = gcd(self.layout.runs(groups, heads)[1], *(part.nbytes for part in payload))
        targets = _pieces(self._parts(page_ids, groups, heads), size)
        for target, data in zip(targets, _pieces(payload, size), strict=True):
            target[:] = data

    def _parts(self, page_ids: Sequence[int], groups: range, heads: range) -> Iterator[memoryview]:
        """The contiguous parts of each page, page by page."""
        count, size = self.layout.runs(groups, heads)
        first = self.layout.place_of_groups(groups).start * self.layout.group_bytes
        first += self.layout.place_of(heads).start * self.layout.head_bytes
        starts = [first + group * self.layout.group_bytes for group in range(count)]
        for page_id in page_ids:
            page = self.bytes_at(page_id)
            for start in starts:
                yield page[start : start + size]

    def copy_page(self, source: int, target: int) -> None:
        """Copies a whole page to another one; on a GPU in the order of launches."""
        self.tensor[target].copy_(self.tensor[source])

    def zero_tail(self, page_id: int, num_used: int) -> None:
        """Clears the slots of a page from `num_used` on, so that its bytes are determined; of one
        that ranks hold together, those on this rank."""
        layout = self.layout
        if not 0 <= num_used <= layout.span:
            raise ValueError(f"{num_used} used slots in a page of {layout.span}")
        num_used -= layout.context_rank * layout.page_size
        num_used = min(max(num_used, 0), layout.page_size)
        page = self.tensor[page_id].flatten(0, 2)  # [heads of all layers, 2, page_size, head_dim]
        if self.layout.kind == "distinct":
            zero_distinct_tail(*distinct_views(page[:, None, 0], page[:, None, 1]), num_used)
        else:
            page[:, :, num_used:].zero_()


def _pieces(parts: Iterable[memoryview], size: int) -> Iterator[memoryview]:
    return (part[at : at + size] for part in parts for at in range(0, part.nbytes, size))


def consecutive_runs(page_ids: Sequence[int]) -> list[tuple[int, int]]:
    """The ids as (first, count) of maximal ascending runs, in order."""
    runs: list[tuple[int, int]] = []
    for page_id in page_ids:
        if runs and sum(runs[-1]) == page_id:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page_id, 1))
    return runs


def bytes_of(tensor: Tensor) -> memoryview:
    """Writable bytes of a contiguous host tensor; the view keeps its memory alive."""
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view


def huge_pages(num_bytes: int, descriptor: int = -1) -> mmap.mmap:
    """Zeroed private memory, at least one byte, in huge pages if the kernel has any. With an empty
    file's descriptor it is the file's, which other processes may map.

    With huge pages a handoff over NIXL takes 0.75 of the time, one over ZMQ 0.85. Raises OSError if
    the machine does not have that much memory.
    """
    if descriptor < 0:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        os.ftruncate(descriptor, num_bytes)
        memory = mmap.mmap(descriptor, num_bytes)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
