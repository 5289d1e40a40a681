"""Changes of logits before a token is drawn: penalties, biases and barred ids, and min-p.

A pass of its own before `sampling.py` and `sampling_llada.py`, so that rows of requests without
changes are not read again. The decode worker decides which ids change, and by how much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effuse.kernels.values import LogitEdits


def edit_logits(logits: Tensor, edits: LogitEdits, mask_token_id: int) -> Tensor:
    """The changed logits [R, V] fp32 of ``logits`` [R, V], any float dtype; the input is unchanged.

    Entries first (repetition penalty: arXiv 1909.05858), then min-p (arXiv 2407.01082): a logit
    that is more than the row's gap below the largest one (without the mask id's) becomes -inf. The
    gap is -T * log(min_p), for the row's temperature T. NaN stays NaN.
    """
    changed = logits.to(torch.float32, copy=True)
    if changed.is_cuda:
        from effuse.kernels import sampling_edits_triton

        sampling_edits_triton.launch(changed, edits, mask_token_id)
        return changed
    _apply_entries(changed, edits)
    limited = edits.gap.isfinite().nonzero().squeeze(1)
    if limited.numel():
        rows = changed[limited]
        others = rows.clone()
        others[:, mask_token_id] = float("-inf")
        floor = others.amax(dim=1) - edits.gap[limited]
        changed[limited] = rows.masked_fill(rows < floor[:, None], float("-inf"))
    return changed


def _apply_entries(changed: Tensor, edits: LogitEdits) -> None:
    counts = (edits.end - edits.begin).long()
    row = torch.repeat_interleave(torch.arange(len(counts)), counts)
    within = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    entry = edits.begin.long()[row] + within
    token, penalty = edits.token[entry].long(), edits.penalty[entry]
    value = changed[row, token]
    scaled = torch.where(value > 0, value / penalty, value * penalty)
    changed[row, token] = scaled + edits.add[entry]
