"""Attention cases, their poisoned memory, and the check against an explicit mask in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from effuse.kernels.attention import Partials, empty_partials, view_partials
from effuse.kernels.attention_batch import (
    AttentionBatch,
    ContextCut,
    cut_batch,
    make_attention_batch,
)
from operators.paths import Attention, Operators
from operators.pool import layer_of
from operators.references import block_attention_ref
from operators.tolerance import assert_close


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence: in-flight rows, cached tokens, block origin."""

    rows: int
    context: int
    origin: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One batch. ``magnitude`` multiplies the queries."""

    sequences: tuple[Row, ...]
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 16
    block_size: int = 16
    keys_token_major: bool = False
    values_token_major: bool = False
    splits: int | None = None
    batch_invariant: bool = False
    magnitude: float = 1.0


RAGGED = (Row(5, 0), Row(0, 7), Row(40, 33), Row(3, 1, origin=4), Row(16, 16, origin=16))
LONG = (Row(32, 200), Row(16, 64), Row(48, 0), Row(7, 129, origin=130))
PAGED = (Row(16, 64), Row(7, 129, origin=130))

CASES = {
    "ragged": Case(RAGGED),
    "one_row_without_context": Case((Row(1, 0),)),
    "only_empty_sequences": Case((Row(0, 5), Row(0, 0))),
    "context_page_minus_one": Case((Row(16, 15),)),
    "context_one_page": Case((Row(16, 16),)),
    "context_page_plus_one": Case((Row(16, 17),)),
    "bidirectional_prompt": Case((Row(37, 0, origin=21), Row(70, 0, origin=70))),
    "origin_inside_rows_with_context": Case((Row(50, 20, origin=41),)),
    "block_1_is_causal": Case((Row(20, 9),), block_size=1),
    "block_larger_than_rows": Case((Row(20, 9),), block_size=64),
    "long_context": Case(LONG),
    "split_context": Case(LONG, splits=4),
    "many_splits": Case((Row(3, 1300), Row(2, 90), Row(5, 1150)), q_heads=6, splits=11),
    "heads_7_to_1": Case(RAGGED, q_heads=7, kv_heads=1),
    "heads_14_to_2": Case((Row(33, 70), Row(9, 3)), q_heads=14, kv_heads=2),
    "one_head_each": Case(RAGGED, q_heads=3, kv_heads=3),
    "head_dim_64": Case(RAGGED, head_dim=64),
    "head_dim_128": Case(RAGGED, head_dim=128),
    "page_32": Case(PAGED, page_size=32, block_size=32),
    "page_64": Case(PAGED, page_size=64, block_size=8),
    "page_128": Case(PAGED, page_size=128),
    "page_24": Case(RAGGED, page_size=24),
    "token_major_pool": Case(RAGGED, keys_token_major=True, values_token_major=True),
    "keys_and_values_of_other_strides": Case(RAGGED, keys_token_major=True),
    "huge_scores": Case(PAGED, magnitude=300.0),
}

# Degrees by which the cached tokens of a case are cut over ranks, some of which have none.
CUT_CASES = [
    *itertools.product(("ragged", "split_context", "heads_14_to_2", "bidirectional_prompt"), (2,)),
    *itertools.product(("many_splits", "context_page_plus_one", "huge_scores"), (4,)),
]


def check(case: Case, ops: Operators, dtype: torch.dtype) -> None:
    """Output of a case; NaN lies in every slot and result that is not written."""
    call = build(case, ops.device, dtype)
    ops.attention(call)
    exact, plain = reference(case, call, torch.float64), reference(case, call, dtype)
    assert_close(call.out, exact, plain)


def check_cut_context(case: Case, ops: Operators, dtype: torch.dtype, degree: int) -> None:
    """Output of a case whose cached tokens are cut over ranks, a page of the case each, after their
    partial results are merged. One that holds no token gives zeros and -inf."""
    whole = replace(case, page_size=case.page_size * degree)
    call = build(whole, ops.device, dtype)
    exact, plain = reference(whole, call, torch.float64), reference(whole, call, dtype)
    parts = []
    for rank in range(degree):
        cut = ContextCut(rank, degree, case.page_size)
        batch, here = cut_batch(call.batch, cut), slice(rank * cut.turn, (rank + 1) * cut.turn)
        caches = [
            strided(cache[:, here].contiguous(), is_major)
            for cache, is_major in (
                (call.k_cache, case.keys_token_major),
                (call.v_cache, case.values_token_major),
            )
        ]
        part = replace(call, k_cache=caches[0], v_cache=caches[1], batch=batch.cached)
        parts.append(partial_of(part, ops, cached_only=True))
        is_empty = torch.tensor([cut.length(row.context) == 0 for row in case.sequences])
        rows = torch.repeat_interleave(is_empty, torch.tensor([r.rows for r in case.sequences]))
        assert (parts[-1].out.cpu()[rows] == 0).all()
        assert (parts[-1].lse.cpu()[rows] == -torch.inf).all()
        assert parts[-1].lse.cpu()[~rows].isfinite().all()
    in_flight = replace(part, batch=batch.in_flight, splits=None)
    own = partial_of(in_flight, ops, cached_only=False)
    packed = torch.cat([part.packed for part in parts])
    dealt = view_partials(packed, len(call.q), case.head_dim)
    assert_close(ops.merge_partials(dealt, own), exact, plain)


# Sequences whose beginnings of so many pages are those of the first of them; the last has none.
SHARED = Case((Row(4, 70), Row(7, 50, origin=49), Row(3, 48), Row(5, 33, origin=33), Row(9, 20)))
SHARED_RUNS = (((0, 1, 2), 3), ((3,), 1), ((4,), 0))


def check_shared(
    ops: Operators,
    dtype: torch.dtype,
    case: Case = SHARED,
    splits: Sequence[int | None] = (5,),
) -> None:
    """Output of a case whose runs of sequences read their beginnings together."""
    generator, size = torch.Generator().manual_seed(5), case.page_size
    tables = page_tables(case, generator)
    counts = [pages for members, pages in SHARED_RUNS for _ in members]
    for members, pages in SHARED_RUNS:
        for index in members:
            tables[index][:pages] = tables[members[0]][:pages]
    call = build(case, ops.device, dtype, tables)
    exact, plain = reference(case, call, torch.float64), reference(case, call, dtype)
    rest = [
        replace(row, context=row.context - count * size, origin=row.origin - count * size)
        for row, count in zip(case.sequences, counts, strict=True)
    ]
    own = [table[count:] for table, count in zip(tables, counts, strict=True)]
    batch = batch_of(replace(case, sequences=tuple(rest)), own, ops.device)
    rows = [sum(case.sequences[i].rows for i in members) for members, _ in SHARED_RUNS]
    beginnings = [
        Row(count, pages * size) for count, (_, pages) in zip(rows, SHARED_RUNS, strict=True)
    ]
    read = [tables[members[0]][:pages] for members, pages in SHARED_RUNS]
    together = batch_of(replace(case, sequences=tuple(beginnings)), read, ops.device)
    shared = cut_batch(together, ContextCut(0, 1, size)).cached
    found = partial_of(replace(call, batch=shared), ops, cached_only=True)
    merged = ops.merge_partials(
        found, partial_of(replace(call, batch=batch), ops, cached_only=False)
    )
    assert_close(merged, exact, plain)
    for programs in splits:
        call.out.fill_(float("nan"))
        ops.attention(replace(call, batch=replace(batch, shared=shared), splits=programs))
        assert_close(call.out, exact, plain)


def partial_of(call: Attention, ops: Operators, *, cached_only: bool) -> Partials:
    """The partial results of a call, in memory that held NaN."""
    rows, heads, dim = call.q.shape
    made = empty_partials(rows, heads, dim, call.q)
    made.packed.fill_(float("nan"))
    ops.attention(replace(call, out=made.out, lse=made.lse, cached_only=cached_only))
    return made


def check_alone_and_shuffled(case: Case, ops: Operators, dtype: torch.dtype) -> None:
    """Bitwise the same result for a sequence by itself, from pages in another order."""
    call = build(case, ops.device, dtype)
    ops.attention(call)
    begin = 0
    for index, row in enumerate(case.sequences):
        own = slice(begin, begin + row.rows)
        begin += row.rows
        pages = call.batch.page_table[index].tolist()[: pages_for(case, row)]
        moved = [len(call.k_cache) - 1 - page for page in pages]
        alone = replace(
            call,
            q=call.q[own],
            k=call.k[own],
            v=call.v[own],
            k_cache=call.k_cache.flip(0),
            v_cache=call.v_cache.flip(0),
            batch=batch_of(replace(case, sequences=(row,)), [moved], ops.device),
            out=torch.full_like(call.out[own], float("nan")),
        )
        ops.attention(alone)
        assert torch.equal(alone.out, call.out[own])


SHORT_CUTS = (8, 64, 72, 128, 192)
LONG_CUTS = (8, 64, 504, 512, 520, 1000, 1024, 1288)


def check_cut(
    ops: Operators,
    dtype: torch.dtype,
    cuts: Sequence[int] = SHORT_CUTS,
    splits: Sequence[int | None] = (None,),
    kv_heads: int = 2,
) -> None:
    """Bitwise the same rows if the beginning of a sequence is cached, wherever it ends, and by any
    number of programs. Two query heads read each of ``kv_heads``."""
    count = cuts[-1] + 8
    case = Case(
        (Row(count, 0),),
        q_heads=2 * kv_heads,
        kv_heads=kv_heads,
        block_size=8,
        batch_invariant=True,
        head_dim=64,
    )
    call = build(case, ops.device, dtype)
    ops.attention(call)
    pages = torch.arange(-(-count // case.page_size), device=ops.device).flip(0)
    shape = len(pages) * case.page_size, *call.k.shape[1:]
    caches = [torch.full(shape, float("nan"), dtype=dtype, device=ops.device) for _ in "kv"]
    for cache, rows in zip(caches, (call.k, call.v), strict=True):
        cache[:count] = rows
    paged = len(pages), case.page_size, *shape[1:]
    k_cache, v_cache = (cache.view(paged)[pages] for cache in caches)
    for cached, programs in itertools.product((0, *cuts), splits):
        later = replace(case, sequences=(Row(count - cached, cached),))
        own = slice(cached, count)
        rest = replace(
            call,
            q=call.q[own],
            k=call.k[own],
            v=call.v[own],
            k_cache=strided(k_cache, token_major=True),
            v_cache=strided(v_cache, token_major=True),
            batch=batch_of(later, [pages.tolist()], ops.device),
            out=torch.full_like(call.out[own], float("nan")),
            splits=programs,
        )
        ops.attention(rest)
        assert torch.equal(rest.out, call.out[own]), (cached, programs)


def build(
    case: Case, device: torch.device, dtype: torch.dtype, tables: list[list[int]] | None = None
) -> Attention:
    generator = torch.Generator().manual_seed(len(case.sequences) + case.head_dim)
    total = sum(row.rows for row in case.sequences)
    heads = case.q_heads + 2 * case.kv_heads
    # Queries, keys and values as slices of one projection, like in models.
    fused = torch.randn(total, heads, case.head_dim, generator=generator)
    fused[:, : case.q_heads] *= case.magnitude
    widths = [case.q_heads, case.kv_heads, case.kv_heads]
    q, k, v = torch.split(fused.to(device, dtype), widths, dim=1)
    tables = tables or page_tables(case, generator)
    k_cache, v_cache = poisoned_cache(case, tables, generator)
    return Attention(
        q=q,
        k=k,
        v=v,
        k_cache=strided(k_cache.to(device, dtype), case.keys_token_major),
        v_cache=strided(v_cache.to(device, dtype), case.values_token_major),
        batch=batch_of(case, tables, device),
        scale=case.head_dim**-0.5,
        out=torch.full((total, case.q_heads, case.head_dim), float("nan")).to(device, dtype),
        splits=case.splits,
        batch_invariant=case.batch_invariant,
    )


def pages_for(case: Case, row: Row) -> int:
    return -(-row.context // case.page_size)


def page_tables(case: Case, generator: torch.Generator) -> list[list[int]]:
    """Pages in random order from a pool that also has as many unreadable ones."""
    needed = [pages_for(case, row) for row in case.sequences]
    shuffled = torch.randperm(2 * sum(needed) + 3, generator=generator).tolist()
    return [[shuffled.pop() for _ in range(count)] for count in needed]


def poisoned_cache(
    case: Case, tables: list[list[int]], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """[pages, page_size, Hkv, D] with numbers in cached slots and NaN in all others."""
    pages = 2 * sum(map(len, tables)) + 3
    shape = (pages, case.page_size, case.kv_heads, case.head_dim)
    caches = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    for row, table in zip(case.sequences, tables, strict=True):
        for position in range(row.context):
            page, offset = table[position // case.page_size], position % case.page_size
            for cache in caches:
                cache[page, offset] = torch.randn(shape[2:], generator=generator)
    return caches


def strided(cache: Tensor, token_major: bool) -> Tensor:
    """The same values unchanged, or as a view into the pages of a pool."""
    if token_major:
        return cache
    _, view = layer_of(cache.shape, cache.dtype, cache.device)
    return view.copy_(cache)


def batch_of(case: Case, tables: list[list[int]], device: torch.device) -> AttentionBatch:
    return make_attention_batch(
        [row.rows for row in case.sequences],
        [row.context for row in case.sequences],
        tables,
        [row.origin for row in case.sequences],
        block_size=case.block_size,
        page_size=case.page_size,
        device=device,
    )


def reference(case: Case, call: Attention, dtype: torch.dtype) -> Tensor:
    """Output of all sequences, each by itself under its explicit mask."""
    outs = []
    begin = 0
    for index, row in enumerate(case.sequences):
        own = slice(begin, begin + row.rows)
        begin += row.rows
        q, k, v = (x[own].cpu().to(dtype) for x in (call.q, call.k, call.v))
        pages = call.batch.page_table[index].long()
        context = [
            cache[pages].flatten(0, 1)[: row.context].cpu().to(dtype)
            for cache in (call.k_cache, call.v_cache)
        ]
        mask = explicit_mask(row, case.block_size)
        outs.append(block_attention_ref(q, k, v, context[0], context[1], mask, scale=call.scale))
    return torch.cat(outs)


def explicit_mask(row: Row, block_size: int) -> Tensor:
    """Visibility entry by entry, in Python's own floor division."""
    blocks = [
        max((position - row.origin) // block_size, -1)
        for position in range(row.context, row.context + row.rows)
    ]
    seen = [[True] * row.context + [mine >= other for other in blocks] for mine in blocks]
    return torch.tensor(seen, dtype=torch.bool).view(row.rows, row.context + row.rows)
