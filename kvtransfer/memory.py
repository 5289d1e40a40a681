"""The pool's tensor, page-major: one page holds all layers, K and V, and is contiguous.

Views and bytes of pages, nothing about who holds them (pool.py). Digests are digest.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from effuse.kernels.distinct_pages import distinct_views, zero_distinct_tail
from effuse.kvtransfer.huge_pages import huge_pages
from effuse.kvtransfer.layout import KVLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PageMemory:
    """`num_pages` pages of KV in one tensor [pages, layers, 2, kv_heads, page_size, head_dim]."""

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
        self._host = _bytes_of(self.tensor) if self.tensor.device.type == "cpu" else None

    @property
    def address(self) -> int:
        """Address of page 0 on its device."""
        return self.tensor.data_ptr()

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.tensor.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    def layer_views(self) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer, as strided views of [pages, page_size, kv_heads, head_dim] or as
        `kernels.distinct_pages` describes them."""
        if self.layout.kind == "distinct":
            return [distinct_views(layer[:, 0], layer[:, 1]) for layer in self.tensor.unbind(1)]
        return [
            (layer[:, 0].transpose(1, 2), layer[:, 1].transpose(1, 2))
            for layer in self.tensor.unbind(1)
        ]

    def page_bytes_view(self, page_id: int, count: int = 1) -> memoryview:
        """Writable raw bytes of `count` consecutive pages, without a copy. Host memory only."""
        if self._host is None:
            raise ValueError(f"pages on {self.device} have no view on the host; use read_pages")
        start = self._offset(page_id, count)
        return self._host[start : start + count * self.page_bytes]

    def read_pages(self, page_id: int, count: int = 1) -> memoryview:
        """Raw bytes of `count` consecutive pages: a view on the host, a copy from a device."""
        if self._host is not None:
            return self.page_bytes_view(page_id, count)
        self._offset(page_id, count)
        return _bytes_of(self.tensor[page_id : page_id + count].cpu())

    def write_pages(self, page_id: int, data: memoryview) -> None:
        """Overwrites whole consecutive pages, starting at `page_id`, with raw bytes."""
        count, rest = divmod(data.nbytes, self.page_bytes)
        if rest:
            raise ValueError(f"{data.nbytes} bytes are not whole pages of {self.page_bytes}")
        if self._host is not None:
            self.page_bytes_view(page_id, count)[:] = data
            return
        self._offset(page_id, count)
        staged = torch.frombuffer(bytearray(data), dtype=self.tensor.dtype)
        self.tensor[page_id : page_id + count] = staged.view(count, *self.layout.page_shape)

    def zero_tail(self, page_id: int, num_used: int) -> None:
        """Zeroes the slots of a page from `num_used` on, so that its bytes are determined."""
        if not 0 <= num_used <= self.layout.page_size:
            raise ValueError(f"{num_used} used slots in a page of {self.layout.page_size}")
        page = self.tensor[page_id]
        if self.layout.kind == "distinct":
            zero_distinct_tail(*distinct_views(page[:, 0], page[:, 1]), num_used)
        else:
            page[:, :, :, num_used:].zero_()

    def synchronize(self) -> None:
        """Returns once everything queued on the device has written its KV."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _offset(self, page_id: int, count: int) -> int:
        if not 0 <= page_id <= page_id + count <= self.num_pages:
            raise IndexError(f"pages {page_id}..{page_id + count} of a pool of {self.num_pages}")
        return page_id * self.page_bytes


def consecutive_runs(page_ids: Sequence[int]) -> list[tuple[int, int]]:
    """The ids as (first, count) of maximal ascending runs, in order."""
    runs: list[tuple[int, int]] = []
    for page_id in page_ids:
        if runs and sum(runs[-1]) == page_id:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page_id, 1))
    return runs


def _bytes_of(tensor: Tensor) -> memoryview:
    """Writable bytes of a contiguous host tensor; the view keeps its memory alive."""
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view
