"""Pinned buffers between a GPU's pages and the host, on the pool's stream for transfers.

Copies run beside all computing. A buffer is one chunk on its way; with several of them a link is
filled while the next chunk is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effuse.kvtransfer.memory import PageMemory, bytes_of

NUM_BUFFERS = 8


@dataclass(slots=True, eq=False)
class Fetched:
    """Bytes of pages on their way to the host."""

    buffer: Tensor  # uint8, pinned
    num_bytes: int
    done: torch.cuda.Event
    home: deque[Tensor]

    def is_over(self) -> bool:
        """Whether they have arrived: `view` may be read, the pages are not any more."""
        return _has_ended(self.done)

    @property
    def view(self) -> memoryview:
        """The bytes, page by page."""
        return bytes_of(self.buffer)[: self.num_bytes]

    def release(self) -> None:
        """Nobody reads the buffer any more."""
        self.home.append(self.buffer)


class Staging:
    """Buffers of `buffer_bytes` each for one pool."""

    def __init__(self, memory: PageMemory, buffer_bytes: int) -> None:
        self._layout = memory.layout
        self._stream = memory.stream
        self._rows = memory.byte_rows()
        self._free: deque[Tensor] = deque(
            torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True)
            for _ in range(NUM_BUFFERS)
        )
        self._storing: deque[tuple[torch.cuda.Event, Tensor]] = deque()  # oldest first

    def fetch(self, page_ids: Sequence[int], groups: range) -> Fetched | None:
        """Begins to copy groups of layers of pages to the host; None while no buffer is free."""
        if not self._free:
            return None
        buffer = self._free.popleft()
        slices = self._slices(page_ids, groups, buffer)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for row, part in slices:
                part.copy_(row, non_blocking=True)
        num_bytes = sum(len(part) for _, part in slices)
        return Fetched(buffer, num_bytes, self._mark(), self._free)

    def store(self, page_ids: Sequence[int], groups: range, payload: Sequence[memoryview]) -> None:
        """Begins to copy bytes of the host into groups of layers of pages.

        The payload may be reused at once. Waits for an earlier copy where no buffer is free.
        """
        buffer = self._buffer()
        at = 0
        for data in payload:
            bytes_of(buffer)[at : at + data.nbytes] = data
            at += data.nbytes
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for row, part in self._slices(page_ids, groups, buffer):
                row.copy_(part, non_blocking=True)
        self._storing.append((self._mark(), buffer))

    def _buffer(self) -> Tensor:
        while self._storing and (_has_ended(self._storing[0][0]) or not self._free):
            done, buffer = self._storing.popleft()
            done.synchronize()
            self._free.append(buffer)
        return self._free.popleft()

    def _slices(
        self, page_ids: Sequence[int], groups: range, buffer: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Bytes of each page's groups, and where they are in the buffer."""
        begin, size = (
            groups.start * self._layout.group_bytes,
            len(groups) * self._layout.group_bytes,
        )
        return [
            (self._rows[page_id, begin : begin + size], buffer[index * size : (index + 1) * size])
            for index, page_id in enumerate(page_ids)
        ]

    def _mark(self) -> torch.cuda.Event:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return done


def _has_ended(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
