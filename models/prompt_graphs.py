"""Forwards over short prompts as CUDA graphs, one for each bucket of rows.

The host needs about 8 ms to launch a forward's kernels one by one, as long as 300 rows of a 7B
model take, and an engine that also decodes has better use for them. Prompts that begin with cached
tokens, and forwards that want candidates, go the usual way. Without graphs (on the CPU) the same
padded rows run call by call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from effuse.kernels.attention_batch import AttentionBatch, make_attention_batch
from effuse.kernels.marks import LayerMarks
from effuse.models.packing import Integers, PackedParts
from effuse.models.part import Part
from effuse.models.progress import ProgressLog
from effuse.models.transformer import LayerKV, Transformer

MOST_ROWS = 2048
MOST_SEQUENCES = 32  # a single one has graphs of its own, as room for more costs attention time
ROWS_APART = 64  # of one bucket and the next


class PromptGraphs:
    """Runs forwards of up to MOST_ROWS prompt rows over the paged memory `kv`."""

    def __init__(
        self,
        model: Transformer,
        kv: Sequence[LayerKV],
        *,
        page_size: int,
        block_size: int,
        uses_graphs: bool,
        marks: LayerMarks | None = None,
    ) -> None:
        self._model = model
        self._marks = marks
        self._kv = kv
        self._page_size = page_size
        self._block_size = block_size
        self._inputs = _Inputs.empty(model.device)
        self._uses_graphs = uses_graphs
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if uses_graphs else None

    def takes(self, parts: Sequence[Part]) -> bool:
        """Whether these parts can run as one of the graphs."""
        num_rows = sum(len(part.token_ids) for part in parts)
        return (
            len(parts) <= MOST_SEQUENCES
            and 0 < num_rows <= MOST_ROWS
            and not any(part.start or len(part.candidates) for part in parts)
        )

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures all graphs; one that is missing is captured when it is needed first."""
        if not self._uses_graphs:
            return
        sizes = range(MOST_ROWS, 0, -ROWS_APART)
        with ProgressLog("graphs of prompts", 2 * len(sizes)) as progress:
            for rows, num_seqs in product(sizes, (MOST_SEQUENCES, 1)):
                self._graph(rows, num_seqs)
                progress.add()

    def run(self, parts: Sequence[Part], packed: PackedParts) -> Tensor:
        """Hidden rows [kept boundaries, H], to be read before the next call; stores K and V."""
        bucket = -(-len(packed.token_ids) // ROWS_APART) * ROWS_APART
        num_seqs = 1 if len(parts) == 1 else MOST_SEQUENCES
        if self._uses_graphs:
            graph, hidden = self._graph(bucket, num_seqs)
            self._inputs.fill(parts, packed, bucket)
            graph.replay()
        else:
            self._inputs.fill(parts, packed, bucket)
            hidden = self._forward(bucket, num_seqs)
        return hidden[: len(packed.wanted_rows)]

    def _graph(self, rows: int, num_seqs: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        found = self._graphs.get((rows, num_seqs))
        if found is None:
            found = self._capture(rows, num_seqs)
            self._graphs[rows, num_seqs] = found
        return found

    def _capture(self, rows: int, num_seqs: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Runs once over rows that store nothing, so that all kernels are loaded, then captures."""
        self._inputs.clear()
        self._forward(rows, num_seqs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The connector's thread may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = self._forward(rows, num_seqs)
        return graph, hidden

    def _forward(self, rows: int, num_seqs: int) -> Tensor:
        """Over the first `rows` rows of the inputs; rows of no sequence are padding."""
        inputs = self._inputs
        num_wanted = num_seqs if self._model.config.shift_logits else 0
        stored = None if self._marks is None else self._marks.stored
        return self._model.forward(
            inputs.token_ids[:rows],
            inputs.positions[:rows],
            self._attention(rows, num_seqs),
            self._kv,
            inputs.slots[:rows],
            last_rows=inputs.wanted[:num_wanted],
            stored=stored,
        )

    def _attention(self, rows: int, num_seqs: int) -> AttentionBatch:
        if self._model.device.type == "cpu":
            return self._attention_of_cpu(rows)
        sizes = (self._block_size, self._page_size)
        return self._inputs.attention(rows, num_seqs, *sizes)

    def _attention_of_cpu(self, rows: int) -> AttentionBatch:
        """The same batch for the CPU, where padding has to be a sequence of its own."""
        inputs = self._inputs
        lengths = inputs.cu_seqlens.diff().tolist()
        lengths.append(rows - sum(lengths))
        return make_attention_batch(
            lengths,
            [0] * len(lengths),
            [()] * len(lengths),
            [*inputs.block_origins.tolist(), rows],
            block_size=self._block_size,
            page_size=self._page_size,
            device=self._model.device,
        )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a graph reads, at fixed addresses; one copy brings a forward's numbers."""

    copied: Tensor  # int64: token ids, positions, slots, wanted rows; then int32 pairs
    token_ids: Tensor  # [MOST_ROWS] int64
    positions: Tensor  # [MOST_ROWS] int64
    slots: Tensor  # [MOST_ROWS] int64
    wanted: Tensor  # [MOST_SEQUENCES] int64
    block_origins: Tensor  # [MOST_SEQUENCES] int32
    cu_seqlens: Tensor  # [MOST_SEQUENCES + 1] int32
    context_lens: Tensor  # [MOST_SEQUENCES] int32, zeros
    page_table: Tensor  # [MOST_SEQUENCES, 1] int32, never read as nothing is cached

    @classmethod
    def empty(cls, device: torch.device) -> _Inputs:
        copied = torch.zeros(3 * MOST_ROWS + 2 * MOST_SEQUENCES + 1, dtype=torch.int64)
        copied = copied.to(device)
        lengths = [MOST_ROWS, MOST_ROWS, MOST_ROWS, MOST_SEQUENCES, MOST_SEQUENCES + 1]
        token_ids, positions, slots, wanted, pairs = torch.split(copied, lengths)
        narrow = pairs.view(torch.int32)
        nothing = torch.zeros(MOST_SEQUENCES, 1, dtype=torch.int32, device=device)
        return cls(
            copied=copied,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            wanted=wanted,
            block_origins=narrow[:MOST_SEQUENCES],
            cu_seqlens=narrow[MOST_SEQUENCES : 2 * MOST_SEQUENCES + 1],
            context_lens=nothing[:, 0],
            page_table=nothing,
        )

    def attention(
        self, rows: int, num_seqs: int, block_size: int, page_size: int
    ) -> AttentionBatch:
        """The batch over these inputs; rows behind the last sequence are in none."""
        return AttentionBatch(
            cu_seqlens=self.cu_seqlens[: num_seqs + 1],
            context_lens=self.context_lens[:num_seqs],
            page_table=self.page_table[:num_seqs],
            block_origins=self.block_origins[:num_seqs],
            block_size=block_size,
            page_size=page_size,
            max_seqlen=rows,
            max_context=0,
            gather=None,
        )

    def clear(self) -> None:
        """Leaves no sequence, and nothing to store."""
        self.copied.zero_()
        self.slots.fill_(-1)

    def fill(self, parts: Sequence[Part], packed: PackedParts, bucket: int) -> None:
        """Brings a forward's numbers to the device, without waiting for it."""
        staged = np.zeros(len(self.copied), np.int64)
        count, slots = len(packed.token_ids), staged[2 * MOST_ROWS :]
        staged[:count] = packed.token_ids
        staged[MOST_ROWS : MOST_ROWS + count] = packed.positions
        slots[:count] = packed.slots
        slots[count:bucket] = -1
        wanted = staged[3 * MOST_ROWS :]
        wanted[: len(packed.wanted_rows)] = packed.wanted_rows
        self._fill_sequences(wanted[MOST_SEQUENCES:].view(np.int32), parts)
        source = torch.from_numpy(staged)
        if self.copied.device.type != "cpu":
            source = source.pin_memory()  # PyTorch does not reuse it before the copy has ended
        self.copied.copy_(source, non_blocking=True)

    def _fill_sequences(self, narrow: np.ndarray, parts: Sequence[Part]) -> None:
        narrow[: len(parts)] = [part.block_origin for part in parts]
        ends: Integers = np.cumsum([len(part.token_ids) for part in parts])
        cu_seqlens = narrow[MOST_SEQUENCES : 2 * MOST_SEQUENCES + 1]
        cu_seqlens[1:] = ends[-1]
        cu_seqlens[1 : len(parts) + 1] = ends
