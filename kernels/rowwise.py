"""Operations on each row by itself: normalisation with or without the addition of the residual, the
gated activation of Llama-type MLPs, rotary position embedding, and a product whose rows do not
depend on each other.

Means are taken in fp32 whatever the dtype, in an order that does not depend on other rows. Rotary
embedding follows the half-rotation convention of Hugging Face models. Triton is imported only for
CUDA tensors, as in the other operators, because a CPU engine does not need it.
"""

import torch
from torch import Tensor
from torch.nn import functional

from effuse.kernels.pages import is_distinct, store_kv
from effuse.kernels.values import WeightedParts

# On the CPU fp32 products of 4 or more rows agree bitwise with each other; smaller ones do not.
MIN_ROWS = 4


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False
) -> Tensor:
    """x [T, in] times ``weight`` [out, in], always computed with at least MIN_ROWS rows.

    With `batch_invariant` a row's bits do not depend on other rows on a GPU either. That needs
    arguments that `products_hopper.is_supported` accepts; it raises ValueError for others.
    """
    if batch_invariant and x.is_cuda:
        from effuse.kernels import products_hopper

        return products_hopper.launch(x, weight, bias)
    num_rows = len(x)
    if num_rows >= MIN_ROWS:
        return functional.linear(x, weight, bias)
    padded = torch.cat([x, x.new_zeros(MIN_ROWS - num_rows, x.shape[1])])
    return functional.linear(padded, weight, bias)[:num_rows]


def halves(x: Tensor, weight: Tensor, *, batch_invariant: bool = False) -> Tensor:
    """x [T, in] times ``weight`` [out, in] as two sums, each over one half of `in`: [2, T, out]
    fp32, on a GPU, in a 16-bit type. Few columns have too few programs for the whole sum. With
    `batch_invariant`, many rows have both added already: [1, T, out]."""
    if batch_invariant:
        from effuse.kernels import products_hopper

        return products_hopper.launch(x, weight, shares=2)
    half = x.shape[1] // 2
    return torch.bmm(
        x.view(len(x), 2, half).transpose(0, 1),
        weight.view(len(weight), 2, half).permute(1, 2, 0),
        out_dtype=torch.float32,
    )


def lookup(token_ids: Tensor, rows: Tensor, first: int) -> Tensor:
    """[T, H]: of token_ids [T] int64 those of `rows` [V, H], which begin at id `first`; zeros for
    other ids."""
    if rows.is_cuda:
        from effuse.kernels import rowwise_triton

        return rowwise_triton.launch_lookup(token_ids, rows, first)
    own = token_ids - first
    is_other = (own < 0) | (own >= len(rows))
    return rows[own.clamp(0, len(rows) - 1)].masked_fill_(is_other[:, None], 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of ``x`` [..., H] and scale it by ``weight`` [H]; dtype of x."""
    if x.is_cuda:
        from effuse.kernels import rowwise_triton

        return rowwise_triton.launch_norm(x, weight, eps).view(x.shape)
    return _rms_norm_torch(x, weight, eps)


def rms_norm_residual(
    x: Tensor | WeightedParts, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(normalised sum, sum) of ``x`` and ``residual`` [T, H]; the sum is rounded to its dtype.

    ``x`` may be parts of a sum: [P, T, H] of a wider type from a split product, or weighted parts,
    whose own sum is rounded before the residual is added.
    """
    if residual.is_cuda:
        from effuse.kernels import rowwise_triton

        return rowwise_triton.launch_norm_residual(x, residual, weight, eps)
    x = x.total() if isinstance(x, WeightedParts) else x
    total = x + residual if x.dim() == 2 else (x.sum(0) + residual).to(residual.dtype)
    return _rms_norm_torch(total, weight, eps), total


def total_of(given: WeightedParts) -> Tensor:
    """The sums [T, H] of the parts; those of weight 0 may be anything on a GPU."""
    if given.parts.is_cuda:
        from effuse.kernels import rowwise_triton

        return rowwise_triton.launch_total(given)
    return given.total()


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [T, I], of ``gate_up`` [T, 2I] with the gate first; in its dtype."""
    if gate_up.is_cuda:
        from effuse.kernels import rowwise_triton

        return rowwise_triton.launch_swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def _rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = x.float()
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (values * scale).to(x.dtype) * weight


def make_cos_sin_cache(
    rotary_dim: int, num_positions: int, theta: float, device: torch.device
) -> Tensor:
    """[num_positions, R] fp32 for R rotated dimensions: cosines of the R/2 frequencies, then their
    sines. R may be less than a head has; then the head's other dimensions stay unchanged."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequency = 1.0 / theta**exponent
    angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(device)


def rotary(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] by ``positions`` [T] int64; new tensors, same dtype."""
    if q.is_cuda:
        from effuse.kernels import rotary_triton

        return rotary_triton.launch(q, k, cos_sin_cache, positions)
    cos, sin = cos_sin_cache[positions].to(q.dtype).unsqueeze(1).chunk(2, dim=-1)
    cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def rotary_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor]:
    """`rotary`, then `pages.store_kv` of the rotated k and of v.

    One kernel on CUDA for the unified layout. Two kernels for the distinct one, because a program
    for each token, which suits rotation, would write V in pieces of two bytes.
    """
    if q.is_cuda and not is_distinct(k_cache):
        from effuse.kernels import rotary_triton

        stored = (v, k_cache, v_cache, slot_mapping)
        return rotary_triton.launch(q, k, cos_sin_cache, positions, stored)
    q, k = rotary(q, k, cos_sin_cache, positions)
    store_kv(k, v, k_cache, v_cache, slot_mapping)
    return q, k


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    first = x[..., :width]
    turned = (first * cos).add_(first.roll(width // 2, dims=-1).mul_(signed_sin))
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], dim=-1)
