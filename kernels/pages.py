"""Moving K and V between packed rows and pages: store and load.

A page is addressed by its id in the pool's memory; who may use a page is not decided here.
"""

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
