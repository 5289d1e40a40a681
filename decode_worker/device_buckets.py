"""How many rows and candidates the coming step may need, predicted one step ahead, and which slots
read a prefix together. Pure numpy.

The host launches a step before it has read the last one's records. With counts that are too small
some slots wait a step, and with counts that are too large work is wasted; neither changes a token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from effuse.kernels.step_slots import (
    MOST_SHARED,
    NUM_COLUMNS,
    NUM_RECORD_COLUMNS,
    NUM_RUNS,
    BlockColumn,
    Column,
    RecordColumn,
    SlotLayout,
    Status,
)

Integers = npt.NDArray[np.int32]

_MEMORY = 0.9  # of the running mean of writes per step
TILE_ROWS = 128  # (query, head in group) that attention computes at once
# A key of one KV head that a tile need not read saves 0.05 ns a layer on an H200. So many pay for
# the second launch. Own keys hide reads of the beginning from the L2 cache, so that so many more
# for each of them must be saved (`benchmarks/gpu_shared.py`).
LEAST_SAVED = 20_000
LEAST_SAVED_EACH = 0.4


def bucket(count: int) -> int:
    """The next captured size: multiples of 32 up to 256, then 64, 128 and 256 wide."""
    for most, width in ((256, 32), (2560, 64), (5120, 128)):
        if count <= most:
            return max(width, -(-count // width) * width)
    return -(-count // 256) * 256


def context_class(num_tokens: int) -> int:
    """Bounds on cached tokens for which attention is captured: 768, then half as much again."""
    bound = 768
    while bound < num_tokens:
        bound = -(-bound * 3 // 2 // 256) * 256
    return bound


def context_classes(contexts: range) -> list[int]:
    """The bounds for all of these numbers of cached tokens, ascending."""
    classes = [context_class(contexts[0])]
    while classes[-1] < contexts[-1]:
        classes.append(context_class(classes[-1] + 1))
    return classes


@dataclass(frozen=True, slots=True)
class Need:
    """Room that one step may need."""

    rows: int
    candidates: int
    context: int  # most cached tokens of a slot
    least_rows: int  # of the largest slot, which would wait for ever with fewer
    least_candidates: int
    filters: bool = False  # whether a slot has a top-p or top-k


class Forecast:
    """Follows the records and predicts the needs of the next step."""

    def __init__(self, layout: SlotLayout) -> None:
        self._layout = layout
        shape = (layout.num_slots, layout.record_width)
        self._state: Integers = np.zeros(shape, dtype=np.int32)  # as last known
        self._masks_left: Integers = np.zeros((layout.num_slots, layout.ring), dtype=np.int32)
        self._has_filters: npt.NDArray[np.bool_] = np.zeros(layout.num_slots, dtype=np.bool_)
        self._ahead: npt.NDArray[np.bool_] = np.zeros(layout.num_slots, dtype=np.bool_)
        self._rows: Integers = np.zeros((layout.num_slots, layout.tokens_at), dtype=np.int32)
        # masks that a block loses in a step, once a record was read
        self._pace: float | None = None

    def join(self, slot: int, row: Integers) -> None:
        """A request begins with this row of the slot table; none of its steps has been launched."""
        layout = self._layout
        self._rows[slot] = row[: layout.tokens_at]
        top_p = row[Column.TOP_P : Column.TOP_P + 1].view(np.float32)
        self._has_filters[slot] = row[Column.TOP_K] > 0 or top_p < 1
        self._state[slot] = 0
        self._state[slot, : RecordColumn.STEPPED] = row[: RecordColumn.STEPPED]
        first = (row[Column.START] - row[Column.ORIGIN]) // layout.block_size
        place = (first + np.arange(layout.ring)) % layout.ring
        blocks = row[NUM_COLUMNS : layout.tokens_at].reshape(len(BlockColumn), layout.ring)
        exists = np.arange(layout.ring) < row[Column.NUM_BLOCKS]
        self._masks_left[slot] = blocks[BlockColumn.LEFT, place] * exists
        self._ahead[slot] = False

    def leave(self, slot: int) -> None:
        self._state[slot, Column.STATUS] = Status.EMPTY

    def launched(self) -> None:
        """A step was launched; the known state is from before it."""
        self._ahead[:] = True

    def read(self, records: Integers, *, is_last: bool) -> None:
        """Takes a step's records; `is_last` if no later step was launched.

        Records of requests that have left their slot are ignored.
        """
        columns = [Column.GENERATION, Column.STATUS]
        known, recorded = self._state[:, columns], records[:, columns]
        valid = (known[:, 0] == recorded[:, 0]) & (known[:, 1] == Status.RUNNING)
        self._state[valid] = records[valid]
        self._masks_left[valid] = self._left(records[valid])
        self._ahead[valid] = not is_last
        stepped = valid & (records[:, RecordColumn.STEPPED] == 1)
        if stepped.any():
            written = records[stepped, RecordColumn.NUM_WRITTEN].sum()
            settled = records[stepped, Column.NUM_SETTLED]
            blocks = (records[stepped, Column.NUM_BLOCKS] - settled).sum()
            pace = float(written) / max(1, int(blocks))
            before = pace if self._pace is None else self._pace
            self._pace = _MEMORY * before + (1 - _MEMORY) * pace

    def need(self) -> Need:
        """The needs of the step after the last launched one."""
        state, size = self._state, self._layout.block_size
        runs = state[:, Column.STATUS] == Status.RUNNING
        # A slot that did not take part may still have to store settled tokens.
        stores = self._ahead & (state[:, RecordColumn.STEPPED] == 1)
        stored = state[:, Column.NUM_SETTLED] * stores
        appended = self._appends() & self._ahead
        blocks = state[:, Column.NUM_BLOCKS] - stored + appended
        blocks = np.where(runs, np.maximum(blocks, 1), 0)
        masks = state[:, Column.NUM_MASKS] + appended * size
        masks = np.where(runs, np.minimum(masks, blocks * size), 0)
        settled = state[:, Column.NUM_SETTLED] * self._ahead
        context = state[:, Column.START] + settled * size
        return Need(
            rows=int(blocks.sum()) * size,
            candidates=int(masks.sum()),
            context=int(np.where(runs, context, 0).max(initial=0)),
            least_rows=int(blocks.max(initial=0)) * size,
            least_candidates=int(masks.max(initial=0)),
            filters=bool((runs & self._has_filters).any()),
        )

    def _appends(self) -> npt.NDArray[np.bool_]:
        """Whether the launched step, at its usual pace, appends a block: the machine's own rule."""
        state, rows, size = self._state, self._rows, self._layout.block_size
        pace = math.ceil(self._pace or 1)
        num_blocks, settled = (state[:, Column.NUM_BLOCKS], state[:, Column.NUM_SETTLED])
        first_left, last_left = self._left_at(settled), self._left_at(num_blocks - 1)
        num_active = num_blocks - settled - (first_left <= pace)
        share = (size - np.maximum(last_left - pace, 0)) / size
        add = rows.view(np.float32)[:, Column.ADD]
        has_room = (rows[:, Column.ALGORITHM] == 0) & (num_active < rows[:, Column.WINDOW])
        end = state[:, Column.START] + num_blocks * size
        has_more = end < rows[:, Column.LAST_BLOCK_END]
        wants = (num_active == 0) | (has_room & (share >= add))
        appends: npt.NDArray[np.bool_] = wants & has_more
        appends &= state[:, Column.STOP_SEEN] == 0
        return appends

    def _left_at(self, index: Integers) -> Integers:
        place = np.clip(index, 0, self._layout.ring - 1)[:, None]
        left: Integers = np.take_along_axis(self._masks_left, place, axis=1)[:, 0]
        return left

    def _left(self, records: Integers) -> Integers:
        shape = -1, self._layout.ring, self._layout.block_size
        tokens = records[:, NUM_RECORD_COLUMNS:].reshape(shape)
        exists = np.arange(self._layout.ring) < records[:, Column.NUM_BLOCKS, None]
        left: Integers = ((tokens == -1).sum(2) * exists).astype(np.int32)
        return left


