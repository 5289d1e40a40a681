"""What a request changes of its logits: penalties of what is written, biases, ids that are barred.

Only final text counts, that of blocks that are settled: it is the same for whoever resumes the
request at the same commit, and a block in flight does not depend on the order in which its own
masks were filled. Pure numpy; how logits are changed is `kernels/sampling_edits.py`.
"""

from collections.abc import Iterable

import numpy as np

from effuse.config.decoding import Sampling
from effuse.decode_worker.sequence import IntArray, Sequence
from effuse.models.part import PartEdits, TokenEdits


def edits_for(sampling: Sampling, sequence: Sequence, candidates: IntArray) -> PartEdits | None:
    """What a step changes of the logits of these positions [R] of `sequence`; None for nothing."""
    bars = _bars(sequence, candidates)
    if not (sampling.edits_logits or bars):
        return None
    edits = _token_edits(sampling, sequence)
    return PartEdits(
        edits=edits,
        early=_barring(edits, sequence.stopping.stop_token_ids) if bars else edits,
        early_end=sequence.min_end,
        min_p=sampling.min_p,
    )


def changes_logits(sampling: Sampling, sequence: Sequence, candidates: IntArray) -> bool:
    """Whether `edits_for` the same has something to change."""
    return sampling.edits_logits or _bars(sequence, candidates)


def _bars(sequence: Sequence, candidates: IntArray) -> bool:
    """Whether a candidate, of which the first is the leftmost, may be no stop id."""
    has_stops = bool(sequence.stopping.stop_token_ids)
    return has_stops and len(candidates) > 0 and int(candidates[0]) < sequence.min_end


def _token_edits(sampling: Sampling, sequence: Sequence) -> TokenEdits:
    first = sequence.prompt_len
    answer, times = np.unique(
        sequence.token_ids[first : first + sequence.num_emitted], return_counts=True
    )
    by_id: dict[int, list[float]] = {}  # penalty, what is added
    if sampling.repetition_penalty != 1:
        seen = {*sequence.token_ids[:first].tolist(), *answer.tolist()}
        by_id = {token: [sampling.repetition_penalty, 0.0] for token in seen}
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in zip(answer.tolist(), times.tolist(), strict=True):
            taken = sampling.presence_penalty + count * sampling.frequency_penalty
            by_id.setdefault(token, [1.0, 0.0])[1] -= taken
    for token, added in sampling.logit_bias:
        by_id.setdefault(token, [1.0, 0.0])[1] += added
    ids = sorted(by_id)
    values = np.array([by_id[token] for token in ids], np.float32).reshape(-1, 2)
    return TokenEdits(np.array(ids, np.int64), values[:, 0], values[:, 1])


def _barring(edits: TokenEdits, barred: Iterable[int]) -> TokenEdits:
    """The same, and none of these ids is ever drawn."""
    ids = np.array(sorted(barred), np.int64)
    others = ~np.isin(edits.token_ids, ids)
    return TokenEdits(
        np.concatenate([edits.token_ids[others], ids]),
        np.concatenate([edits.penalties[others], np.ones(len(ids), np.float32)]),
        np.concatenate([edits.added[others], np.full(len(ids), -np.inf, np.float32)]),
    )
