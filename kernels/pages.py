"""Stores K and V of packed rows in pages of either layout.

Unified pages are views [pages, page_size, Hkv, D] of any strides. In the distinct layout, which is
that of vLLM's paged attention, K lies in pieces of 16 bytes, [pages, Hkv, D / x, page_size, x] with
x elements a piece; V lies dimension by dimension, [pages, Hkv, D, page_size]. K has five dimensions
only in this layout.
A page is addressed by its id in the pool's memory; other modules decide which request may use it.
"""

import torch
from torch import Tensor

PIECE_BYTES = 16


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write rows of k and v [T, Hkv, D] into one layer's views [pages, page_size, Hkv, D], or
    into views of the distinct layout.

    ``slot_mapping`` [T] int64 is ``page * page_size + offset``; -1 stores nothing. A slot must not
    occur twice.
    """
    if is_distinct(k_cache):
        _store_distinct(k, v, k_cache, v_cache, slot_mapping)
        return
    if k.is_cuda:
        from effuse.kernels import pages_triton

        pages_triton.launch_store(k, v, k_cache, v_cache, slot_mapping)
        return
    page_size = k_cache.shape[1]
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    if slots.numel() == 0:
        return
    page, offset = slots // page_size, slots % page_size
    k_cache[page, offset] = k[stored]
    v_cache[page, offset] = v[stored]


def is_distinct(k_cache: Tensor) -> bool:
    """Whether one layer's K is a view of the distinct layout."""
    return k_cache.dim() == 5


def of_heads(k_cache: Tensor, v_cache: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
    """One layer's views of some of its KV heads, in either layout."""
    if is_distinct(k_cache):
        return k_cache[:, heads], v_cache[:, heads]
    return k_cache[:, :, heads], v_cache[:, :, heads]


def piece_elements(dtype: torch.dtype) -> int:
    """Elements in a piece of K: the x of the layout."""
    return PIECE_BYTES // dtype.itemsize


def distinct_views(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of one layer over the memory of ``keys`` and ``values`` [pages, Hkv, page_size, D].

    Both may be of any page and head stride, but a head's part of a page must be contiguous. Raises
    ValueError if pieces do not divide D.
    """
    pages, heads, page_size, dim = keys.shape
    x = piece_elements(keys.dtype)
    if dim % x:
        raise ValueError(
            f"the distinct layout needs a head_dim that is a multiple of {x} for {keys.dtype}, "
            f"got {dim}"
        )
    k_cache = keys.flatten(2).view(pages, heads, dim // x, page_size, x)
    return k_cache, values.flatten(2).view(pages, heads, dim, page_size)


def zero_distinct_tail(keys: Tensor, values: Tensor, num_tokens: int) -> None:
    """Set to zero everything after the first ``num_tokens`` tokens of one or more pages' views."""
    keys[..., num_tokens:, :].zero_()
    values[..., num_tokens:].zero_()


def _store_distinct(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    if k.is_cuda:
        from effuse.kernels import pages_distinct_triton

        pages_distinct_triton.launch_store(k, v, k_cache, v_cache, slot_mapping)
        return
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    if slots.numel() == 0:
        return
    page_size = v_cache.shape[3]
    page, offset = slots // page_size, slots % page_size
    _, heads, pieces, _, x = k_cache.shape
    k_cache[page, :, :, offset] = k[stored].view(-1, heads, pieces, x)
    v_cache[page, :, :, offset] = v[stored]


def load_tokens(
    k_cache: Tensor, v_cache: Tensor, page: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """K and V [N, Hkv, D] of the tokens at ``offset`` [N] of ``page`` [N], by torch operators."""
    return k_cache[page, :, :, offset].flatten(2), v_cache[page, :, :, offset]
