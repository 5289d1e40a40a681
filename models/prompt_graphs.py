"""Forwards over short prompts as CUDA graphs, one for each bucket of rows.

The host needs about 8 ms to launch a forward's kernels one by one, which equals 300 rows of a 7B
model, and an engine that also decodes needs that time. Prompts that begin with cached tokens have
separate graphs, if there may be any. Forwards with candidates run without graphs, except in a
pipeline, whose stages have no slots on their devices. Its last stage draws by graphs of their own,
one for each bucket of chosen rows: cuBLAS takes 0.2 ms for each number of rows that is new to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from effuse.kernels.attention_batch import AttentionBatch
from effuse.kernels.pages import LayerMarks
from effuse.kernels.sampling import sample_confidence
from effuse.kernels.values import RowSampling
from effuse.models.packing import Integers, PackedParts, row_sampling, stacked
from effuse.models.part import Part
from effuse.models.progress import progress_log
from effuse.models.transformer import LayerKV, Transformer

MOST_ROWS = 2048
MOST_SEQUENCES = 32  # a single one has separate graphs, because room for more slows attention down
ROWS_APART = 64  # of one bucket and the next
MOST_WANTED = MOST_ROWS + 2 * MOST_SEQUENCES  # candidates, kept boundaries, and a spare row

Outputs = tuple[Tensor, ...]
Captured = tuple[Callable[[], None], Outputs]  # replays a graph, which fills these tensors


class PromptGraphs:
    """Runs forwards of up to MOST_ROWS prompt rows over the paged memory `kv`."""

    def __init__(
        self,
        model: Transformer,
        kv: Sequence[LayerKV],
        *,
        page_size: int,
        block_size: int,
        marks: LayerMarks | None = None,
        max_context: int = 0,
    ) -> None:
        """`max_context`: most cached tokens at the beginning of a prompt."""
        self._model = model
        self._marks = marks
        self._kv = kv
        self._page_size = page_size
        self._block_size = block_size
        self._max_context = max_context
        self._stage = None if model.stage is None else _StageRows.empty(model)
        most_wanted = MOST_SEQUENCES if self._stage is None else MOST_WANTED
        most_pages = max(1, -(-max_context // page_size))
        self._inputs = _Inputs.empty(model.device, most_wanted, most_pages)
        self._drawing: _DrawInputs | None = None
        if model.stage is not None and model.has_head and model.shard.size == 1:
            self._drawing = _DrawInputs.empty(model)
        self._graphs: dict[_Bucket | int, Captured] = {}
        self._pool: Any = None  # memory that all graphs share

    def takes(self, parts: Sequence[Part]) -> bool:
        """Whether these parts can run as one of the graphs."""
        num_rows = sum(len(part.token_ids) for part in parts)
        return (
            len(parts) <= MOST_SEQUENCES
            and 0 < num_rows <= MOST_ROWS
            and not any(part.num_behind for part in parts)
            and (self._stage is not None or not any(len(part.candidates) for part in parts))
            and all(part.start <= self._max_context for part in parts)
        )

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures all graphs; a missing one is captured at its first use."""
        contexts = {0, self._max_context}
        sizes = range(MOST_ROWS, 0, -ROWS_APART)
        drawn = () if self._drawing is None else range(MOST_WANTED, 0, -ROWS_APART)
        total = 2 * len(sizes) * len(contexts) + len(drawn)
        with progress_log("graphs of prompts", total) as add_progress:
            for rows, num_seqs, context in product(sizes, (MOST_SEQUENCES, 1), contexts):
                self._graph(_Bucket(rows, num_seqs, context))
                add_progress(1)
            for wanted in drawn:
                self._draw_graph(wanted)
                add_progress(1)

    def run(self, parts: Sequence[Part], packed: PackedParts) -> tuple[Tensor, Tensor | None]:
        """Hidden rows [candidates + kept boundaries, H], and what was drawn [3, candidates] if a
        graph draws it, both to be read before the next call; stores K and V. A stage before the
        last one passes its rows on, and returns none."""
        num_rows, num_wanted = len(packed.token_ids), len(packed.wanted_rows)
        bucket = _Bucket(
            rows=_rounded(num_rows),
            num_seqs=1 if len(parts) == 1 else MOST_SEQUENCES,
            max_context=self._max_context if any(part.start for part in parts) else 0,
        )
        replay, (hidden,) = self._graph(bucket)
        draws = self._drawing is not None and _are_plain(parts)
        size = _rounded(num_wanted + 1)
        draw = self._draw_graph(size) if draws else None
        self._inputs.fill(parts, packed, bucket.rows)
        if bucket.max_context:
            self._inputs.fill_contexts(parts, self._page_size)
        if self._stage is None:
            replay()
            return hidden[:num_wanted], None
        self._stage.run(replay, num_rows)
        if draw is None or self._drawing is None:
            return self._stage.finish(num_rows, self._inputs.wanted[:num_wanted]), None
        self._drawing.fill(packed, size)
        replay, (hidden, drawn) = draw
        replay()
        return hidden[:num_wanted], drawn[:, : packed.num_candidates]

    def _graph(self, bucket: _Bucket) -> Captured:
        return self._captured(bucket, partial(self._forward, bucket))

    def _draw_graph(self, size: int) -> Captured:
        return self._captured(size, partial(self._draw, size))

    def _captured(self, key: _Bucket | int, run: Callable[[], Outputs]) -> Captured:
        found = self._graphs.get(key)
        if found is None:
            self._inputs.clear()
            if self._drawing is not None:
                self._drawing.copied.zero_()
            found = self._graphs[key] = self._capture(run)
        return found

    def _capture(self, run: Callable[[], Outputs]) -> Captured:
        """Runs once over rows that store nothing, so that all kernels are loaded, then captures."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The connector's thread may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = run()
        self._pool = graph.pool()
        self._model.hold(graph)
        return graph.replay, outputs

    def _draw(self, size: int) -> Outputs:
        """(hidden rows [size, H], tokens, confidences and scores [3, size] fp64) of wanted rows."""
        model, stage, inputs = self._model, self._stage, self._drawing
        assert stage is not None and inputs is not None, "a last stage draws"
        hidden = stage.finish(MOST_ROWS, self._inputs.wanted[:size])
        rows = hidden.index_copy(0, inputs.replaced, inputs.vectors)
        found = sample_confidence(
            model.logits(rows),
            inputs.sampling(size),
            model.config.mask_token_id,
            top_k_first=model.config.top_k_first,
        )
        return hidden, stacked(found)

    def _forward(self, bucket: _Bucket) -> Outputs:
        """Over the first rows of the inputs; rows without a sequence are padding."""
        inputs, rows = self._inputs, bucket.rows
        stored = None if self._marks is None else self._marks.stored
        given = (
            inputs.token_ids[:rows],
            inputs.positions[:rows],
            self._attention(bucket),
            self._kv,
            inputs.slots[:rows],
        )
        if (stage := self._stage) is None:
            wanted = inputs.wanted[: bucket.num_seqs if self._model.config.shift_logits else 0]
            return (self._model.forward(*given, last_rows=wanted, stored=stored),)
        mixed, residual, received = stage.first(rows)
        self._model.forward_unfinished(*given, mixed, residual, stored=stored, received=received)
        return (mixed,)

    def _attention(self, bucket: _Bucket) -> AttentionBatch:
        """The batch over the inputs; rows after the last sequence belong to none."""
        inputs, num_seqs = self._inputs, bucket.num_seqs
        context_lens = inputs.context_lens if bucket.max_context else inputs.nothing
        return AttentionBatch(
            cu_seqlens=inputs.cu_seqlens[: num_seqs + 1],
            context_lens=context_lens[:num_seqs],
            page_table=inputs.page_table[:num_seqs],
            block_origins=inputs.block_origins[:num_seqs],
            block_size=self._block_size,
            page_size=self._page_size,
            max_seqlen=bucket.rows,
            max_context=bucket.max_context,
            gather=None,
        )


@dataclass(frozen=True, slots=True)
class _StageRows:
    """Rows of a pipeline's stage before and after its graphs, at fixed addresses. Exchanges with
    other stages and what depends on the number of candidates run without a graph."""

    model: Transformer
    received: Tensor  # [MOST_ROWS, H]
    mixed: Tensor  # [MOST_ROWS, Q], the last attention's output
    residual: Tensor  # [MOST_ROWS, H]

    @classmethod
    def empty(cls, model: Transformer) -> _StageRows:
        width = model.config.hidden_size
        make = partial(torch.zeros, dtype=model.dtype, device=model.device)
        return cls(model, *(make(MOST_ROWS, size) for size in (width, model.q_dim, width)))

    def first(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.mixed[:num_rows], self.residual[:num_rows], self.received[:num_rows]

    def run(self, replay: Callable[[], None], num_rows: int) -> None:
        """`replay` computes the layers up to the last attention."""
        stage = self.model.stage
        assert stage is not None, "a stage has rows"
        if not stage.is_first:
            stage.receive(self.received[:num_rows])
        replay()

    def finish(self, num_rows: int, wanted: Tensor) -> Tensor:
        """Hidden rows [W, H] of those that are wanted [W]; none if other stages follow."""
        mixed, residual, _ = self.first(num_rows)
        if not self.model.has_head:
            return self.model.pass_on(mixed, residual)
        if not len(wanted):
            return residual[:0]
        return self.model.finish(mixed[wanted], residual[wanted])


@dataclass(frozen=True, slots=True)
class _DrawInputs:
    """Inputs of graphs that draw, at fixed addresses, beside the wanted rows. One copy fills all
    but the vectors."""

    copied: Tensor  # int64: settings, floats in pairs, replaced rows
    integers: Tensor  # [6, MOST_WANTED] int64, as of `PackedParts`
    floats: Tensor  # [2, MOST_WANTED] fp32
    replaced: Tensor  # [MOST_SEQUENCES] int64: rows for which there is a vector, or the spare one
    vectors: Tensor  # [MOST_SEQUENCES, H]

    @classmethod
    def empty(cls, model: Transformer) -> _DrawInputs:
        lengths = [6 * MOST_WANTED, MOST_WANTED, MOST_SEQUENCES]
        copied = torch.zeros(sum(lengths), dtype=torch.int64, device=model.device)
        integers, pairs, replaced = torch.split(copied, lengths)
        size = MOST_SEQUENCES, model.config.hidden_size
        return cls(
            copied=copied,
            integers=integers.view(6, MOST_WANTED),
            floats=pairs.view(torch.float32).view(2, MOST_WANTED),
            replaced=replaced,
            vectors=torch.zeros(size, dtype=model.dtype, device=model.device),
        )

    def sampling(self, size: int) -> RowSampling:
        """Of the first rows."""
        return row_sampling(self.integers[:, :size].unbind(), self.floats[:, :size])

    def fill(self, packed: PackedParts, size: int) -> None:
        """Copies a forward's settings to the device, without waiting for it."""
        staged, count = np.zeros(len(self.copied), np.int64), packed.num_candidates
        staged[: 6 * MOST_WANTED].reshape(6, -1)[:, :count] = packed.sampling_integers
        floats = staged[6 * MOST_WANTED : 7 * MOST_WANTED].view(np.float32).reshape(2, -1)
        floats[1] = 1.0  # unfiltered rows cost least
        floats[:, :count] = packed.sampling_floats
        replaced = staged[7 * MOST_WANTED :]
        replaced[:] = size - 1
        given = packed.boundary_candidates
        replaced[: len(given)] = [row for row, _ in given]
        _bring(staged, self.copied)
        if given:
            vectors = [vector.to(self.vectors, non_blocking=True) for _, vector in given]
            self.vectors[: len(given)].copy_(torch.stack(vectors))


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The capacity of a graph."""

    rows: int
    num_seqs: int
    max_context: int  # cached tokens before each of them; 0 means none


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Inputs of a graph, at fixed addresses. One copy fills a forward's numbers, and another one
    the cached part.
    """

    copied: Tensor  # int64: token ids, positions, slots, wanted rows; then int32 pairs
    token_ids: Tensor  # [MOST_ROWS] int64
    positions: Tensor  # [MOST_ROWS] int64
    slots: Tensor  # [MOST_ROWS] int64
    wanted: Tensor  # [most wanted] int64
    block_origins: Tensor  # [MOST_SEQUENCES] int32
    cu_seqlens: Tensor  # [MOST_SEQUENCES + 1] int32
    nothing: Tensor  # [MOST_SEQUENCES] int32, zeros: cached lengths if nothing is cached
    cached: Tensor  # int32: the next two
    context_lens: Tensor  # [MOST_SEQUENCES] int32
    page_table: Tensor  # [MOST_SEQUENCES, num_pages] int32, of cached tokens

    @classmethod
    def empty(cls, device: torch.device, most_wanted: int, num_pages: int) -> _Inputs:
        lengths = [MOST_ROWS, MOST_ROWS, MOST_ROWS, most_wanted, MOST_SEQUENCES + 1]
        copied = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
        token_ids, positions, slots, wanted, pairs = torch.split(copied, lengths)
        narrow = pairs.view(torch.int32)
        shape = (MOST_SEQUENCES * (1 + num_pages),)
        cached = torch.zeros(shape, dtype=torch.int32, device=device)
        return cls(
            copied=copied,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            wanted=wanted,
            block_origins=narrow[:MOST_SEQUENCES],
            cu_seqlens=narrow[MOST_SEQUENCES : 2 * MOST_SEQUENCES + 1],
            nothing=torch.zeros(MOST_SEQUENCES, dtype=torch.int32, device=device),
            cached=cached,
            context_lens=cached[:MOST_SEQUENCES],
            page_table=cached[MOST_SEQUENCES:].view(MOST_SEQUENCES, num_pages),
        )

    def clear(self) -> None:
        """Clears all sequences and stores."""
        self.copied.zero_()
        self.cached.zero_()
        self.slots.fill_(-1)

    def fill(self, parts: Sequence[Part], packed: PackedParts, bucket: int) -> None:
        """Copies a forward's numbers to the device, without waiting for it."""
        staged = np.zeros(len(self.copied), np.int64)
        count, slots = len(packed.token_ids), staged[2 * MOST_ROWS :]
        staged[:count] = packed.token_ids
        staged[MOST_ROWS : MOST_ROWS + count] = packed.positions
        slots[:count] = packed.slots
        slots[count:bucket] = -1
        wanted = staged[3 * MOST_ROWS :]
        wanted[: len(packed.wanted_rows)] = packed.wanted_rows
        self._fill_sequences(wanted[len(self.wanted) :].view(np.int32), parts)
        _bring(staged, self.copied)

    def fill_contexts(self, parts: Sequence[Part], page_size: int) -> None:
        """The same for the cached tokens before each part; other parts read none."""
        width = self.page_table.shape[1]
        staged = np.zeros(MOST_SEQUENCES + len(parts) * width, np.int32)
        staged[: len(parts)] = [part.start for part in parts]
        table = staged[MOST_SEQUENCES:].reshape(len(parts), width)
        for row, part in zip(table, parts, strict=True):
            num_pages = -(-part.start // page_size)
            row[:num_pages] = part.pages[:num_pages]
        _bring(staged, self.cached[: len(staged)])

    def _fill_sequences(self, narrow: np.ndarray, parts: Sequence[Part]) -> None:
        narrow[: len(parts)] = [part.block_origin for part in parts]
        ends: Integers = np.cumsum([len(part.token_ids) for part in parts])
        cu_seqlens = narrow[MOST_SEQUENCES : 2 * MOST_SEQUENCES + 1]
        cu_seqlens[1:] = ends[-1]
        cu_seqlens[1 : len(parts) + 1] = ends


def _bring(staged: np.ndarray, target: Tensor) -> None:
    source = torch.from_numpy(staged)
    if target.device.type != "cpu":
        source = source.pin_memory()  # PyTorch does not reuse it before the copy has ended
    target.copy_(source, non_blocking=True)


def _rounded(rows: int) -> int:
    return -(-rows // ROWS_APART) * ROWS_APART


def _are_plain(parts: Sequence[Part]) -> bool:
    """Whether there are candidates, and all are drawn from their own logits alone."""
    return any(len(part.candidates) for part in parts) and not any(
        part.edits or part.draw or part.guidance or part.num_logprobs is not None for part in parts
    )
