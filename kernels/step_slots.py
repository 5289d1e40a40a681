"""The decode state of every request on the device, one row of int32 for each slot, and the rows
of a step.

A row holds counters, settings, the blocks in flight (a ring by their place on the block grid), stop
ids and the page list, so that one copy adds a request. `step_plan_triton` lays out a step's rows
from them, and `step_advance_triton` applies its candidates; the decode worker gives slots to
requests.

A step needs hidden rows of its candidates and, for models that shift their logits, of each slot's
last stored position. The latter is kept as the slot's boundary, from which the first position in
flight is predicted.
"""

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from effuse.kernels.attention_batch import AttentionBatch
from effuse.kernels.values import RowSampling


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
    ALGORITHM = 11  # the number of its program: 0 has a window of blocks, 1 fills one block
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
    """The columns of a slot's result after the first seven, which are those of its row."""

    STEPPED = 7  # it took part
    NUM_WRITTEN = 8


class Control(IntEnum):
    """Entries of the step's control vector [4] int32."""

    FIRST_SLOT = 0  # with which the step begins, wherever it is in packed order
    NEXT_FIRST_SLOT = 1
    MASK_LIMIT = 2  # candidates that fit this step


NUM_COLUMNS = 32
NUM_RECORD_COLUMNS = 16
MOST_SHARED = 8  # beginnings that a step reads once for all of their sequences
# Runs of slots in packed order: one for each beginning, then one of all other slots. A step may
# begin within a run, so that it has each of them twice.
NUM_RUNS = MOST_SHARED + 1


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
    def sharing_width(self) -> int:
        """Of `SlotTable.sharing`: slots in packed order, the run of each; by run, a slot with its
        beginning, and the pages of that."""
        return 2 * self.num_slots + 2 * NUM_RUNS

    @property
    def record_width(self) -> int:
        """Columns; then the tokens of each block, -1 for a mask, in order from the one at START."""
        return NUM_RECORD_COLUMNS + self.block_size * self.ring


class SlotTable:
    """The rows of a layout, for requests that come later, and views of two parts."""

    def __init__(self, layout: SlotLayout, device: torch.device) -> None:
        self.layout = layout
        shape = (layout.num_slots, layout.width)
        self.rows = torch.zeros(shape, dtype=torch.int32, device=device)  # [S, width]
        self.storable = self.rows[:, layout.storable_at]  # [S]
        end = layout.pages_at + layout.max_pages
        self.pages = self.rows[:, layout.pages_at : end]  # [S, max_pages]
        self.sharing = torch.zeros(layout.sharing_width, dtype=torch.int32, device=device)
        self.sharing[: layout.num_slots] = torch.arange(layout.num_slots)


class StepRows:
    """One step's rows, in buffers of T rows and S slots that every step fills again."""

    def __init__(self, layout: SlotLayout, num_rows: int, device: torch.device) -> None:
        """Buffers for up to `num_rows` rows."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        slots, long, real = layout.num_slots, torch.int64, torch.float32
        self.cu_seqlens = zeros(slots + 1)  # [S+1] int32
        self.context_lens = zeros(slots)  # [S] int32
        self.page_table = zeros(slots, layout.max_pages)  # [S, max_pages] int32
        self.block_origins = zeros(slots)  # [S] int32
        # The same of runs, for their beginnings.
        self.shared_cu_seqlens = zeros(2 * NUM_RUNS + 1)
        self.shared_context_lens = zeros(2 * NUM_RUNS)
        self.shared_page_table = zeros(2 * NUM_RUNS, layout.max_pages)
        self._shared_origins = zeros(2 * NUM_RUNS)
        self.first_candidate = zeros(slots)  # [S] int32 by slot, -1 if it takes no part
        # [S] int64 by slot: its last stored row, -1 if it stores none
        self.kept_rows = zeros(slots, dtype=long)
        self.token_ids = zeros(num_rows, dtype=long)  # [T] int64
        self.positions = zeros(num_rows, dtype=long)  # [T] int64
        self.slot_mapping = zeros(num_rows, dtype=long)  # [T] int64, -1 if nothing is stored
        # [T] int64 by candidate: the row that predicts it
        self.hidden_rows = zeros(num_rows, dtype=long)
        # [T] int32 by candidate: the slot whose boundary predicts it; or -1
        self.boundary_slots = zeros(num_rows)
        self.sampling = RowSampling(  # [T] by candidate
            temperature=zeros(num_rows, dtype=real),
            top_p=zeros(num_rows, dtype=real),
            top_k=zeros(num_rows),
            seed=zeros(num_rows, dtype=long),
            answer_index=zeros(num_rows),
            position=zeros(num_rows),
            denoise_count=zeros(num_rows),
            score=zeros(num_rows, dtype=torch.int8),
        )

    def attention(
        self, layout: SlotLayout, num_rows: int, *, page_size: int, max_context: int, shares: bool
    ) -> AttentionBatch:
        """The batch over these buffers for a bucket of `num_rows`; no slot has fewer rows than a
        block.

        `max_context` bounds the cached tokens of every slot that takes part. With `shares` the
        beginnings of runs are apart.
        """
        num_seqs = sequences_in(layout, num_rows)
        whole = AttentionBatch(
            cu_seqlens=self.cu_seqlens[: num_seqs + 1],
            context_lens=self.context_lens[:num_seqs],
            page_table=self.page_table[:num_seqs],
            block_origins=self.block_origins[:num_seqs],
            block_size=layout.block_size,
            page_size=page_size,
            max_seqlen=min(num_rows, layout.ring * layout.block_size),
            max_context=max_context,
            gather=None,
        )
        if not shares:
            return whole
        shared = replace(
            whole,
            cu_seqlens=self.shared_cu_seqlens,
            context_lens=self.shared_context_lens,
            page_table=self.shared_page_table,
            block_origins=self._shared_origins,
            max_seqlen=num_rows,
        )
        return replace(whole, shared=shared)


def sequences_in(layout: SlotLayout, num_rows: int) -> int:
    """Most slots that a bucket of `num_rows` can hold."""
    return max(1, min(layout.num_slots, num_rows // layout.block_size))
