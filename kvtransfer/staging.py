"""Pinned buffers between a GPU's pages and the host, on the pool's stream for transfers.

Copies run beside all computing. A buffer has one chunk in transit; several of them fill a link
while the next chunk is copied. Pages are gathered on the GPU first, so that a chunk of any number
of pages is one copy over the bus.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from effuse.kvtransfer.layout import PageMemory, bytes_of

NUM_BUFFERS = 8
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Buffer:
    """Host memory for one chunk, and for the ids of its pages."""

    def __init__(self, num_words: int, most_pages: int, word: torch.dtype) -> None:
        self.words = torch.empty(num_words, dtype=word, pin_memory=True)
        self.data = bytes_of(self.words)
        self._ids = torch.empty(most_pages, dtype=torch.int64, pin_memory=True)

    def ids(self, page_ids: Sequence[int], device: torch.device) -> Tensor:
        """The ids of pages, being copied to a device."""
        ids = self._ids[: len(page_ids)]
        ids.numpy()[:] = page_ids
        return ids.to(device, non_blocking=True)


@dataclass(slots=True, eq=False)
class Fetched:
    """Bytes of pages, being copied to the host."""

    buffer: Buffer
    num_bytes: int
    done: torch.cuda.Event
    home: deque[Buffer]

    def is_over(self) -> bool:
        """Whether they have arrived: `view` may be read, and the pages are not read any more."""
        return _has_ended(self.done)

    @property
    def view(self) -> memoryview:
        """The bytes, page by page."""
        return self.buffer.data[: self.num_bytes]

    def release(self) -> None:
        """The buffer has no reader any more."""
        self.home.append(self.buffer)


class Staging:
    """Buffers of `buffer_bytes` each for one pool."""

    def __init__(self, memory: PageMemory, buffer_bytes: int) -> None:
        head_bytes = memory.layout.head_bytes
        word = next(one for one in _WORDS if head_bytes % one.itemsize == 0)
        head_words = head_bytes // word.itemsize
        self._memory = memory
        self._word = word
        self._stream = memory.stream
        most_words = buffer_bytes // word.itemsize
        # For one chunk at a time, because everything is on one stream.
        self._gathered = torch.empty(most_words, dtype=word, device=memory.device)
        self._free: deque[Buffer] = deque(
            Buffer(most_words, most_words // head_words, word) for _ in range(NUM_BUFFERS)
        )
        self._storing: deque[tuple[torch.cuda.Event, Buffer]] = deque()  # oldest first

    @property
    def num_free(self) -> int:
        """Buffers that `fetch` may take."""
        return len(self._free)

    def fetch(self, page_ids: Sequence[int], groups: range, heads: range) -> Fetched | None:
        """Starts to copy groups of layers and KV heads of pages to the host; None while no buffer
        is free."""
        if not self._free:
            return None
        buffer = self._free.popleft()
        rows, gathered = self._room(page_ids, groups, heads)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            ids = buffer.ids(page_ids, gathered.device)
            torch.index_select(rows, 0, ids, out=gathered)
            buffer.words[: gathered.numel()].copy_(gathered.view(-1), non_blocking=True)
        return Fetched(buffer, gathered.nbytes, self._mark(), self._free)

    def store(
        self,
        page_ids: Sequence[int],
        groups: range,
        payload: Sequence[memoryview],
        heads: range,
    ) -> None:
        """Starts to copy bytes of the host into groups of layers and KV heads of pages.

        The payload may be reused immediately. Waits for an earlier copy if no buffer is free.
        """
        buffer = self._buffer()
        at = 0
        for data in payload:
            buffer.data[at : at + data.nbytes] = data
            at += data.nbytes
        rows, gathered = self._room(page_ids, groups, heads)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            ids = buffer.ids(page_ids, gathered.device)
            gathered.view(-1).copy_(buffer.words[: gathered.numel()], non_blocking=True)
            rows.index_copy_(0, ids, gathered)
        self._storing.append((self._mark(), buffer))

    def _buffer(self) -> Buffer:
        while self._storing and (_has_ended(self._storing[0][0]) or not self._free):
            done, buffer = self._storing.popleft()
            done.synchronize()
            self._free.append(buffer)
        return self._free.popleft()

    def _room(self, page_ids: Sequence[int], groups: range, heads: range) -> tuple[Tensor, Tensor]:
        """The moved parts of all pages, and the destination for gathering those of these pages."""
        layout = self._memory.layout
        rows = self._memory.byte_parts(groups, heads).view(self._word)
        rows = rows.flatten(1) if len(heads) == len(layout.heads) else rows.flatten(2)
        shape = len(page_ids), *rows.shape[1:]
        return rows, self._gathered[: prod(shape)].view(shape)

    def _mark(self) -> torch.cuda.Event:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return done


def _has_ended(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
