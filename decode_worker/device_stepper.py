"""Launches device steps ahead of the host: graphs by bucket, and records through pinned memory.

It owns everything that crosses between host and device: rows of joining requests, limits, records,
and the events after which those may be read. `device_slots.py` chooses requests and interprets
records.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from effuse.decode_worker.device_buckets import (
    TILE_ROWS,
    Beginnings,
    Forecast,
    Integers,
    Need,
    bucket,
    context_class,
    context_classes,
)
from effuse.decode_worker.device_step import DeviceStep
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.kernels.pages import Place, place_on_cuda
from effuse.kernels.step_slots import Column, SlotLayout, Status
from effuse.models.progress import progress_log
from effuse.models.transformer import LayerKV, Transformer
from effuse.worker.rank_messages import GrowSlot, JoinSlot, LaunchStep, LeaveSlot, Slots
from effuse.worker.ranks import Ranks

_ROWS_THAT_SPLIT = 512
_ROWS_THAT_SHARE = 1024  # at most; for each bucket up to this there is another graph
_COPIES = 8  # host copies of records that may be in use at a time
_STAGED = 256  # the same for rows and pages: as many requests may join while one step runs


class RowSizes(NamedTuple):
    """The buckets of a step's rows and of their context, and whether prefixes are shared."""

    rows: int
    context: int
    shares: bool = False


class CandidateSizes(NamedTuple):
    """The bucket of a step's candidates, and whether any may have a top-p or top-k."""

    candidates: int
    filters: bool


