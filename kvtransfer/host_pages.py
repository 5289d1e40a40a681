"""Room in host memory for pages of a pool, and copies between both.

Copies of a GPU run on a stream of their own, after all work that was launched before them. Bytes
that arrive are digested in the pool's pages, so wrong ones are found wherever they came from.
"""

import os
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from effuse.kvtransfer.digest import DigestJob, digester_of
from effuse.kvtransfer.layout import PageMemory, bytes_of, huge_pages

_SEED = 0  # digests are compared with those of earlier processes


class HostPages:
    """`num_slots` slots of a page each. Pinned if the pool is on a GPU. Other processes can map
    shared ones by their `descriptor`.

    Ranks that share them have a part each, with the slots of their own heads, so that a copy from
    or to a GPU is one piece. Of ranks with the same heads only the first one writes.
    """

    def __init__(
        self,
        memory: PageMemory,
        num_slots: int,
        *,
        is_shared: bool = False,
        descriptor: int | None = None,
    ) -> None:
        """`descriptor`: of shared memory that is empty or already has this size. Raises OSError if
        the machine does not have that much memory, or cannot pin it."""
        self.layout = layout = memory.layout
        self.is_shared = is_shared
        self.descriptor = -1
        if is_shared:
            mine = os.memfd_create("effuse-units") if descriptor is None else os.dup(descriptor)
            self.descriptor = mine
            weakref.finalize(self, os.close, self.descriptor)
        self._num_parts, part = 1, 0
        if is_shared:
            self._num_parts = layout.num_kv_heads // len(layout.heads)
            part = layout.heads.start // len(layout.heads)
        self.num_slots = num_slots
        self.page_bytes = memory.page_bytes * self._num_parts
        self._memory = memory
        slots = torch.frombuffer(
            huge_pages(num_slots * self.page_bytes, self.descriptor), dtype=torch.uint8
        )
        self._bytes = bytes_of(slots)
        flat = slots.view(self._num_parts, -1)[part]
        self._slots = flat.view(num_slots, memory.page_bytes)
        self._rows = memory.byte_rows()
        self._stream: torch.cuda.Stream | None = None
        if memory.device.type == "cuda":
            _pin(flat)
            # The addresses may be those of later memory, which could not be pinned.
            unpin = torch.cuda.cudart().cudaHostUnregister  # type: ignore[no-untyped-call]
            weakref.finalize(self, unpin, flat.data_ptr()).atexit = False
            self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        self._digester = digester_of(memory, self._stream)

    def save(self, page_ids: Sequence[int], slots: Sequence[int]) -> DigestJob:
        """Starts to copy pages to slots. The job has a row of digests for each page; once it is
        done, nothing reads the pages.
        """
        if not (self.is_shared and self.layout.copy):
            self._copy(self._rows, page_ids, self._slots, slots)
        return self._digests(page_ids)

    def load(self, slots: Sequence[int], page_ids: Sequence[int]) -> DigestJob:
        """Starts to copy slots to pages; the job is as in `save`, of the pages' new bytes."""
        self._copy(self._slots, slots, self._rows, page_ids)
        return self._digests(page_ids)

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """Writable bytes of these slots, without a copy: whole pages of all heads in the order of
        one rank's, whatever the number of ranks."""
        page_bytes = self._memory.page_bytes
        num_runs = len(self.layout.groups) if self._num_parts > 1 else 1
        size, part = page_bytes // num_runs, self.num_slots * page_bytes
        return [
            self._bytes[at : at + size]
            for slot in slots
            for run in range(slot * page_bytes, (slot + 1) * page_bytes, size)
            for at in range(run, run + part * self._num_parts, part)
        ]

    def _copy(
        self, rows: Tensor, sources: Sequence[int], into: Tensor, targets: Sequence[int]
    ) -> None:
        if self._stream is not None:
            # Launched forwards may still write these pages, or read their earlier bytes.
            self._stream.wait_stream(torch.cuda.current_stream(self._memory.device))
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for source, target, count in _runs(sources, targets):
                part = rows[source : source + count]
                into[target : target + count].copy_(part, non_blocking=True)

    def _digests(self, page_ids: Sequence[int]) -> DigestJob:
        return self._digester.begin(page_ids, self.layout.groups, _SEED)


def _runs(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """Pairs as (source, target, count): runs of consecutive ids on both sides."""
    runs: list[tuple[int, int, int]] = []
    for source, target in zip(sources, targets, strict=True):
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (source, target):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs


def _pin(memory: Tensor) -> None:
    """Registers memory with CUDA as it is: an allocator would round its size up to twice of it."""
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(status):
        raise OSError(f"CUDA could not pin {memory.nbytes} bytes of host memory: status {status}")
