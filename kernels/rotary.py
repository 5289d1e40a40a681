"""Rotary position embedding in the half-rotation convention of Hugging Face models.

Applies a table that the caller builds once with `make_cos_sin_cache`; scaling variants such as YaRN
would only need other tables. A table narrower than a head rotates the head's first dimensions and
leaves the rest unchanged.
"""

import torch
from torch import Tensor

from effuse.kernels.pages import is_distinct, store_kv


def make_cos_sin_cache(
    rotary_dim: int, num_positions: int, theta: float, device: torch.device
) -> Tensor:
    """[num_positions, R] fp32 for R rotated dimensions: cosines of the R/2 frequencies, then their
    sines."""
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