Sizes = RowSizes | CandidateSizes


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched step: its records, which are being copied to the host, and when they are there."""

    records: Tensor  # [S, record_width], of replicas [N, S, record_width]
    done: Place | None

    def has_ended(self) -> bool:
        """Whether its records can be read without waiting."""
        return self.done is None or self.done.query()

    def read(self) -> Integers:
        """Its records; waits for them."""
        if self.done is not None:
            self.done.synchronize()
        records: Integers = self.records.numpy()
        return records


def make_stepper(
    model: Transformer, kv: Sequence[LayerKV], limits: DecodeLimits, *, ranks: Ranks | None = None
) -> "DeviceStepper":
    """A stepper with a slot for every request that may hold pages, with captured graphs."""
    layout = SlotLayout(
        limits.max_num_seqs,
        limits.block_size,
        max_window=limits.max_window,
        max_stops=limits.max_stop_ids,
        max_pages=limits.pages_for(limits.max_model_len),
    )
    num_rows = bucket(limits.max_num_batched_tokens)
    step = DeviceStep(model, kv, layout, num_rows, page_size=limits.page_size)
    stepper = DeviceStepper(step, ranks=ranks)
    counts = range(1, limits.max_num_batched_tokens + 1)
    stepper.prepare(counts, counts, range(limits.max_model_len + 1))
    return stepper


class DeviceStepper:
    """Steps over all slots. `launch` then `read`, at most `_COPIES` steps apart.

    In a group the leader's stepper sends its commands to `ranks`, whose steppers `execute` them.
    """

    def __init__(self, step: DeviceStep, *, ranks: Ranks | None = None) -> None:
        self.step = step
        self.layout = step.layout
        self._ranks = ranks
        self._on_cuda = step.model.device.type == "cuda"
        self._forecast = Forecast(self.layout)
        self._beginnings = _beginnings(step)
        replicas = step.model.replicas
        of_all = () if replicas is None else (replicas.size,)
        shape = (_COPIES, *of_all, *step.records.shape)
        self._copies = torch.zeros(shape, dtype=torch.int32, pin_memory=self._on_cuda)
        shape = (_STAGED, max(self.layout.width, self.layout.sharing_width))
        self._staged = torch.zeros(shape, dtype=torch.int32, pin_memory=self._on_cuda)
        self._staged_done: deque[Place] = deque()
        self._num_staged = 0
        self._num_launched = 0
        self.num_sharing = 0  # steps that shared beginnings
        self._launched: deque[Launched] = deque()
        self._limit = 0
        self._graphs: dict[Sizes, torch.cuda.CUDAGraph] = {}  # by bucket
        self._pool = torch.cuda.graph_pool_handle() if self._on_cuda else None

    @property
    def num_ahead(self) -> int:
        """Steps that were launched but not read."""
        return len(self._launched)

    @property
    def is_full(self) -> bool:
        """Whether a step must be read before the next launch."""
        return self.num_ahead > 1

    @torch.inference_mode()
    def join(self, slot: int, row: Integers, boundary: Tensor | None = None) -> None:
        """Puts a request into a free slot; `row` is made by `slot_row`."""
        if self._ranks is not None:
            self._ranks.send(JoinSlot(slot, row.tobytes(), boundary is not None))
        self._put(self.step.table.rows[slot], row)
        if boundary is not None:
            self.step.boundary[slot].copy_(boundary, non_blocking=True)
            self._share_boundary(slot)
        self._forecast.join(slot, row)
        if self._beginnings is not None:
            self._beginnings.join(slot, row)

    @torch.inference_mode()
    def leave(self, slot: int) -> None:
        """Removes a request; records of earlier launched steps are stale."""
        if self._ranks is not None:
            self._ranks.send(LeaveSlot(slot))
        self.step.table.rows[slot, Column.STATUS].fill_(Status.EMPTY)
        self._forecast.leave(slot)
        if self._beginnings is not None:
            self._beginnings.leave(slot)

    @torch.inference_mode()
    def grow(self, slot: int, first: int, pages: Integers, storable: int) -> None:
        """Appends pages after the `first` ones of a slot, which then cover `storable` tokens."""
        if self._ranks is not None:
            self._ranks.send(GrowSlot(slot, first, pages.tobytes(), storable))
        table = self.step.table
        self._put(table.pages[slot, first : first + len(pages)], pages)
        table.storable[slot].fill_(storable)

    @torch.inference_mode()
    def launch(self) -> None:
        """Enqueues the next step; never waits for the device."""
        self._launched.append(self.enqueue(self._forecast.need(), self._ranks))
        self._forecast.launched()

    @torch.inference_mode()
    def enqueue(self, need: Need, ranks: Ranks | None) -> Launched:
        """Enqueues a step for this need, on the other ranks as well; never waits for the device."""
        step = self._sized(need)
        if ranks is not None:
            ranks.send(step)
        try:
            records = self._run(step)
        except Exception as error:
            if ranks is not None:
                ranks.failed(error)
            raise
        copy = self._copies[self._num_launched % _COPIES]
        copy.copy_(records, non_blocking=True)
        done = place_on_cuda() if self._on_cuda else None
        self._num_launched += 1
        self.num_sharing += step.shares
        return Launched(copy, done)

    @torch.inference_mode()
    def execute(self, command: Slots) -> None:
        """Does what the leader of the group has done; no record of it is read here."""
        match command:
            case JoinSlot(slot=slot, row=row, has_boundary=has_boundary):
                self.join(slot, _integers(row))
                if has_boundary:
                    self._share_boundary(slot)
            case LeaveSlot(slot=slot):
                self.leave(slot)
            case GrowSlot(slot=slot, first=first, pages=pages, storable=storable):
                self.grow(slot, first, _integers(pages), storable)
            case LaunchStep():
                self._run(command)

    def _share_boundary(self, slot: int) -> None:
        self.step.model.group.share(self.step.boundary[slot])

    def has_ended(self) -> bool:
        """Whether the oldest launched step has ended, so that `read` does not wait."""
        return self._launched[0].has_ended()

    def read(self) -> Integers:
        """Records [S, record_width] of the oldest launched step; waits only for that step.

        The eighth launch after it overwrites them.
        """
        if self._ranks is not None:
            self._ranks.confirm()
        records = self._launched.popleft().read()
        self._forecast.read(records, is_last=not self._launched)
        return records

    @torch.inference_mode()
    def prepare(self, rows: range, candidates: range, contexts: range) -> None:
        """Captures the graphs of all buckets for these counts, in the form that launches need.

        A graph that was not prepared is captured by the first launch that needs it.
        """
        if not self._on_cuda:
            return
        classes = context_classes(contexts)
        buckets: list[Sizes] = [
            RowSizes(count, bound)
            for count in sorted({self._row_bucket(count) for count in rows}, reverse=True)
            for bound in {self._context_class(count, each) for each in classes}
        ]
        if self._beginnings is not None:
            shared = {self._row_bucket(count) for count in rows if count <= _ROWS_THAT_SHARE}
            buckets += [
                RowSizes(count, self._whole_context(), True)
                for count in sorted(shared, reverse=True)
            ]
        draws_shares = self.step.model.draws_shares(filters=False)
        buckets += [
            CandidateSizes(count, filters)
            for count in sorted({bucket(n) for n in candidates}, reverse=True)
            for filters in ((False, True) if draws_shares else (True,))
        ]
        with progress_log("graphs of steps", len(buckets)) as add_progress:
            for one in buckets:
                self._graph(one)
                add_progress(1)

    def _row_bucket(self, count: int) -> int:
        return min(bucket(count), self.step.rows.token_ids.shape[0])

    def _sized(self, need: Need) -> LaunchStep:
        rows = self._row_bucket(max(need.rows, need.least_rows, 1))
        wanted = min(max(need.candidates, need.least_candidates, 1), rows)
        pays_off = self._beginnings is not None and self._beginnings.pay_off
        shares = pays_off and rows <= _ROWS_THAT_SHARE
        context = self._whole_context() if shares else self._context_class(rows, need.context)
        return LaunchStep(rows, min(bucket(wanted), rows), context, need.filters, shares)

    def _context_class(self, rows: int, context: int) -> int:
        """Only small launches split the cache, so larger ones have a single class."""
        whole = self._whole_context()
        return context_class(min(context, whole)) if rows < _ROWS_THAT_SPLIT else whole

    def _whole_context(self) -> int:
        return context_class(self.layout.max_pages * self.step.page_size)

    def _run(self, step: LaunchStep) -> Tensor:
        """Enqueues a step; its records."""
        self._share()
        filters = not self.step.model.draws_shares(filters=step.filters)
        if not self._on_cuda:
            self._set_limit(step.candidates)
            self.step.run_rows(step.rows, step.context, step.shares)
            self.step.run_candidates(step.candidates, filters)
        else:
            row_graph = self._graph(RowSizes(step.rows, step.context, step.shares))
            candidate_graph = self._graph(CandidateSizes(step.candidates, filters))
            self._set_limit(step.candidates)
            row_graph.replay()
            candidate_graph.replay()
        return self.step.all_records()

    def _set_limit(self, candidates: int) -> None:
        if candidates != self._limit:
            self.step.limit_candidates(candidates)
            self._limit = candidates

    def _graph(self, sizes: Sizes) -> torch.cuda.CUDAGraph:
        found = self._graphs.get(sizes)
        if found is None:
            is_of_rows = isinstance(sizes, RowSizes)
            run = self.step.run_rows if is_of_rows else self.step.run_candidates
            found = self._graphs[sizes] = self._capture(partial(run, *sizes))
        return found

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Runs once without any slot, so that all kernels are loaded, then captures."""
        self._set_limit(-1)
        self.step.rows.first_candidate.fill_(-1)
        self.step.rows.kept_rows.fill_(-1)
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The connector's thread may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self.step.model.hold(graph)
        return graph

    def _share(self) -> None:
        """The device learns which beginnings slots have in common now."""
        found = None if self._beginnings is None else self._beginnings.changed()
        if found is not None:
            self._put(self.step.table.sharing, found)

    def _put(self, target: Tensor, values: Integers) -> None:
        """Copies `values` to the device; waits only if all pinned copies are in use."""
        if not self._on_cuda:
            target.copy_(torch.from_numpy(values))
            return
        if len(self._staged_done) == _STAGED:
            self._staged_done.popleft().synchronize()
        staged = self._staged[self._num_staged % _STAGED, : len(values)]
        staged.numpy()[:] = values
        target.copy_(staged, non_blocking=True)
        self._staged_done.append(place_on_cuda())
        self._num_staged += 1


def _beginnings(step: DeviceStep) -> Beginnings | None:
    """None if attention cannot share, or if a block fills more than half a tile. Replicas choose
    slots without those of the others."""
    model, shard = step.model, step.model.shard
    groups = len(shard.queries) // len(shard.kv_heads)
    is_wide = 2 * step.layout.block_size * groups > TILE_ROWS
    if is_wide or not model.can_share or model.replicas is not None:
        return None
    return Beginnings(step.layout, step.page_size, groups, len(shard.kv_heads))


def _integers(data: bytes) -> Integers:
    return np.frombuffer(data, dtype=np.int32).copy()
