"""Parts of many sequences as flat arrays, and their results from flat lists: on the host, a few
calls per part.

It chooses the hidden rows that a forward returns: one per candidate, then one per kept boundary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from effuse.kernels.sampling import Logprobs
from effuse.kernels.values import Candidates, RowSampling
from effuse.models.group import RowCounts
from effuse.models.part import HostLogprobs, Part, PartResult, TokenEdits

Integers = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackedParts:
    """T rows, part after part; R candidates in the same order; K kept boundaries."""

    token_ids: Integers  # [T]
    positions: Integers  # [T]
    slots: Integers  # [T] page * page_size + offset, -1 if nothing is stored
    wanted_rows: Integers  # [R + K]
    num_candidates: int  # R
    boundary_candidates: list[tuple[int, Tensor]]  # candidates whose hidden row is a given vector
    sampling_integers: Integers  # [6, R] top_k, seed, answer index, position, denoise count, score
    sampling_floats: Floats  # [2, R] temperature, top_p
    shift: bool

    @property
    def has_filters(self) -> bool:
        """Whether a candidate has a top-p or top-k."""
        return bool((self.sampling_integers[0] > 0).any() or (self.sampling_floats[1] < 1).any())

    def keeps_boundary(self, part: Part) -> bool:
        """Whether the part gets a hidden row back."""
        return self.shift and part.keep_boundary and part.num_stored > 0


def pack_parts(
    parts: Sequence[Part], *, page_size: int, shift: bool, has_head: bool = True
) -> PackedParts:
    """Lay out parts. With `shift`, position p is predicted by the row of p - 1. A stage without the
    head wants no rows.

    Raises ValueError for a candidate outside its part's rows, or one that needs a boundary or a
    denoise count that the part lacks.
    """
    first_rows = np.cumsum([0, *(len(part.token_ids) for part in parts)])
    candidate_rows: list[Integers] = []
    boundary_candidates: list[tuple[int, Tensor]] = []
    kept: list[int] = []
    num_candidates = 0
    asking = parts if has_head else ()
    for part, first in zip(asking, first_rows[:-1].tolist(), strict=has_head):
        if len(part.candidates) > 0:
            rows = _candidate_rows(part, shift)
            for index in np.flatnonzero(rows < 0).tolist():
                boundary_candidates.append((num_candidates + index, _boundary(part)))
            candidate_rows.append(rows.clip(0) + first)
            num_candidates += len(rows)
        if shift and part.keep_boundary and part.num_stored > 0:
            kept.append(first + part.num_stored - 1)
    integers, floats = _sampling(asking)
    return PackedParts(
        token_ids=np.concatenate([np.asarray(part.token_ids, np.int64) for part in parts]),
        positions=np.concatenate([_positions(part, len(part.token_ids)) for part in parts]),
        slots=np.concatenate([_slots(part, page_size) for part in parts]),
        wanted_rows=np.concatenate([*candidate_rows, np.array(kept, np.int64)]),
        num_candidates=num_candidates,
        boundary_candidates=boundary_candidates,
        sampling_integers=integers,
        sampling_floats=floats,
        shift=shift,
    )


@dataclass(frozen=True, slots=True)
class PackedEdits:
    """The changes of the logits of R candidates; E entries, shared within a part."""

    integers: Integers  # [2, R] first entry, and the one after the last
    tokens: Integers  # [E]
    entries: Floats  # [2, E] penalty, number to add
    gaps: Floats  # [R] how far below its largest logit a row keeps logits


def pack_edits(parts: Sequence[Part]) -> PackedEdits | None:
    """The edits of all parts, in the order of their candidates; None if there are none. A part may
    have edits without a candidate, for example if a random choice picked no mask or a cache is
    refilled.
    """
    if not any(part.edits is not None and len(part.candidates) for part in parts):
        return None
    runs: list[TokenEdits] = []
    spans: list[Integers] = []
    gaps: list[Floats] = []
    num_entries = 0
    for part in parts:
        count, span = len(part.candidates), np.zeros((2, len(part.candidates)), np.int64)
        gap = math.inf
        if part.edits is not None:
            gap = _gap(part.edits.min_p, part.sampling.temperature)
            early = np.asarray(part.candidates, np.int64) < part.edits.early_end
            for which, edits in ((early, part.edits.early), (~early, part.edits.edits)):
                if not which.any():
                    continue
                end = num_entries + len(edits.token_ids)
                span[:, which] = np.array([[num_entries], [end]])
                runs.append(edits)
                num_entries = end
        spans.append(span)
        gaps.append(np.full(count, gap, np.float32))
    columns = [run.penalties for run in runs], [run.added for run in runs]
    return PackedEdits(
        integers=np.concatenate(spans, axis=1),
        tokens=np.concatenate([run.token_ids for run in runs]),
        entries=np.stack([np.concatenate(column) for column in columns]),
        gaps=np.concatenate(gaps),
    )


def _gap(min_p: float, temperature: float) -> float:
    """How far below the largest logit min-p keeps logits; greedy counts as temperature 1."""
    return -(temperature or 1.0) * math.log(min_p) if min_p else math.inf


def join_aligned(arrays: Sequence[Integers]) -> tuple[Integers, list[slice]]:
    """All arrays in one, and the place of each in it, at multiples of 16 bytes.

    Triton compiles a kernel again for pointers with another alignment.
    """
    begins = np.cumsum([0, *(-(-len(array) // 2) * 2 for array in arrays)]).tolist()
    joined = np.zeros(begins[-1], np.int64)
    spans = [slice(b, b + len(array)) for b, array in zip(begins[:-1], arrays, strict=True)]
    for span, array in zip(spans, arrays, strict=True):
        joined[span] = array
    return joined, spans


def _candidate_rows(part: Part, shift: bool) -> Integers:
    """Row within the part that predicts each candidate; -1 means the boundary."""
    offsets = np.asarray(part.candidates, np.int64) - part.start
    if offsets.min() < 0 or offsets.max() >= len(part.token_ids):
        raise ValueError(
            f"candidates {list(part.candidates)} must lie in the part's positions "
            f"{part.start}..{part.start + len(part.token_ids) - 1}"
        )
    return offsets - 1 if shift else offsets


def _boundary(part: Part) -> Tensor:
    if part.boundary is None:
        raise ValueError(
            f"position {part.start} is a candidate, which needs the boundary vector of position "
            f"{part.start - 1}, but the part has none"
        )
    return part.boundary


def _positions(part: Part, count: int) -> Integers:
    return np.arange(part.start, part.start + count, dtype=np.int64)


def _slots(part: Part, page_size: int) -> Integers:
    slots = np.full(len(part.token_ids), -1, dtype=np.int64)
    if part.num_stored:
        places = _positions(part, part.num_stored)
        rows = np.arange(part.num_stored)
        rows[part.unstored.start :] += len(part.unstored)
        pages = np.asarray(part.pages, np.int64)
        slots[rows] = pages[places // page_size] * page_size + places % page_size
    return slots


def _sampling(parts: Sequence[Part]) -> tuple[Integers, Floats]:
    asking = [part for part in parts if len(part.candidates) > 0]
    if not asking:
        return np.empty((6, 0), np.int64), np.empty((2, 0), np.float32)
    for part in asking:
        if (found := len(part.denoise_counts)) != (count := len(part.candidates)):
            raise ValueError(f"{found} denoise counts for {count} candidates")
    counts = [len(part.candidates) for part in asking]
    per_part = np.array([_integers(part) for part in asking], np.int64)
    top_k, seed, answer_index, score = np.repeat(per_part, counts, axis=0).T
    position = np.concatenate([np.asarray(part.candidates, np.int64) for part in asking])
    denoise = np.concatenate([np.asarray(part.denoise_counts, np.int64) for part in asking])
    real = np.array([[p.sampling.temperature, p.sampling.top_p] for p in asking], np.float32)
    integers = np.stack([top_k, seed, answer_index, position, denoise, score])
    return integers, np.ascontiguousarray(np.repeat(real, counts, axis=0).T)


def _integers(part: Part) -> tuple[int, int, int, int]:
    """Its integers, one for each candidate; the seed as the int64 with the same bits."""
    sampling, seed = part.sampling, part.sampling.seed
    return sampling.top_k, seed - (seed >> 63 << 64), sampling.answer_index, part.score


def count_rows(parts: Sequence[Part], num_replicas: int) -> RowCounts:
    """The rows of each replica in a forward over these parts, of models that shift no logits."""
    rows, wanted = [0] * num_replicas, [0] * num_replicas
    for part in parts:
        rows[part.replica] += len(part.token_ids)
        wanted[part.replica] += len(part.candidates)
    return RowCounts(tuple(rows), tuple(wanted))


def row_sampling(integers: Sequence[Tensor], floats: Tensor) -> RowSampling:
    """Of R rows, from the columns of `PackedParts` on a device."""
    top_k, seed, answer_index, position, denoise_count, score = integers
    temperature, top_p = floats
    return RowSampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k.int(),
        seed=seed,
        answer_index=answer_index,
        position=position,
        denoise_count=denoise_count,
        score=score.to(torch.int8),
    )


def stacked(found: Candidates) -> Tensor:
    """Tokens, confidences and scores [3, R] for one copy to the host. fp64 holds token ids and fp32
    values exactly."""
    return torch.stack([one.double() for one in (found.token, found.confidence, found.score)])


def unpack_results(
    parts: Sequence[Part],
    drawn: list[list[float]],
    logprobs: Sequence[Logprobs | None],
    boundaries: Sequence[Tensor | None],
) -> list[PartResult]:
    """Results of each part from what was drawn for all candidates [3][R]: tokens, confidences,
    scores. The rest is by part, on the host or a boundary [H]."""
    results, candidate = [], 0
    for part, of_part, boundary in zip(parts, logprobs, boundaries, strict=True):
        span = slice(candidate, candidate + len(part.candidates))
        tokens, confidences, scores = (column[span] for column in drawn)
        found = None
        if of_part is not None:
            found = HostLogprobs(
                of_part.chosen.tolist(), of_part.top_tokens.tolist(), of_part.top.tolist()
            )
        results.append(PartResult([*map(int, tokens)], confidences, scores, boundary, found))
        candidate = span.stop
    return results
