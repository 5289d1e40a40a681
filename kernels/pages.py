"""Stores K and V of packed rows in pages of either layout, and shows how far a forward is with it.

Unified pages are views [pages, page_size, Hkv, D] of any strides. In the distinct layout, which is
that of vLLM's paged attention, K lies in pieces of 16 bytes, [pages, Hkv, D / x, page_size, x] with
x elements a piece; V lies dimension by dimension, [pages, Hkv, D, page_size]. K has five dimensions
only in this layout.
A page is addressed by its id in the pool's memory; other modules decide which request may use it.

On a GPU the forwards themselves mark which groups of layers have stored their K and V, in memory
that the host reads without waiting for the device. After each group's last store a kernel writes
the forward's number into pinned memory, with and without CUDA graphs. On the CPU a forward counts
directly, for readers in other threads. A host that launches forwards ahead and only needs to see
progress follows places in the device's queue.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

PIECE_BYTES = 16


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write rows of k and v [T, Hkv, D] into one layer's views [pages, page_size, Hkv, D], or
    into views of the distinct layout.

    ``slot_mapping`` [T] int64 is ``page * page_size + offset``; -1 stores nothing. A slot must not
    occur twice.
    """
    if k.is_cuda:
        from effuse.kernels import pages_triton

        pages_triton.launch_store(k, v, k_cache, v_cache, slot_mapping)
        return
    page_size = v_cache.shape[3] if is_distinct(k_cache) else k_cache.shape[1]
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    if slots.numel() == 0:
        return
    page, offset = slots // page_size, slots % page_size
    if is_distinct(k_cache):
        _, heads, pieces, _, x = k_cache.shape
        k_cache[page, :, :, offset] = k[stored].view(-1, heads, pieces, x)
        v_cache[page, :, :, offset] = v[stored]
    else:
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

    Both may be of any page and head stride, but a head's part of a page must be contiguous, and
    pieces must divide D.
    """
    pages, heads, page_size, dim = keys.shape
    x = piece_elements(keys.dtype)
    k_cache = keys.flatten(2).view(pages, heads, dim // x, page_size, x)
    return k_cache, values.flatten(2).view(pages, heads, dim, page_size)


def zero_distinct_tail(keys: Tensor, values: Tensor, num_tokens: int) -> None:
    """Set to zero everything after the first ``num_tokens`` tokens of one or more pages' views."""
    keys[..., num_tokens:, :].zero_()
    values[..., num_tokens:].zero_()


def load_tokens(
    k_cache: Tensor, v_cache: Tensor, page: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """K and V [N, Hkv, D] of the tokens at ``offset`` [N] of ``page`` [N], by torch operators."""
    return k_cache[page, :, :, offset].flatten(2), v_cache[page, :, :, offset]


def write_mark(number: Tensor, target: Tensor) -> None:
    """Copies ``number`` [1] int64 into ``target`` [1] int64, after all work queued before.

    On a GPU ``target`` is pinned memory of the host: once the number is there, all kernels before
    this call have ended. A kernel copies it, so a CUDA graph may contain it.
    """
    if number.is_cuda:
        from effuse.kernels import pages_triton

        pages_triton.launch_mark(number, target)
    else:
        target.copy_(number)


class LayerMarks:
    """Progress of one model on one device, whose forwards run one after the other."""

    def __init__(self, num_layers: int, num_groups: int, device: torch.device) -> None:
        if num_layers % num_groups:
            raise ValueError(f"{num_layers} layers cannot form {num_groups} equal groups")
        self._group_layers = num_layers // num_groups
        self._on_cuda = device.type == "cuda"
        self._number = torch.zeros(1, dtype=torch.int64, device=device)  # of the current forward
        self._marks = torch.zeros(num_groups, dtype=torch.int64, pin_memory=self._on_cuda)
        self._seen = self._marks.numpy()
        self._num_begun = 0

    def begin(self) -> Callable[[], int]:
        """Begins a forward; returns a function that counts the stored groups of that forward."""
        self._num_begun += 1
        number = self._num_begun
        self._number.add_(1)

        def num_stored() -> int:
            # Later forwards write larger numbers, in the same order.
            return int((self._seen >= number).sum())

        return num_stored

    def stored(self, layer: int) -> None:
        """The layer's K and V have been stored, or the kernel that stores them was queued."""
        group, rest = divmod(layer + 1, self._group_layers)
        if not rest:
            write_mark(self._number, self._marks[group - 1 : group])


class Place(Protocol):
    """A place in a device's queue, as recorded by torch.cuda.Event."""

    def query(self) -> bool:
        """Whether all work before it has ended."""

    def synchronize(self) -> None:
        """Waits for that."""


class QueuedLayers:
    """Layers that a device has not ended yet. A forward is launched long before it ends, so ended
    layers are reported when the host looks or waits."""

    def __init__(self, place: Callable[[], Place], on_ended: Callable[[], None]) -> None:
        """`place` returns the place after all work queued so far; `on_ended` is called for each
        layer, in the thread that looks or waits."""
        self._place = place
        self._on_ended = on_ended
        self._places: deque[Place] = deque()

    def add(self, _layer: int) -> None:
        """A layer was queued."""
        self.look()
        self._places.append(self._place())

    def look(self) -> None:
        """Reports those that have ended, without waiting."""
        while self._places and self._places[0].query():
            self._places.popleft()
            self._on_ended()

    def wait(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Waits for one after another, for all or until `is_over`, and reports each as it ends."""
        while self._places and not is_over():
            self._places[0].synchronize()
            self.look()


def place_on_cuda() -> Place:
    """The place after all work of the current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
