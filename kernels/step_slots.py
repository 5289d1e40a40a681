"""The decode state of every request on the device: one row of int32 for each slot.

A row holds counters, settings, the blocks in flight (a ring by their place on the block grid), stop
ids and the page list, so that one copy adds a request. `plan_step` and `advance` interpret the
numbers; the decode worker decides which request gets a slot.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Status(IntEnum):
    """The state of a slot's request."""

    EMPTY = 0
    RUNNING = 1
    STOPPED = 2  # ended by a stop id
    ENDED = 3  # ended by its length
    FAILED = 4  # the model gave no finite candidates


class Column(IntEnum):
    """First columns of a row; the first seven change on the device. fp32 is stored as bits."""

    STATUS = 0
    GENERATION = 1  # distinguishes requests of one slot
    START = 2  # first position in flight; all before it is cached
    NUM_BLOCKS = 3  # in flight
    NUM_SETTLED = 4  # the first of them: the coming forward stores their KV
    NUM_MASKS = 5  # in flight
    STOP_SEEN = 6  # a stop id was written
    PROMPT_LEN = 7
    ORIGIN = 8
    ANSWER_END = 9
    LAST_BLOCK_END = 10
    ALGORITHM = 11  # 0 D2F, 1 block diffusion
    REMASKING = 12  # 0 dynamic, 1 static, 2 sequential, 3 entropy bounded
    WINDOW = 13
    STEPS = 14
    CONFIDENCE = 15  # fp32
    ADD = 16  # fp32
    FULL = 17  # fp32
    TEMPERATURE = 18  # fp32
    TOP_P = 19  # fp32
    TOP_K = 20
    SEED_LOW = 21
    SEED_HIGH = 22
    ANSWER_INDEX = 23
    SCORE = 24
    ENTROPY = 25  # fp32


class BlockColumn(IntEnum):
    """The state of each block in flight."""

    BIRTH = 0  # masks at its beginning
    LEFT = 1  # masks left
    FULL = 2
    COUNT = 3  # forwards that have denoised it


class RecordColumn(IntEnum):
    """First columns of a slot's result: the state after the step, then the step's actions."""

    STATUS = 0
    GENERATION = 1
    START = 2
    NUM_BLOCKS = 3
    NUM_SETTLED = 4
    NUM_MASKS = 5
    STOP_SEEN = 6
    STEPPED = 7  # it took part
    NUM_WRITTEN = 8
    NUM_SEMI_WRITES = 9  # in blocks that were not full


class Control(IntEnum):
    """Entries of the step's control vector [4] int32."""

    FIRST_SLOT = 0  # the slot that is packed first
    NEXT_FIRST_SLOT = 1
    MASK_LIMIT = 2  # candidates that fit this step


NUM_COLUMNS = 32
NUM_RECORD_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Sizes of a table and the offsets of its parts within a row of `width` int32."""

    num_slots: int
    block_size: int
    max_window: int
    max_stops: int
    max_pages: int

    @property
    def ring(self) -> int:
        """Blocks for which a row has room: a power of two above the window.

        A whole window may be settled while one block is denoised and the next is appended.
        """
        return 1 << (self.max_window + 1).bit_length()

    @property
    def tokens_at(self) -> int:
        return NUM_COLUMNS + len(BlockColumn) * self.ring

    @property
    def masked_at(self) -> int:
        return self.tokens_at + self.ring * self.block_size

    @property
    def stops_at(self) -> int:
        return self.masked_at + self.ring * self.block_size

    @property
    def storable_at(self) -> int:
        """Number of tokens that the following page list covers."""
        return self.stops_at + self.max_stops

    @property
    def pages_at(self) -> int:
        return self.storable_at + 1

    @property
    def width(self) -> int:
        return -(-(self.pages_at + self.max_pages) // 16) * 16

    @property
    def record_width(self) -> int:
        """Columns; full, count and writes of each block; then its tokens, -1 for a mask.

        Blocks are in order, beginning with the one at START.
        """
        return NUM_RECORD_COLUMNS + (3 + self.block_size) * self.ring


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The rows [num_slots, width] int32, and views of their parts."""

    layout: SlotLayout
    rows: Tensor

    @classmethod
    def empty(cls, layout: SlotLayout, device: torch.device) -> "SlotTable":
        """A table without requests."""
        shape = (layout.num_slots, layout.width)
        return cls(layout, torch.zeros(shape, dtype=torch.int32, device=device))

    def column(self, column: Column) -> Tensor:
        """[S]"""
        return self.rows[:, column]

    def real(self, column: Column) -> Tensor:
        """[S] fp32 view of a column that holds bits."""
        return self.rows[:, column].view(torch.float32)

    def blocks(self, column: BlockColumn) -> Tensor:
        """[S, ring]"""
        begin = NUM_COLUMNS + column * self.layout.ring
        return self.rows[:, begin : begin + self.layout.ring]

    @property
    def tokens(self) -> Tensor:
        """[S, ring, block_size]"""
        return self._cells(self.layout.tokens_at)

    @property
    def masked(self) -> Tensor:
        """[S, ring, block_size], 1 for a mask"""
        return self._cells(self.layout.masked_at)

    @property
    def stops(self) -> Tensor:
        """[S, max_stops], -1 where unused"""
        return self.rows[:, self.layout.stops_at : self.layout.storable_at]

    @property
    def storable(self) -> Tensor:
        """[S]"""
        return self.rows[:, self.layout.storable_at]

    @property
    def pages(self) -> Tensor:
        """[S, max_pages]"""
        begin = self.layout.pages_at
        return self.rows[:, begin : begin + self.layout.max_pages]

    def _cells(self, begin: int) -> Tensor:
        ring, size = self.layout.ring, self.layout.block_size
        return self.rows[:, begin : begin + ring * size].view(-1, ring, size)
