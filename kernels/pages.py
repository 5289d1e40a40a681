"""Moving K and V between packed rows and pages: store, load, gather, scatter, zero a page's tail.

A page is addressed by its id in the pool's memory; who may use a page is not decided here.
"""

import torch
from torch import Tensor

from effuse.kernels import pages_distinct


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write rows of k and v [T, Hkv, D] into one layer's views [pages, page_size, Hkv, D], or
    into views of the distinct layout (`pages_distinct`).

    ``slot_mapping`` [T] int64 holds ``page * page_size + offset``; -1 stores nothing. A slot must
    not occur twice.
    """
    if pages_distinct.is_distinct(k_cache):
        pages_distinct.store_kv(k, v, k_cache, v_cache, slot_mapping)
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


def store_kv_ref(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """`store_kv` as a loop over rows."""
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, k_cache.shape[1])
            k_cache[page, offset] = k[row]
            v_cache[page, offset] = v[row]


def load_kv(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """K and V [N, Hkv, D] of ``slots`` [N] int64, all of them >= 0."""
    if pages_distinct.is_distinct(k_cache):
        return pages_distinct.load_kv(k_cache, v_cache, slots)
    if k_cache.is_cuda:
        from effuse.kernels import pages_triton

        return pages_triton.launch_load(k_cache, v_cache, slots)
    page, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
    return k_cache[page, offset], v_cache[page, offset]


def gather_pages(memory: Tensor, page_ids: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy pages ``page_ids`` [N] int64 of ``memory`` [pages, ...] into one contiguous run."""
    if out is None:
        out = memory.new_empty((len(page_ids), *memory.shape[1:]))
    return torch.index_select(memory, 0, page_ids, out=out)


def scatter_pages(pages: Tensor, memory: Tensor, page_ids: Tensor) -> None:
    """Copy ``pages`` [N, ...] to the places ``page_ids`` [N] int64 of ``memory``, all different."""
    if memory.is_cuda and memory.is_contiguous() and pages.is_contiguous():
        from effuse.kernels import pages_triton

        pages_triton.launch_scatter(pages, memory, page_ids)
        return
    memory.index_copy_(0, page_ids, pages)


def zero_tail(memory: Tensor, page_id: int, num_tokens: int) -> None:
    """Zero what lies behind the first ``num_tokens`` tokens of a page, in all layers, K and V.

    ``memory`` is the unified pool [pages, layers, 2, kv_heads, page_size, head_dim].
    """
    page_size = memory.shape[4]
    if not 0 <= num_tokens <= page_size:
        raise ValueError(f"num_tokens must be within 0..{page_size}, got {num_tokens}")
    memory[page_id, :, :, :, num_tokens:].zero_()
