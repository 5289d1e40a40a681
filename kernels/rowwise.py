"""Operations on each row by itself: normalisation with or without the addition of the residual, the
gated activation of Llama-type MLPs, rotary position embedding, a product whose rows do not depend
on each other, and the storing of a row's K and V in its page.

Means are taken in fp32 whatever the dtype, in an order that does not depend on other rows. Rotary
embedding follows the half-rotation convention of Hugging Face models. Triton is imported only for
CUDA tensors, as in the other operators, because a CPU engine does not need it.

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
from torch.nn import functional

from effuse.kernels.values import WeightedParts

PIECE_BYTES = 16
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
    """`rotary`, then `store_kv` of the rotated k and of v.

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
