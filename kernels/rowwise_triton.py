# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The Triton kernels of normalisation and of the gated activation; call them through `rowwise`.

Bytes of normalisation: x (and residual) read once, the results written once. A row is reduced by
one program in one order, whatever the batch. Bytes of the activation: 2I elements of a row read and
I written, once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from effuse.kernels.early_start import may_start_early
from effuse.kernels.values import WeightedParts

ELEMENTS_PER_PROGRAM = 4096  # of normalisation
TILE = 2048  # of the activation


def launch_lookup(token_ids: Tensor, rows: Tensor, first: int) -> Tensor:
    """`rowwise.lookup` of contiguous rows."""
    count, width = rows.shape
    out = torch.empty(len(token_ids), width, dtype=rows.dtype, device=rows.device)
    if len(token_ids):
        _lookup_kernel[(len(token_ids), triton.cdiv(width, TILE))](
            token_ids, rows, out, first, count,
            WIDTH=width, TILE=TILE, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def launch_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised x of two or three dimensions, rows at any two strides."""
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, weight, eps, out, None)
    return out


def launch_norm_residual(
    x: Tensor | WeightedParts, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(normalised sum, sum) of x [T, H], or of all parts x [P, T, H], and residual [T, H]."""
    residual = residual.contiguous()
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch_norm(x, residual, weight, eps, out, total)
    return out, total


def _launch_norm(
    given: Tensor | WeightedParts,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    total: Tensor | None,
) -> None:
    weighted = given if isinstance(given, WeightedParts) else None
    x = given.parts if isinstance(given, WeightedParts) else given
    places = None if weighted is None else weighted.places
    width = x.shape[-1]
    num_rows = out.numel() // width
    has_parts = residual is not None and x.dim() == 3
    has_groups = residual is None and x.dim() == 3
    if num_rows == 0:
        return
    tile = triton.next_power_of_2(width)
    rows = max(1, min(16, ELEMENTS_PER_PROGRAM // tile))
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, residual if residual is not None else x, weight, out,
        total if total is not None else out, places if places is not None else weight,
        weighted.weights if weighted is not None else weight, num_rows,
        x.stride(1) if has_parts else x.stride(0), x.stride(1) if has_groups else 0,
        x.stride(0) if has_parts else 0, eps,
        GROUPS=x.shape[1] if has_groups else 1, PARTS=x.shape[0] if has_parts else 1,
        WEIGHTED=weighted.weights.shape[1] if weighted is not None else 0,
        HAS_PLACES=places is not None, WIDTH=width, TILE=tile, ROWS=rows,
        HAS_RESIDUAL=residual is not None, NEXT_STARTS=may_start_early(x.device),
        num_warps=8 if tile >= 4096 else 4, enable_fp_fusion=True,
    )  # fmt: skip


def launch_total(given: WeightedParts) -> Tensor:
    """[T, H]: the sum of each row's parts. Parts of weight 0 are not read."""
    (rows, count), width = given.weights.shape, given.parts.shape[1]
    total = given.parts.new_empty(rows, width)
    if rows:
        _total_kernel[(rows, triton.cdiv(width, TILE))](
            given.parts, given.weights if given.places is None else given.places, given.weights,
            total,
            COUNT=count, HAS_PLACES=given.places is not None, WIDTH=width, TILE=TILE, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return total


def launch_swiglu(gate_up: Tensor) -> Tensor:
    """[T, I] from [T, 2I] with contiguous rows."""
    tokens, width = gate_up.shape
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    out = torch.empty((tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        _swiglu_kernel[(tokens, triton.cdiv(width // 2, TILE))](
            gate_up, out, gate_up.stride(0),
            INTERMEDIATE=width // 2, TILE=TILE, NEXT_STARTS=may_start_early(gate_up.device),
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first", "count"])
def _lookup_kernel(token_ids, rows, out, first, count, WIDTH: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    own = tl.load(token_ids + at) - first
    end = tl.where((own >= 0) & (own < count), WIDTH, 0)
    found = tl.load(rows + own * WIDTH + column, mask=column < end, other=0.0)
    tl.store(out + at * WIDTH + column, found, mask=column < WIDTH)


# One kernel for all numbers of rows: a new kind of count must not compile while requests wait.
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, residual, weight, out, total, places, weights, num_rows, row_stride, group_stride,
    part_stride, eps,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, WEIGHTED: tl.constexpr, HAS_PLACES: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    NEXT_STARTS: tl.constexpr,
):  # fmt: skip
    if NEXT_STARTS:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    source = (row // GROUPS) * row_stride + (row % GROUPS) * group_stride
    target = row[:, None] * WIDTH + column[None, :]
    if WEIGHTED == 0:
        values = tl.load(x + source[:, None] + column[None, :], mask=mask, other=0.0)
    # Loaded early, so that it arrives while the row is reduced.
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED > 0:
            values = tl.zeros([ROWS, TILE], tl.float32)
            for part in tl.static_range(WEIGHTED):
                at = row * WEIGHTED + part
                share = tl.load(weights + at, mask=row < num_rows, other=0.0)
                if HAS_PLACES:
                    at = tl.load(places + at, mask=row < num_rows, other=0).to(tl.int64)
                more = x + at[:, None] * row_stride + column[None, :]
                values += tl.load(more, mask=mask, other=0.0).to(tl.float32) * share[:, None]
            values = values.to(x.dtype.element_ty)  # like a separate sum
        values = values.to(tl.float32)
        for part in tl.static_range(1, PARTS):
            more = x + part * part_stride + source[:, None] + column[None, :]
            values += tl.load(more, mask=mask, other=0.0).to(tl.float32)
        added += values
        # The sum is rounded before it is normalised, because the next layer reads the rounded one.
        values = added.to(out.dtype.element_ty)
        tl.store(total + target, values, mask=mask)
    values = values.to(tl.float32)
    mean = tl.sum(values * values, axis=1) / WIDTH
    scale = tl.rsqrt(mean + eps)
    normed = (values * scale[:, None]).to(out.dtype.element_ty)
    result = normed.to(tl.float32) * factor.to(tl.float32)[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _total_kernel(
    parts, places, weights, total,
    COUNT: tl.constexpr, HAS_PLACES: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    values = weighted_sum(parts, places, weights, row, column, COUNT, HAS_PLACES, WIDTH, TILE)
    tl.store(total + row * WIDTH + column, values.to(total.dtype.element_ty), mask=inside)


@triton.jit
def weighted_sum(
    parts, places, weights, row, column,
    COUNT: tl.constexpr, HAS_PLACES: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sum [TILE] fp32 of the COUNT parts of a row; those of weight 0 are not read."""
    values = tl.zeros([TILE], tl.float32)
    for part in tl.static_range(COUNT):
        at = row * COUNT + part
        share = tl.load(weights + at)
        if HAS_PLACES:
            at = tl.load(places + at).to(tl.int64)
        end = tl.where(share != 0.0, WIDTH, 0)
        more = tl.load(parts + at * WIDTH + column, mask=column < end, other=0.0)
        values += more.to(tl.float32) * share
    return values


@triton.jit
def _swiglu_kernel(
    gate_up, out, row_stride,
    INTERMEDIATE: tl.constexpr, TILE: tl.constexpr, NEXT_STARTS: tl.constexpr,
):  # fmt: skip
    if NEXT_STARTS:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < INTERMEDIATE
    source = gate_up + row * row_stride + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + INTERMEDIATE, mask=mask, other=0.0)
    # Rounded to the storage dtype before the product, like separate torch operators.
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    result = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * INTERMEDIATE + column, result.to(out.dtype.element_ty), mask=mask)
