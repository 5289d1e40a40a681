"""One forward over parts of many sequences: rows in, candidates out. Both workers use it.

Packs parts into tensors, collects the hidden rows for candidates (for shifting models the previous
row or the boundary vector), and samples them from one head product. The workers choose the rows and
use the candidates.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import count

import numpy as np
import torch
from torch import Tensor

from effuse.kernels.attention_batch import make_attention_batch
from effuse.kernels.pages import LayerMarks, place_on_cuda
from effuse.kernels.sampling import Logprobs, edit_logits, sample_confidence, token_logprobs
from effuse.kernels.sampling_llada import LladaDraw, sample_llada
from effuse.kernels.values import Candidates, LogitEdits, RowSampling
from effuse.models.config import ModelConfig
from effuse.models.group import RowCounts
from effuse.models.packing import (
    PackedParts,
    count_rows,
    join_aligned,
    pack_edits,
    pack_parts,
    row_sampling,
    stacked,
    unpack_results,
)
from effuse.models.part import Part, PartResult
from effuse.models.prompt_graphs import PromptGraphs
from effuse.models.transformer import LayerKV, Transformer

__all__ = ["ModelRunner", "Part", "PartResult"]

_MOST_CHANGED = 256  # rows of logits that are copied for changes at a time
MOST_LOGITS = 1 << 21  # values of rows drawn at a time on a CPU, where a million take 0.4 s;
LEAST_ROWS = 16  # but at least this many rows


class ModelRunner:
    """Runs a transformer over the paged memory `kv`, one pair of views per layer.

    With `graphs`, which use the same memory, short prompts run as graphs. With `marks`, which the
    graphs must share, forwards report how many layers they have stored. `on_layer` is called with
    each layer's number as a forward proceeds. It gets the last layer's number after a graph, which
    is one launch, and while rows are drawn on a CPU. `wait` is called to wait for candidates.
    """

    def __init__(
        self,
        model: Transformer,
        kv: Sequence[LayerKV],
        *,
        page_size: int,
        block_size: int,
        graphs: PromptGraphs | None = None,
        marks: LayerMarks | None = None,
        on_layer: Callable[[int], None] | None = None,
        wait: Callable[[Callable[[], bool]], None] | None = None,
    ) -> None:
        if len(kv) != len(model.shard.layers):
            raise ValueError(
                f"expected K and V of the model's {len(model.shard.layers)} layers, got {len(kv)}"
            )
        self.model = model
        self._kv = kv
        self._page_size = page_size
        self._block_size = block_size
        self._graphs = graphs
        self._marks = marks
        self._on_layer = on_layer
        self._wait = wait

    def progress(self) -> Callable[[], int]:
        """A function for any thread: how many groups of layers the next forward has stored."""
        assert self._marks is not None, "this runner has no marks"
        return self._marks.begin()

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        """Run all parts in one forward; results are in their order.

        Afterwards K and V of each part's first `num_stored` rows are in its pages. Replicas give
        the parts of all of them, and get the results of their own. A stage of a pipeline before the
        last one has no results.
        """
        return self.launch(parts)()

    @torch.inference_mode()
    def launch(self, parts: Sequence[Part]) -> Callable[[], list[PartResult]]:
        """Queues a forward as of `run`; the returned function waits for its candidates. Others may
        be launched before it is called."""
        replicas, counts = self.model.replicas, None
        if replicas is not None:
            counts = count_rows(parts, replicas.size)
            parts = [part for part in parts if part.replica == replicas.rank]
            if not parts:
                self.model.experts_only(counts)
        if not parts:
            return list
        config = self.model.config
        packed = pack_parts(
            parts,
            page_size=self._page_size,
            shift=config.shift_logits,
            has_head=self.model.has_head,
        )
        hidden, found = self._forward(parts, packed, counts)
        if not self.model.has_head:
            return list
        if found is None:
            drawn, logprobs = self._draw(parts, packed, hidden)
        else:
            drawn, logprobs = _to_host(found), [None] * len(parts)
        kept = count(packed.num_candidates)
        boundaries = [
            hidden[next(kept)].clone() if packed.keeps_boundary(part) else None for part in parts
        ]
        wait = self._mark() if len(drawn[0]) else None

        def results() -> list[PartResult]:
            if wait is not None:
                wait()
            return unpack_results(parts, drawn.tolist(), logprobs, boundaries)

        return results

    def _mark(self) -> Callable[[], None]:
        """A function that waits for the work queued so far."""
        place = None if self.model.device.type == "cpu" else place_on_cuda()
        if place is not None:
            self._show()  # so that the last place to wait for is not one of a later forward

        def wait() -> None:
            if self._wait is not None:
                self._wait(place.query if place is not None else lambda: False)
            if place is not None:
                place.synchronize()

        return wait

    def _forward(
        self, parts: Sequence[Part], packed: PackedParts, counts: RowCounts | None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden rows [candidates + kept boundaries, H], and what a graph has drawn from them."""
        if self._graphs is not None and self._graphs.takes(parts):
            found = self._graphs.run(parts, packed)
            self._show()
            return found
        attention = make_attention_batch(
            [len(part.token_ids) for part in parts],
            [part.start + part.num_behind for part in parts],
            [part.pages for part in parts],
            [part.block_origin for part in parts],
            block_size=self._block_size,
            page_size=self._page_size,
            device=self.model.device,
            stored_lens=[part.num_stored for part in parts],
        )
        if self.model.prompts is None:
            arrays = (packed.token_ids, packed.positions, packed.slots, packed.wanted_rows)
            token_ids, positions, slots, wanted = self._to_device(arrays)
        else:
            cut = self.model.prompts.begin(parts, packed, self.model.device, self._to_device)
            token_ids, positions, slots, wanted = cut
        given = (token_ids, positions, attention, self._kv, slots)
        stored = self._stored
        return self.model.forward(*given, last_rows=wanted, stored=stored, counts=counts), None

    def _stored(self, layer: int) -> None:
        if self._marks is not None:
            self._marks.stored(layer)
        if self._on_layer is not None:
            self._on_layer(layer)

    def _show(self) -> None:
        """A forward goes on after its last layer."""
        if self._on_layer is not None:
            self._on_layer(len(self._kv) - 1)

    def _draw(
        self, parts: Sequence[Part], packed: PackedParts, hidden: Tensor
    ) -> tuple[Tensor, list[Logprobs | None]]:
        """Tokens, confidences and scores of all candidates [3, R], and log-probabilities by part:
        on the host, or on their way there."""
        logits, candidates = None, None
        if packed.num_candidates:
            rows = hidden[: packed.num_candidates]
            if packed.boundary_candidates:
                (at,) = self._to_device([np.array([i for i, _ in packed.boundary_candidates])])
                rows = rows.index_copy(0, at, self._boundaries(packed, rows))
            logits, candidates = self._candidates(parts, rows, packed, self._edits(parts))
        if candidates is None:
            return torch.empty(3, 0), [None] * len(parts)
        drawn = _to_host(stacked(candidates))
        if logits is None:
            return drawn, [None] * len(parts)
        return drawn, _logprobs(parts, logits, candidates.token, self.model.config)

    def _candidates(
        self,
        parts: Sequence[Part],
        rows: Tensor,
        packed: PackedParts,
        edits: LogitEdits | None,
    ) -> tuple[Tensor | None, Candidates | None]:
        """(logits [R, V], candidates) of hidden rows [R, H]. Only rank 0 of a group has candidates;
        none has logits if no part needs them."""
        model, sampling = self.model, self._sampling(packed)
        is_plain = edits is None and not any(part.draw or part.guidance for part in parts)
        needs_logits = any(part.num_logprobs is not None for part in parts)
        if is_plain and not needs_logits and model.shard.size > 1:
            found = model.candidates(rows, sampling, filters=packed.has_filters)
            self._show()
            return None, None if model.shard.rank else found
        logits = model.logits(rows)
        if model.shard.rank:
            return None, None
        if is_plain:
            return logits, self._sample_rows(None, logits, sampling)
        return logits, self._sample_by_part(parts, logits, sampling, edits)

    def _sample_rows(
        self, draw: LladaDraw | None, logits: Tensor, sampling: RowSampling
    ) -> Candidates:
        """Candidates for ``logits`` [R, V] that are all drawn in the same way. On a CPU a few rows
        at a time with progress after each, because a row of a large vocabulary takes as long as
        dozens of layers.
        """
        most = max(LEAST_ROWS, MOST_LOGITS // logits.shape[1])
        if logits.device.type != "cpu" or len(logits) <= most:
            return self._sample_span(draw, logits, sampling)
        drawn = []
        for first in range(0, len(logits), most):
            span = slice(first, first + most)
            drawn.append(self._sample_span(draw, logits[span], sampling.of_rows(span)))
            self._show()
        return _joined(drawn)

    def _sample_span(
        self, draw: LladaDraw | None, logits: Tensor, sampling: RowSampling
    ) -> Candidates:
        if draw is not None:
            return sample_llada(logits, draw, sampling.position, sampling.denoise_count)
        config = self.model.config
        return sample_confidence(
            logits, sampling, config.mask_token_id, top_k_first=config.top_k_first
        )

    def _sample_by_part(
        self,
        parts: Sequence[Part],
        logits: Tensor,
        sampling: RowSampling,
        edits: LogitEdits | None,
    ) -> Candidates:
        """Candidates for the rows of ``logits`` [R, V], in the order of the parts.

        A part with guidance s uses u + (s + 1) * (c - u), with its own logits c and the logits u of
        the next part, which has the same candidates. Nothing is drawn from u itself; the next
        part's candidates are those of c.
        """
        drawn: list[Candidates] = []
        led: list[Candidates] = []
        first = 0
        for part in parts:
            end = first + len(part.candidates)
            if end == first:
                continue
            if led:
                drawn, led, first = drawn + led, [], end
                continue
            of_part, rows = sampling.of_rows(slice(first, end)), logits[first:end]
            own_edits = None
            if part.edits is not None and edits is not None:
                own_edits = edits.of_rows(first, end)
            if part.guidance or own_edits is not None:
                free = logits[end : end + len(rows)]
                changed = list(self._sample_changed(part, rows, free, of_part, own_edits))
                drawn += changed
                led = changed if part.guidance else []
            else:
                drawn.append(self._sample_rows(part.draw, rows, of_part))
            if logits.device.type == "cpu":
                self._show()
            first = end
        return _joined(drawn)

    def _sample_changed(
        self,
        part: Part,
        logits: Tensor,
        free: Tensor,
        sampling: RowSampling,
        edits: LogitEdits | None,
    ) -> Iterator[Candidates]:
        """Candidates of a part whose logits are moved away from ``free`` or edited, some rows at a
        time, because changed rows are copied as fp32.
        """
        for first in range(0, len(logits), _MOST_CHANGED):
            span = slice(first, min(first + _MOST_CHANGED, len(logits)))
            rows = logits[span]
            if part.guidance:
                unled = free[span].float()
                rows = unled + (part.guidance + 1) * (rows.float() - unled)
            if edits is not None:
                own = edits.of_rows(span.start, span.stop)
                rows = edit_logits(rows, own, self.model.config.mask_token_id)
            yield self._sample_rows(part.draw, rows, sampling.of_rows(span))

    def _boundaries(self, packed: PackedParts, rows: Tensor) -> Tensor:
        """Boundary vectors [B, H] like ``rows``; rank 0 has them, and other ranks get them."""
        if self.model.shard.rank:
            return self.model.group.share(
                rows.new_empty(len(packed.boundary_candidates), rows.shape[1])
            )
        vectors = [
            vector.to(rows.device, rows.dtype, non_blocking=True)
            for _, vector in packed.boundary_candidates
        ]
        return self.model.group.share(torch.stack(vectors))

    def _sampling(self, packed: PackedParts) -> RowSampling:
        integers = self._to_device(list(packed.sampling_integers))
        return row_sampling(integers, self._copied(packed.sampling_floats))

    def _edits(self, parts: Sequence[Part]) -> LogitEdits | None:
        packed = pack_edits(parts)
        if packed is None:
            return None
        begin, end, token = self._to_device([*packed.integers, packed.tokens])
        penalty, add = self._copied(packed.entries)
        return LogitEdits(
            begin=begin.int(),
            end=end.int(),
            token=token.int(),
            penalty=penalty,
            add=add,
            gap=self._copied(packed.gaps),
        )

    def _to_device(self, arrays: Sequence[np.ndarray]) -> Sequence[Tensor]:
        """int64 arrays as tensors, all in a single copy."""
        joined, spans = join_aligned(arrays)
        copied = self._copied(joined)
        return [copied[span] for span in spans]

    def _copied(self, array: np.ndarray) -> Tensor:
        """An array on the device. Without pinned memory the copy would wait for the forward."""
        found = torch.from_numpy(array)
        if self.model.device.type != "cpu":
            found = found.pin_memory().to(self.model.device, non_blocking=True)
        return found


def _joined(drawn: Sequence[Candidates]) -> Candidates:
    columns = ([getattr(one, field.name) for one in drawn] for field in fields(Candidates))
    return Candidates(*(torch.cat(column) for column in columns))


def _logprobs(
    parts: Sequence[Part], logits: Tensor, tokens: Tensor, config: ModelConfig
) -> list[Logprobs | None]:
    """Log-probabilities of the drawn tokens [R] by the model's own ``logits`` [R, V], on the host
    or on their way there."""
    found: list[Logprobs | None] = []
    first = 0
    for part in parts:
        rows = slice(first, first + len(part.candidates))
        first = rows.stop
        if part.num_logprobs is None or not part.candidates:
            found.append(None)
            continue
        entry = token_logprobs(logits[rows], tokens[rows], config.mask_token_id, part.num_logprobs)
        found.append(Logprobs(*map(_to_host, (entry.chosen, entry.top_tokens, entry.top))))
    return found


def _to_host(found: Tensor) -> Tensor:
    """A copy on its way. One into memory that is not pinned would be waited for."""
    if not found.is_cuda:
        return found
    copy = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    return copy.copy_(found, non_blocking=True)
