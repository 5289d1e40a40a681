# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernels of logit edits; `sampling_edits` defines and calls them.

Both work in place, with one program for each row. Entries have a separate kernel before, so that
the search for a row's largest logit sees all of them.

Bytes: 12 B for each entry and 8 B for each logit that it changes; rows with min-p are read twice.
"""

import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.values import LogitEdits

CHUNK_OF_ENTRIES = 128
MOST_CHUNK = 4096
NUM_WARPS = 4


def launch(
    logits: Tensor, edits: LogitEdits, mask_token_id: int, *, max_chunk: int = MOST_CHUNK
) -> None:
    """Changes ``logits`` [R, V] fp32, rows contiguous; nothing is read back by the host."""
    rows, vocab_size = logits.shape
    if rows == 0:
        return
    # Not fused: penalties are rounded before the additions, like on a host.
    _entries_kernel[(rows,)](
        logits, logits.stride(0), edits.begin, edits.end, edits.token, edits.penalty, edits.add,
        CHUNK=CHUNK_OF_ENTRIES, num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    _min_p_kernel[(rows,)](
        logits, logits.stride(0), vocab_size, mask_token_id, edits.gap,
        CHUNK=min(triton.next_power_of_2(vocab_size), max_chunk), num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _entries_kernel(logits, row_stride, begins, ends, tokens, penalties, adds, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * row_stride
    begin, end = tl.load(begins + row), tl.load(ends + row)
    for first in range(begin, end, CHUNK):
        entry = first + tl.arange(0, CHUNK)
        exists = entry < end
        token = tl.load(tokens + entry, mask=exists, other=0)
        penalty = tl.load(penalties + entry, mask=exists, other=1.0)
        value = tl.load(row_logits + token, mask=exists, other=0.0)
        value = tl.where(value > 0, tl.div_rn(value, penalty), value * penalty)
        value += tl.load(adds + entry, mask=exists, other=0.0)
        tl.store(row_logits + token, value, mask=exists)


@triton.jit
def _min_p_kernel(logits, row_stride, vocab_size, mask_token_id, gaps, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    gap = tl.load(gaps + row)
    if gap == float("inf"):
        return
    row_logits = logits + row.to(tl.int64) * row_stride
    offsets = tl.arange(0, CHUNK)
    peaks = tl.full([CHUNK], float("-inf"), tl.float32)
    for first in range(0, vocab_size, CHUNK):
        token = first + offsets
        counts = (token < vocab_size) & (token != mask_token_id)
        value = tl.load(row_logits + token, mask=counts, other=float("-inf"))
        peaks = tl.maximum(peaks, value)
    floor = tl.max(peaks, 0) - gap
    for first in range(0, vocab_size, CHUNK):
        token = first + offsets
        exists = token < vocab_size
        value = tl.load(row_logits + token, mask=exists, other=float("inf"))
        tl.store(row_logits + token, float("-inf"), mask=value < floor)
