# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""How the cached tokens of a sequence are split over programs when there are too few of them, and
how the parts of a sequence are merged into one output.

A launch fixes the most splits there can be; every sequence is cut by its own lengths, on the
device, so that a captured launch suits any context. Parts are combined in split order, so the
result does not depend on which finished first.

With `batch_invariant` each of these parts has `PART_KEYS` keys, at fixed positions. They are added
one by one, last first, with the operations of a program that computes all of them by itself.

Bytes: the parts that a sequence has, fp32, once; the output once. A merge is short and mostly waits
for loads, so a program starts them before it knows their sequence.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.attention_batch import AttentionBatch
from effuse.kernels.early_start import may_start_early

# The most keys in any kernel's tile; a split's tokens are a multiple of it.
SPLIT_STEP = 128
# Keys of a part with `batch_invariant`. Boundaries of parts never depend on a launch.
PART_KEYS = 512
MOST_PART_BYTES = 256 << 20
PEAK = tl.constexpr(-1.0e30)  # below every score, and finite, so that rows without keys give zeros
# Splits whose loads are under way together. One number for all launches, so that a result does not
# depend on other merges.
SPLITS_AT_ONCE = 8
HEADS_AT_ONCE = 8


def most_splits(num_programs: int, wave: int, max_context: int) -> int:
    """Splits for each program if there were ``num_programs`` without splits, up to ``wave``
    programs at a time.

    A pure function of the launch shape: the same forward is always split the same way.
    """
    return max(1, min(wave // max(1, num_programs), -(-max_context // SPLIT_STEP)))


def num_parts(num_programs: int, wave: int, max_keys: int, part_bytes: int) -> int:
    """Programs for each sequence of up to ``max_keys`` keys: one for each part, or 1 for all parts.

    Parts cost memory and a merge, so they only pay off if half of a wave would stay idle. Their
    fp32 results of ``part_bytes`` each take at most MOST_PART_BYTES.
    """
    count = -(-max_keys // PART_KEYS)
    pays_off = num_programs * 2 <= wave and count * part_bytes <= MOST_PART_BYTES
    return count if pays_off else 1


def partial_results(q: Tensor, num_splits: int, num_states: int = 1) -> tuple[Tensor, Tensor]:
    """Uninitialised memory for `merge_splits`; almost none without splits.

    ([splits, T, Hq, D] and [splits, T, Hq], both fp32) for ``q`` [T, Hq, D]. `merge_parts` needs
    two states, [2 * splits, T, Hq].
    """
    tokens, heads, head_dim = q.shape
    shape = (num_splits, tokens, heads) if num_splits > 1 else (0, 1, 1)
    partial_out = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    states = num_states * shape[0], *shape[1:]
    return partial_out, torch.empty(states, dtype=torch.float32, device=q.device)


def merge_splits(
    partial_out: Tensor,
    partial_lse: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    shared_splits: int = 0,
) -> None:
    """Fill ``out`` [T, Hq, D] and ``lse`` [T, Hq] fp32 for sequences of more than one split.

    ``partial_out`` [splits, T, Hq, D] fp32 holds normalised outputs, ``partial_lse``
    [splits, T, Hq] fp32 their base-2 log-sum-exp, of as many splits as `tokens_per_split` gives a
    sequence. If the batch has shared beginnings, the first ``shared_splits`` are of them, and all
    sequences are merged.
    """
    splits, tokens, heads, head_dim = partial_out.shape
    num_seqs = len(batch.context_lens)
    both = batch.shared
    shared = (both.cu_seqlens, both.context_lens, len(both.context_lens)) if both else [None] * 3
    starts_early = may_start_early(partial_out.device)
    _merge_kernel[(tokens, triton.cdiv(heads, HEADS_AT_ONCE))](
        partial_out, partial_lse, out, lse, batch.cu_seqlens, batch.context_lens, num_seqs,
        *shared, tokens, splits, shared_splits, *out.stride()[:2],
        *((0, 0) if lse is None else lse.stride()),
        HEADS=heads, HEAD_DIM=head_dim, MAX_SEQS=max(64, triton.next_power_of_2(num_seqs)),
        SPLIT_STEP=SPLIT_STEP, SPLITS_AT_ONCE=SPLITS_AT_ONCE, HEADS_AT_ONCE=HEADS_AT_ONCE,
        STARTS_EARLY=starts_early, num_warps=4, enable_fp_fusion=True, launch_pdl=starts_early,
    )  # fmt: skip


def merge_parts(
    partial_out: Tensor, partial_state: Tensor, batch: AttentionBatch, out: Tensor
) -> None:
    """Fill ``out`` [T, Hq, D] for sequences of more than one part of `PART_KEYS` keys.

    ``partial_out`` [parts, T, Hq, D] fp32 holds sums that are not normalised, ``partial_state``
    [2 * parts, T, Hq] fp32 their peaks, then their totals, of all parts that a token sees.
    """
    parts, tokens, heads, head_dim = partial_out.shape
    num_seqs = len(batch.context_lens)
    starts_early = may_start_early(partial_out.device)
    _parts_kernel[(tokens, triton.cdiv(heads, HEADS_AT_ONCE))](
        partial_out, partial_state, out, batch.cu_seqlens, batch.context_lens, batch.block_origins,
        num_seqs, tokens, parts, *out.stride()[:2],
        HEADS=heads, HEAD_DIM=head_dim, MAX_SEQS=max(64, triton.next_power_of_2(num_seqs)),
        BLOCK_SIZE=batch.block_size, KEYS=PART_KEYS, AT_ONCE=SPLITS_AT_ONCE,
        HEADS_AT_ONCE=HEADS_AT_ONCE, STARTS_EARLY=starts_early, num_warps=4, enable_fp_fusion=True,
        launch_pdl=starts_early,
    )  # fmt: skip


@triton.jit
def seen_end_of(row, num_rows, context, origin, BLOCK_SIZE: tl.constexpr):
    """The end of the positions that an in-flight row sees: the end of its diffusion block. Takes
    numbers or tensors."""
    position = context + row
    relative = position - origin
    block_end = tl.where(relative < 0, origin, position + BLOCK_SIZE - relative % BLOCK_SIZE)
    return tl.minimum(block_end, context + num_rows)


@triton.jit
def lse_of(peak, total):
    """Base-2 log-sum-exp of rows with these peaks and sums; -inf without keys."""
    some = total > 0
    return tl.where(some, peak + tl.log2(tl.where(some, total, 1.0)), float("-inf"))


@triton.jit
def add_part(total, peak, part_total, part_peak):
    """(factors of the sums so far and of the part's, new total, new peak).

    Explicit about what is fused, because two kernels must round alike.
    """
    new_peak = tl.maximum(peak, part_peak)
    shrink = tl.exp2(peak - new_peak)
    weight = tl.exp2(part_peak - new_peak)
    return shrink, weight, tl.fma(weight, part_total, total * shrink), new_peak


@triton.jit
def tokens_per_split(context, num_rows, splits, SPLIT_STEP: tl.constexpr):
    """Tokens of each split but the last, which also has the in-flight rows: as even as steps allow.

    A sequence has ``ceil(context / tokens_per_split)`` splits, at least one. Takes numbers or
    tensors.
    """
    steps = splits * SPLIT_STEP
    # A launch with fewer rows than a step does not need longer splits.
    counted = context + num_rows // SPLIT_STEP * SPLIT_STEP
    return tl.maximum(1, (counted + steps - 1) // steps) * SPLIT_STEP


# One kernel for all counts: a new kind of count must not compile while requests wait.
@triton.jit(do_not_specialize=["num_seqs", "num_shared", "num_tokens", "splits", "shared_splits"])
def _merge_kernel(
    partial_out, partial_lse, out, lse, cu_seqlens, context_lens, num_seqs, shared_cu_seqlens,
    shared_lens, num_shared, num_tokens, splits, shared_splits, out_token, out_head, lse_token,
    lse_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, MAX_SEQS: tl.constexpr, SPLIT_STEP: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr, HEADS_AT_ONCE: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Combine some heads of a token over its splits, a fixed number at a time, in split order.

    Each element of the result is computed by one thread, without exchange.
    """
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    dim = tl.arange(0, HEAD_DIM)
    exists = head < HEADS
    step = num_tokens.to(tl.int64) * HEADS
    place = token.to(tl.int64) * HEADS + head
    parts_lse = partial_lse + place
    parts = partial_out + place[:, None] * HEAD_DIM + dim[None, :]
    limit = tl.where(exists, splits, 0)
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    weights, values = _load_parts(parts_lse, parts, limit, step, HEAD_DIM, SPLITS_AT_ONCE)
    end = _count_splits(
        cu_seqlens, context_lens, num_seqs, token, splits - shared_splits, MAX_SEQS, SPLIT_STEP
    )
    num_shared_held = 0
    if shared_cu_seqlens is not None:
        num_shared_held = _count_splits(
            shared_cu_seqlens, shared_lens, num_shared, token, shared_splits, MAX_SEQS, SPLIT_STEP
        )
        end = shared_splits + tl.maximum(end, 1)
    elif end <= 1:
        return
    peak = tl.full([HEADS_AT_ONCE], -1.0e30, dtype=tl.float32)
    total = tl.zeros([HEADS_AT_ONCE], dtype=tl.float32)
    result = tl.zeros([HEADS_AT_ONCE, HEAD_DIM], dtype=tl.float32)
    held = num_shared_held, shared_splits, end
    result, total, peak = _combine(weights, values, 0, held, result, total, peak)
    for begin in range(SPLITS_AT_ONCE, end, SPLITS_AT_ONCE):
        parts_lse += SPLITS_AT_ONCE * step
        parts += SPLITS_AT_ONCE * step * HEAD_DIM
        limit = tl.where(exists, end - begin, 0)
        weights, values = _load_parts(parts_lse, parts, limit, step, HEAD_DIM, SPLITS_AT_ONCE)
        result, total, peak = _combine(weights, values, begin, held, result, total, peak)
    rows = out + token.to(tl.int64) * out_token + head * out_head
    if lse is not None:
        places = lse + token.to(tl.int64) * lse_token + head * lse_head
        tl.store(places, lse_of(peak, total), mask=exists)
    result = (result / total[:, None]).to(out.dtype.element_ty)
    tl.store(rows[:, None] + dim[None, :], result, mask=exists[:, None])


@triton.jit
def _load_parts(
    parts_lse, parts, limit, step, HEAD_DIM: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr
):
    """([heads], [heads, HEAD_DIM]) of each of the first splits, as two tuples."""
    weights = ()
    values = ()
    for split in tl.static_range(SPLITS_AT_ONCE):
        present = split < limit
        split_lse = tl.load(parts_lse + split * step, mask=present, other=0.0)
        weights += (split_lse,)  # type: ignore[assignment]
        pointers = parts + split * step * HEAD_DIM
        value = tl.load(pointers, mask=present[:, None], other=0.0)
        values += (value,)  # type: ignore[assignment]
    return weights, values


@triton.jit
def _count_splits(
    cu_seqlens, context_lens, num_seqs, token, splits, MAX_SEQS: tl.constexpr,
    SPLIT_STEP: tl.constexpr,
):  # fmt: skip
    """The splits of the sequence to which ``token`` belongs."""
    sequence = tl.arange(0, MAX_SEQS)
    present = sequence < num_seqs
    begins = tl.load(cu_seqlens + sequence, mask=present, other=0)
    ends = tl.load(cu_seqlens + sequence + 1, mask=present, other=0)
    contexts = tl.load(context_lens + sequence, mask=present, other=0)
    # Counted over all sequences, so that threads exchange a single sum.
    shares = tokens_per_split(contexts, ends - begins, splits, SPLIT_STEP)
    counts = (contexts + shares - 1) // shares
    return tl.sum(tl.where((begins <= token) & (token < ends), counts, 0), 0)


@triton.jit
def _is_held(split, held):
    """Whether a split has results, of held (end of the shared ones, first own one, its end)."""
    return (split < held[0]) | ((split >= held[1]) & (split < held[2]))


@triton.jit
def _combine(weights, values, begin, held, result, total, peak):
    """One step of online softmax, over the splits from ``begin`` on; some may be undefined."""
    new_peak = peak
    for split in tl.static_range(len(weights)):
        present = _is_held(begin + split, held)
        new_peak = tl.maximum(new_peak, tl.where(present, weights[split], -1.0e30))
    shrink = tl.exp2(peak - new_peak)
    result *= shrink[:, None]
    total *= shrink
    for split in tl.static_range(len(weights)):
        present = _is_held(begin + split, held)
        weight = tl.where(present, tl.exp2(weights[split] - new_peak), 0.0)
        result += weight[:, None] * tl.where(present, values[split], 0.0)
        total += weight
    return result, total, new_peak


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "parts"])
def _parts_kernel(
    partial_out, partial_state, out, cu_seqlens, context_lens, block_origins, num_seqs, num_tokens,
    parts, out_token, out_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, MAX_SEQS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, AT_ONCE: tl.constexpr, HEADS_AT_ONCE: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Add the parts of some heads of a token, last first; those that it does not see change
    nothing."""
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    dim = tl.arange(0, HEAD_DIM)
    exists = head < HEADS
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    num_seen = _count_parts(
        cu_seqlens, context_lens, block_origins, num_seqs, token, MAX_SEQS, BLOCK_SIZE, KEYS
    )
    if num_seen == 0:
        return
    step = num_tokens.to(tl.int64) * HEADS
    place = token.to(tl.int64) * HEADS + head
    peak = tl.full([HEADS_AT_ONCE], PEAK, dtype=tl.float32)
    total = tl.zeros([HEADS_AT_ONCE], dtype=tl.float32)
    result = tl.zeros([HEADS_AT_ONCE, HEAD_DIM], dtype=tl.float32)
    groups = (num_seen + AT_ONCE - 1) // AT_ONCE
    for group in range(groups):
        first = (groups - 1 - group) * AT_ONCE
        states = partial_state + place + first * step
        values = partial_out + (place + first * step)[:, None] * HEAD_DIM + dim[None, :]
        limit = tl.where(exists, num_seen - first, 0)
        peaks, sums = _load_parts(states, values, limit, step, HEAD_DIM, AT_ONCE)
        totals = _load_values(states + parts * step, limit, step, AT_ONCE)
        for back in tl.static_range(AT_ONCE):
            part_peak = tl.where(AT_ONCE - 1 - back < limit, peaks[AT_ONCE - 1 - back], PEAK)
            part_total = totals[AT_ONCE - 1 - back]
            shrink, weight, total, peak = add_part(total, peak, part_total, part_peak)
            weight = tl.broadcast_to(weight[:, None], [HEADS_AT_ONCE, HEAD_DIM])
            result = tl.fma(sums[AT_ONCE - 1 - back], weight, result * shrink[:, None])
    rows = out + token.to(tl.int64) * out_token + head * out_head
    inverse = 1.0 / tl.where(exists, total, 1.0)
    result = (result * inverse[:, None]).to(out.dtype.element_ty)
    tl.store(rows[:, None] + dim[None, :], result, mask=exists[:, None])


@triton.jit
def _load_values(pointers, limit, step, AT_ONCE: tl.constexpr):
    values = ()
    for part in tl.static_range(AT_ONCE):
        values += (tl.load(pointers + part * step, mask=part < limit, other=0.0),)  # type: ignore[assignment]
    return values


@triton.jit
def _count_parts(
    cu_seqlens, context_lens, block_origins, num_seqs, token, MAX_SEQS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The parts that ``token`` sees, or 0 if its sequence has only one."""
    sequence = tl.arange(0, MAX_SEQS)
    present = sequence < num_seqs
    begins = tl.load(cu_seqlens + sequence, mask=present, other=0)
    ends = tl.load(cu_seqlens + sequence + 1, mask=present, other=0)
    contexts = tl.load(context_lens + sequence, mask=present, other=0)
    origins = tl.load(block_origins + sequence, mask=present, other=0)
    seen = seen_end_of(token - begins, ends - begins, contexts, origins, BLOCK_SIZE)
    counts = tl.where(contexts + ends - begins > KEYS, (seen + KEYS - 1) // KEYS, 0)
    return tl.sum(tl.where((begins <= token) & (token < ends), counts, 0), 0)
