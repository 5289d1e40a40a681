"""Room in host memory for pages of a pool, and copies between both.

Copies of a GPU run on a stream of their own, behind all work that was launched before them. Bytes
that arrive are digested in the pool's pages, so wrong ones are found wherever they came from.
"""

import os
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from effuse.kvtransfer.digest import DigestJob, digester_of
from effuse.kvtransfer.memory import PageMemory, bytes_of, huge_pages

_SEED = 0  # digests are compared with those of earlier processes


class HostPages:
    """`num_slots` slots of a page each. Pinned if the pool is on a GPU. Other processes can map
    shared ones by their `descriptor`.
    """

    def __init__(self, memory: PageMemory, num_slots: int, *, is_shared: bool = False) -> None:
        """Raises OSError if the machine does not have that much memory, or cannot pin it."""
        self.descriptor = os.memfd_create("effuse-units") if is_shared else -1
        if is_shared:
            weakref.finalize(self, os.close, self.descriptor)
        self.num_slots = num_slots
        self.page_bytes = memory.page_bytes
        self._memory = memory
        slots = huge_pages(num_slots * memory.page_bytes, self.descriptor)
        flat = torch.frombuffer(slots, dtype=torch.uint8)
        self._slots = flat.view(num_slots, memory.page_bytes)
        self._bytes = bytes_of(flat)
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
        self._copy(self._rows, page_ids, self._slots, slots)
        return self._digests(page_ids)

    def load(self, slots: Sequence[int], page_ids: Sequence[int]) -> DigestJob:
        """Starts to copy slots to pages; the job is as in `save`, of the pages' new bytes."""
        self._copy(self._slots, slots, self._rows, page_ids)
        return self._digests(page_ids)

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """Writable bytes of these slots, without a copy."""
        size = self.page_bytes
        return [self._bytes[slot * size : (slot + 1) * size] for slot in slots]

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
        groups = self._memory.layout.groups
        return self._digester.begin(page_ids, groups, _SEED)


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