class Beginning(NamedTuple):
    """Slots whose sequences begin with the same pages."""

    slots: tuple[int, ...]
    num_pages: int
    saved: int  # keys that tiles of one KV head need not read


class _Pages(NamedTuple):
    """The whole cached pages of a slot's sequence when it joined."""

    ids: bytes  # of int32: those that begin alike are neighbours once they are sorted
    slot: int
    rows: int  # (query, head in group) in a step


class _Found(NamedTuple):
    """A beginning of the sorted sequences first .. end - 1."""

    saved: int
    first: int
    end: int
    num_pages: int


class _Run(NamedTuple):
    """Sorted sequences from one on that begin with as many equal pages."""

    num_pages: int
    first: int
    within: list[_Found]  # longer ones of parts of it


class Beginnings:
    """Which slots read a prefix together, so that their rows share attention's tiles."""

    def __init__(self, layout: SlotLayout, page_size: int, groups: int, kv_heads: int) -> None:
        """For `groups` query heads of each of `kv_heads`."""
        self._layout = layout
        self._page_size = page_size
        self._groups = groups
        self._kv_heads = kv_heads
        self._known: dict[int, _Pages] = {}  # by slot
        self._found: list[Beginning] = []
        self._is_stale = False

    @property
    def pay_off(self) -> bool:
        """Whether a step that shares those of the last `changed` is faster."""
        return bool(self._found)

    def join(self, slot: int, row: Integers) -> None:
        """A request is in the slot now; `row` is as in `DeviceStepper.join`."""
        layout = self._layout
        num_pages = int(row[Column.START]) // self._page_size
        ids = row[layout.pages_at : layout.pages_at + num_pages].tobytes()
        blocks = int(row[Column.WINDOW]) if row[Column.ALGORITHM] == 0 else 1
        rows = max(1, blocks) * layout.block_size * self._groups
        self._known[slot] = _Pages(ids, slot, rows)
        self._is_stale = True

    def leave(self, slot: int) -> None:
        self._is_stale |= self._known.pop(slot, None) is not None

    def changed(self) -> Integers | None:
        """`SlotTable.sharing` for the slots that have requests now; None if it is as before."""
        before = self._found
        if self._is_stale:
            found = self._search()
            saved = sum(one.saved for one in found) - LEAST_SAVED_EACH * self._own_keys(found)
            # Slots keep their order for as long as none pays off, so that they wait in turn.
            self._found = found if saved * self._kv_heads >= LEAST_SAVED else []
            self._is_stale = False
        if self._found == before:
            return None
        shared = [slot for one in self._found for slot in one.slots]
        others = sorted(set(range(self._layout.num_slots)) - set(shared))
        runs = [run for run, one in enumerate(self._found) for _ in one.slots]
        none = [0] * (NUM_RUNS - len(self._found))
        columns = (
            [*shared, *others],
            [*runs, *[MOST_SHARED] * len(others)],
            [*(one.slots[0] for one in self._found), *none],
            [*(one.num_pages for one in self._found), *none],
        )
        return np.array([value for column in columns for value in column], dtype=np.int32)

    def _own_keys(self, found: Sequence[Beginning]) -> int:
        """The cached keys of all sequences that are in none of these beginnings."""
        pages = sum(len(one.ids) for one in self._known.values()) // np.int32().nbytes
        shared = sum(len(one.slots) * one.num_pages for one in found)
        return (pages - shared) * self._page_size

    def _search(self) -> list[Beginning]:
        """Those that save the most, out of all runs of sorted sequences that begin alike."""
        members = sorted(self._known.values())
        common = [_common(one.ids, two.ids) for one, two in pairwise(members)]
        rows = [0, *accumulate(one.rows for one in members)]
        tiles = [0, *accumulate(-(-one.rows // TILE_ROWS) for one in members)]
        found: list[_Found] = []
        runs: list[_Run] = []  # that go on, each within the one before
        for end, length in enumerate([*common, 0], 1):
            first = end - 1
            within: list[_Found] = []
            while runs and runs[-1].num_pages > length:
                run = runs.pop()
                first = run.first
                saved = tiles[end] - tiles[first] - -(-(rows[end] - rows[first]) // TILE_ROWS)
                saved *= run.num_pages * self._page_size
                whole = _Found(saved, first, end, run.num_pages)
                within = _better([*run.within, *within], whole)
            if runs and runs[-1].num_pages == length:
                runs[-1].within.extend(within)
            elif length:
                runs.append(_Run(length, first, within))
            else:
                found += within
        slots = tuple(one.slot for one in members)
        return [
            Beginning(slots[one.first : one.end], one.num_pages, one.saved)
            for one in sorted(found)[-MOST_SHARED:]
        ]


def _common(one: bytes, two: bytes) -> int:
    """How many pages two sequences begin with."""
    size = min(len(one), len(two))
    differ = np.frombuffer(one[:size], np.int32) != np.frombuffer(two[:size], np.int32)
    return int(differ.argmax()) if differ.any() else len(differ)


def _better(parts: list[_Found], whole: _Found) -> list[_Found]:
    return parts if sum(one.saved for one in parts) >= whole.saved else [whole]
