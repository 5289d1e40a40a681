"""The layout of KV in a page, and the fingerprint by which two workers know that they agree on it.

Pure values. The memory itself is in memory.py, the holders of pages in pool.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from effuse.kvtransfer.messages import Field, KVPart

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DIGEST = "xxh3_128 of xxh3_64 of pieces of KV heads, under one seal"
HANDOFF = "2"  # of the messages of a handoff; workers with others exchange no pages
LAYOUT_KINDS = ("unified", "distinct")
PIECE_BYTES = 16  # of K in the distinct layout
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
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"layout dtype: expected one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}"
            )
        sizes = (self.num_layers, self.num_kv_heads, self.page_size, self.head_dim)
        if min(sizes) < 1:
            raise ValueError(f"layout sizes must be positive, got {sizes}")
        piece = PIECE_BYTES // DTYPE_BYTES[self.dtype]
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
        """Tokens in a page of the pool's tables: a page of each rank that cuts the context."""
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
        first = self.groups.start
        if groups.start < first or groups.stop > self.groups.stop:
            raise ValueError(f"groups {groups} are not all among {self.groups}")
        return range(groups.start - first, groups.stop - first)

    @cached_property
    def heads(self) -> range:
        """The model's KV heads that this rank's pool holds."""
        return self.part.heads

    def place_of(self, heads: range) -> range:
        """Where these heads of the model are in this rank's pool. Raises ValueError for heads
        that it does not hold."""
        first = self.heads.start
        if not heads or heads.start < first or heads.stop > self.heads.stop:
            raise ValueError(f"heads {heads} are not all among {self.heads}")
        return range(heads.start - first, heads.stop - first)

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
        return prod(self.page_shape) * DTYPE_BYTES[self.dtype]

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of one KV head of one group of layers in a page."""
        return prod(self.page_shape[2:]) * DTYPE_BYTES[self.dtype]

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


@dataclass(frozen=True, slots=True)
class FieldMismatch:
    """The first field in which two fingerprints differ."""

    name: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return (
            f"fingerprint field {self.name!r} differs: ours is {self.ours!r}, theirs is "
            f"{self.theirs!r}"
        )


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


def mismatch(ours: Sequence[Field], theirs: Sequence[Field]) -> FieldMismatch | None:
    """The first difference, or None. A field that one side lacks reads as "(absent)"."""
    if ours == theirs:
        return None
    mine, other = dict(map(_pair, ours)), dict(map(_pair, theirs))
    for name in [*mine, *(name for name in other if name not in mine)]:
        left, right = mine.get(name, "(absent)"), other.get(name, "(absent)")
        if left != right:
            return FieldMismatch(name, left, right)
    if len(theirs) != len(other):
        return FieldMismatch("(count)", str(len(ours)), f"{len(theirs)} with repeated names")
    return None


def _pair(field: Field) -> tuple[str, str]:
    return field.name, field.value
