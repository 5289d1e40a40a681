"""The layout of KV in a page, the fingerprint by which two workers know that they agree on it, and
the pool's tensor: one page after the other, each contiguous with all of its layers.

Values, views and bytes; pool.py has the holders of pages. Digests are in digest.py, copies between
a GPU's pages and the host in staging.py.
"""

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

import torch
from torch import Tensor

from effuse.kernels.pages import distinct_views, piece_elements, zero_distinct_tail
from effuse.kvtransfer.messages import Field, KVPart

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DIGEST = "xxh3_128 of xxh3_64 of pieces of KV heads, under one seal"
HANDOFF = "2"  # of the messages of a handoff; workers with others exchange no pages
LAYOUT_KINDS = ("unified", "distinct")
MOST_GROUPS = {"nixl": 8, "zmq": 16}
"""Most groups of a page's layers that leave one after another. A prompt waits for the last one,
which is long on a slow link. Over NIXL each group takes a descriptor for every page of every peer.
"""

Fingerprint = tuple[Field, ...]


@dataclass(frozen=True)
class KVLayout:
    """Order and sizes of the K and V in a page, which is contiguous.

    A page holds groups of layers. A group holds KV heads, a head the layers of its group, and a
    layer K and then V. So a range of heads of one group is one contiguous part of the page, and a
    stage of a pipeline holds a range of groups.
    "unified": K and V of a head are [page_size, head_dim].
    "distinct": K of a head is [head_dim / x, page_size, x] with x elements of 16 bytes, its V is
    [head_dim, page_size].
    """

    kind: str
    num_layers: int
    num_kv_heads: int  # the model's; `heads` are those of this rank
    head_dim: int
    page_size: int  # tokens in a page of this rank's memory
    dtype: str
    most_groups: int = MOST_GROUPS["nixl"]
    rank: int = 0  # of the worker's ranks, each of which has a pool of its own
    held: KVPart | None = None  # by this rank's pool; None: all
    copies: int = 1  # ranks that hold the same, if there are more ranks than heads
    copy: int = 0  # which of them this rank is

    def __post_init__(self) -> None:
        if self.kind not in LAYOUT_KINDS:
            raise ValueError(f"layout kind: expected one of {LAYOUT_KINDS}, got {self.kind!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"layout dtype: expected one of {sorted(DTYPES)}, got {self.dtype!r}")
        sizes = (self.num_layers, self.num_kv_heads, self.page_size, self.head_dim)
        if min(sizes) < 1:
            raise ValueError(f"layout sizes must be positive, got {sizes}")
        piece = piece_elements(DTYPES[self.dtype])
        if self.kind == "distinct" and self.head_dim % piece:
            raise ValueError(
                f"layout distinct: expected a head_dim that is a multiple of {piece} for "
                f"{self.dtype}, got {self.head_dim}"
            )

    @cached_property
    def part(self) -> KVPart:
        """The share that this rank's pool holds."""
        return self.held or KVPart(0, self.num_kv_heads, 0, self.num_groups)

    @property
    def context_rank(self) -> int:
        """Which of `context_degree` turns of every sequence's tokens this rank holds."""
        return self.part.turn

    @property
    def context_degree(self) -> int:
        """Ranks that hold the same heads for different tokens."""
        return self.part.turns

    @property
    def span(self) -> int:
        """Tokens in a page of the pool's tables: a page of each rank that splits the context."""
        return self.page_size * self.context_degree

    @property
    def span_bytes(self) -> int:
        """Bytes of such a page over all ranks; heads that several ranks hold count once."""
        return self.bytes_of(range(self.num_kv_heads)) * self.context_degree

    @cached_property
    def groups(self) -> range:
        """The model's groups of layers that this rank's pool holds."""
        return self.part.groups

    @property
    def layers(self) -> range:
        """The model's layers in these groups."""
        each = self.num_layers // self.num_groups
        return range(self.groups.start * each, self.groups.stop * each)

    def place_of_groups(self, groups: range) -> range:
        """Where these groups of the model are in a page of this rank's pool. Raises ValueError for
        groups that it does not hold."""
        return _place("groups", groups, self.groups)

    @cached_property
    def heads(self) -> range:
        """The model's KV heads that this rank's pool holds."""
        return self.part.heads

    def place_of(self, heads: range) -> range:
        """Where these heads of the model are in this rank's pool. Raises ValueError for heads
        that it does not hold."""
        return _place("heads", heads, self.heads)

    def bytes_of(self, heads: range, groups: range | None = None) -> int:
        """Bytes of so many heads in a page, whichever rank holds them; of all groups of layers, or
        of so many."""
        count = self.num_groups if groups is None else len(groups)
        return count * len(heads) * self.head_bytes

    def runs(self, groups: range, heads: range) -> tuple[int, int]:
        """The contiguous parts in which these groups and heads lie in a page: how many, and the
        bytes of each."""
        if len(heads) == len(self.heads):
            return 1, len(groups) * self.group_bytes
        return len(groups), len(heads) * self.head_bytes

    @cached_property
    def page_shape(self) -> tuple[int, int, int, int, int, int]:
        """Shape of one page: [groups and heads of this rank, layers of a group, 2, page_size,
        head_dim], in both orders within a head.
        """
        layers = self.num_layers // self.num_groups
        return (len(self.groups), len(self.heads), layers, 2, self.page_size, self.head_dim)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes in one page of this rank's pool, K and V of all of its layers."""
        return prod(self.page_shape) * DTYPES[self.dtype].itemsize

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of one KV head of one group of layers in a page."""
        return prod(self.page_shape[2:]) * DTYPES[self.dtype].itemsize

    @cached_property
    def num_groups(self) -> int:
        """Most groups of equally many consecutive layers in which a page is handed over."""
        return num_groups_of(self.num_layers, self.most_groups)

    @cached_property
    def group_bytes(self) -> int:
        """Bytes of one group of layers in a page; groups are contiguous."""
        return self.page_bytes // len(self.groups)

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages of the pool's tables for this many tokens."""
        return -(-num_tokens // self.span)


def _place(name: str, some: range, own: range) -> range:
    if not some or some.start < own.start or some.stop > own.stop:
        raise ValueError(f"{name} {some} are not all among {own}")
    return range(some.start - own.start, some.stop - own.start)


def num_groups_of(num_layers: int, most: int) -> int:
    """At most so many groups of equally many layers."""
    return next(n for n in range(min(num_layers, most), 0, -1) if num_layers % n == 0)


@dataclass(frozen=True, slots=True)
class Identity:
    """An engine's life for its peers, with the layout of its own pool."""

    incarnation: str
    fingerprint: Fingerprint
    layout: KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model's part of a fingerprint; the layout has the rest."""

    weights: str  # digest of the weights, including the adapter
    architecture: str
    block_size: int
    mask_token_id: int
    prompt_attention: str  # causal_blocks or bidirectional
    commit_rule: str  # which forward stores a block's KV
    deterministic: bool = False  # whether a row's bits do not depend on what else is computed
    unit_tokens: int = 0  # in a unit of kept KV, if not the fewest


def fingerprint(layout: KVLayout, facts: ModelFacts) -> Fingerprint:
    """Everything that must agree before a page may move, in a fixed order and as canonical text."""
    values = {
        "weights": facts.weights,
        "architecture": facts.architecture,
        "dtype": layout.dtype,
        "num_layers": layout.num_layers,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "page_size": layout.page_size,
        "layout": layout.kind,
        "block_size": facts.block_size,
        "mask_token_id": facts.mask_token_id,
        "prompt_attention": facts.prompt_attention,
        "commit_rule": facts.commit_rule,
        "layer_groups": layout.num_groups,
        "digest": DIGEST,
        "handoff": HANDOFF,
        "deterministic": str(facts.deterministic).lower(),
    }
    if facts.unit_tokens:  # older workers have no such field, and the fewest
        values["kv_unit_tokens"] = facts.unit_tokens
    return tuple(Field(name, str(value)) for name, value in values.items())


class PageMemory:
    """`num_pages` pages of KV in one tensor [pages, *page_shape]; only `layers` knows its order."""

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device | str = "cpu"
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.page_bytes = layout.page_bytes
        shape, dtype = (num_pages, *layout.page_shape), DTYPES[layout.dtype]
        if num_pages and torch.device(device).type == "cpu":
            self.tensor = torch.frombuffer(huge_pages(self.num_bytes), dtype=dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._host = bytes_of(self.tensor) if self.tensor.device.type == "cpu" else None

    @property
    def address(self) -> int:
        """Address of page 0 on its device."""
        return self.tensor.data_ptr()

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """The stream on which pages on a GPU are digested and copied: beside all forwards, with
        higher priority.
        """
        return torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer in either layout, as views [pages, kv_heads, page_size, head_dim]
        in which a head of a page is contiguous."""
        return [
            (layer[:, :, 0], layer[:, :, 1])
            for group in self.tensor.unbind(1)
            for layer in group.unbind(2)
        ]

    def layer_views(self) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer, as strided views of [pages, page_size, kv_heads, head_dim] or as
        in `kernels.pages`.
        """
        if self.layout.kind == "distinct":
            return [distinct_views(*layer) for layer in self.layers()]
        return [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in self.layers()]

    def byte_rows(self) -> Tensor:
        """The pool's bytes, one page in each row: [pages, page_bytes] uint8, without a copy."""
        return self.tensor.view(self.num_pages, -1).view(torch.uint8)

    def byte_parts(self, groups: range, heads: range) -> Tensor:
        """Bytes of these groups of layers and KV heads of all pages, in the model's numbers,
        without a copy: [pages, groups, heads, head_bytes] uint8."""
        place, part = self.layout.place_of(heads), self.layout.place_of_groups(groups)
        rows = self.byte_rows().view(self.num_pages, *self.layout.page_shape[:2], -1)
        return rows[:, part.start : part.stop, place.start : place.stop]

    def bytes_at(self, page_id: int, count: int = 1) -> memoryview:
        """Writable raw bytes of `count` consecutive pages, without a copy. Host memory only."""
        if self._host is None:
            raise ValueError(f"the host cannot see pages on {self.device}")
        if not 0 <= page_id <= page_id + count <= self.num_pages:
            raise IndexError(f"pages {page_id}..{page_id + count} of a pool of {self.num_pages}")
        start, size = page_id * self.page_bytes, count * self.page_bytes
        return self._host[start : start + size]

    def views(self, page_ids: Sequence[int], groups: range, heads: range) -> list[memoryview]:
        """Raw bytes of these groups of layers and KV heads, in the model's numbers, of these pages
        in order, in as few pieces as possible, without a copy. Host memory only."""
        if groups == self.layout.groups and len(heads) == len(self.layout.heads):
            return [self.bytes_at(first, count) for first, count in consecutive_runs(page_ids)]
        return list(self._parts(page_ids, groups, heads))

    def write(
        self,
        page_ids: Sequence[int],
        groups: range,
        payload: Sequence[memoryview],
        heads: range,
    ) -> None:
        """Overwrites these groups of layers and KV heads of these pages. Host memory only.

        payload: their bytes in order, split only between groups of layers. The sender's pool may
        hold other heads than this one, and contiguous parts of other lengths.
        """
        size = gcd(self.layout.runs(groups, heads)[1], *(part.nbytes for part in payload))
        targets = _pieces(self._parts(page_ids, groups, heads), size)
        for target, data in zip(targets, _pieces(payload, size), strict=True):
            target[:] = data

    def _parts(self, page_ids: Sequence[int], groups: range, heads: range) -> Iterator[memoryview]:
        """The contiguous parts of each page, page by page."""
        count, size = self.layout.runs(groups, heads)
        first = self.layout.place_of_groups(groups).start * self.layout.group_bytes
        first += self.layout.place_of(heads).start * self.layout.head_bytes
        starts = [first + group * self.layout.group_bytes for group in range(count)]
        for page_id in page_ids:
            page = self.bytes_at(page_id)
            for start in starts:
                yield page[start : start + size]

    def copy_page(self, source: int, target: int) -> None:
        """Copies a whole page to another one; on a GPU in the order of launches."""
        self.tensor[target].copy_(self.tensor[source])

    def zero_tail(self, page_id: int, num_used: int) -> None:
        """Clears the slots of a page from `num_used` on, so that its bytes are determined; of one
        that ranks hold together, those on this rank."""
        layout = self.layout
        if not 0 <= num_used <= layout.span:
            raise ValueError(f"{num_used} used slots in a page of {layout.span}")
        num_used -= layout.context_rank * layout.page_size
        num_used = min(max(num_used, 0), layout.page_size)
        page = self.tensor[page_id].flatten(0, 2)  # [heads of all layers, 2, page_size, head_dim]
        if self.layout.kind == "distinct":
            zero_distinct_tail(*distinct_views(page[:, None, 0], page[:, None, 1]), num_used)
        else:
            page[:, :, num_used:].zero_()


def _pieces(parts: Iterable[memoryview], size: int) -> Iterator[memoryview]:
    return (part[at : at + size] for part in parts for at in range(0, part.nbytes, size))


def consecutive_runs(page_ids: Sequence[int]) -> list[tuple[int, int]]:
    """The ids as (first, count) of maximal ascending runs, in order."""
    runs: list[tuple[int, int]] = []
    for page_id in page_ids:
        if runs and sum(runs[-1]) == page_id:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page_id, 1))
    return runs


def bytes_of(tensor: Tensor) -> memoryview:
    """Writable bytes of a contiguous host tensor; the view keeps its memory alive."""
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view


def huge_pages(num_bytes: int, descriptor: int = -1) -> mmap.mmap:
    """Zeroed private memory, at least one byte, in huge pages if the kernel has any. With an empty
    file's descriptor it is the file's, which other processes may map.

    With huge pages a handoff over NIXL takes 0.75 of the time, one over ZMQ 0.85. Raises OSError if
    the machine does not have that much memory.
    """
    if descriptor < 0:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        os.ftruncate(descriptor, num_bytes)
        memory = mmap.mmap(descriptor, num_bytes)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
