"""Runs the checks on the Triton kernels in Triton's interpreter and prints one JSON line for each.

A separate program (`TRITON_INTERPRET=1 python -m operators.interpreted`): the variable must
be set before triton is imported and applies to the whole process. The interpreter computes bf16
wrongly without a message, hence fp32 and fp16 only; every kernel program costs about 10 ms.
"""

from __future__ import annotations

import json
import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from effuse.kernels import (
    attention_splits_triton,
    experts_routes_triton,
    sampling_edits_triton,
    sampling_finish_triton,
    sampling_triton,
    step_plan_triton,
)
from effuse.kernels.attention_batch import make_attention_batch
from effuse.kernels.attention_splits_triton import (
    SPLIT_STEP,
    merge_parts,
    tokens_per_split,
)
from effuse.kernels.sampling import gumbel_of_words
from effuse.kernels.sampling_shared_triton import gumbel_of_high_bits, sampling_shape
from effuse.kernels.values import LogitEdits, RowSampling
from operators import (
    attention,
    copies,
    digests,
    distinct,
    edits,
    experts,
    paths,
    peers,
    rows,
    sampling,
)
from operators.interpreter import use_interpreter
from operators.paths import Operators, triton_kernels

OPS = triton_kernels(torch.device("cpu"), max_chunk=32)
# The search for a cut-off reads a row 35 times, so its rows get few tokens in two chunks.
FILTER_OPS = triton_kernels(torch.device("cpu"), max_chunk=64)
Check = Callable[[], None]

SHRUNK = 16  # how many times smaller the parts are that sorting shares out here
FEWER = 4  # and how many times fewer of them a program adds up at once

HALF_TOO = ("ragged", "heads_7_to_1", "head_dim_128", "huge_scores", "split_context")
# How cached tokens are read is all that differs; stage 2 is that of the unified layout.
DISTINCT = (
    *("ragged", "only_empty_sequences", "context_page_minus_one", "context_page_plus_one"),
    *("split_context", "heads_7_to_1", "huge_scores"),
    *("page_24", "page_32", "page_64", "page_128", "origin_inside_rows_with_context"),
)
FILTERED = [name for name in sampling.CASES if name.startswith(("top_", "filters_"))]
TWO_SHARES_TOO = ("greedy", "ties_take_lowest_id", "all_minus_inf", "drawn")
PLAIN = [name for name in sampling.CASES if name not in FILTERED]


def attention_checks() -> Iterator[tuple[str, Check]]:
    for name, case in attention.CASES.items():
        yield f"{name}-fp32", partial(attention.check, case, OPS, torch.float32)
        if name in HALF_TOO:
            yield f"{name}-fp16", partial(attention.check, case, OPS, torch.float16)
    for name, degree in attention.CUT_CASES:
        case, dtype = attention.CASES[name], torch.float32
        yield (
            f"{name}-cut-by-{degree}",
            partial(attention.check_cut_context, case, OPS, dtype, degree),
        )
    ragged = attention.CASES["ragged"]
    alone = partial(attention.check_alone_and_shuffled, ragged, OPS, torch.float32)
    yield "alone_and_shuffled", alone
    for dtype in (torch.float32, torch.float16):
        yield f"cut-{dtype}", partial(attention.check_cut, OPS, dtype, kv_heads=1)
        yield f"shared-{dtype}", partial(attention.check_shared, OPS, dtype)
    yield "splits_are_even", check_splits
    yield "parts", check_parts


def distinct_checks() -> Iterator[tuple[str, Check]]:
    for name in DISTINCT:
        yield f"{name}-fp32", partial(distinct.check, attention.CASES[name], OPS, torch.float32)
    for name in ("ragged", "page_64", "split_context"):
        yield f"{name}-fp16", partial(distinct.check, attention.CASES[name], OPS, torch.float16)
    for dtype in (torch.float32, torch.float16):
        suffix = str(dtype).removeprefix("torch.")
        yield f"store-{suffix}", partial(distinct.check_store, OPS, dtype)
    yield "store-nothing", partial(distinct.check_store_of_nothing, OPS, torch.float32)


def row_checks() -> Iterator[tuple[str, Check]]:
    for dtype in (torch.float32, torch.float16):
        suffix = str(dtype).removeprefix("torch.")
        for shape in rows.SHAPES:
            yield f"norm-{shape}-{suffix}", partial(rows.check_norm, OPS, dtype, shape)
            yield f"residual-{shape}-{suffix}", partial(rows.check_norm_residual, OPS, dtype, shape)
            yield f"swiglu-{shape}-{suffix}", partial(rows.check_swiglu, OPS, dtype, shape)
        for heads in rows.HEADS:
            for stores in (False, True):
                name = f"rotary-{heads}-{'store' if stores else 'alone'}-{suffix}"
                yield name, partial(rows.check_rotary, OPS, dtype, heads, stores=stores)
        total = partial(rows.check_total, paths.total_on_triton, torch.device("cpu"), dtype)
        yield f"total-{suffix}", total
        look = paths.lookup_on_triton
        yield f"lookup-{suffix}", partial(rows.check_lookup, look, torch.device("cpu"), dtype)
        yield f"norm_of_heads-{suffix}", partial(rows.check_norm_of_heads, OPS, dtype)
        yield f"store-{suffix}", partial(rows.check_store, OPS, dtype)
    yield "store-nothing", partial(rows.check_store_of_nothing, OPS, torch.float32)
    launches = step_plan_triton.launch_gather, step_plan_triton.launch_exchange
    yield "last_rows", partial(rows.check_last_rows, *launches, torch.device("cpu"))


def sampling_checks() -> Iterator[tuple[str, Check]]:
    for name in PLAIN:
        # Two chunks of 32 to a segment.
        yield name, partial(check_sampling, name, OPS, 300)
    for name in [*FILTERED, *sampling.TOP_K_FIRST]:
        yield name, partial(check_sampling, name, FILTER_OPS, 70)
    for name in PLAIN:
        for count in (2, 4) if name in TWO_SHARES_TOO else (4,):
            yield f"{name}-{count}-shares", partial(check_sampling, name, of_shares(count), 304)
    free = [sampling.CASES[name] for name in sampling.NOT_FINITE if name in PLAIN]
    yield (
        "not_finite-shares",
        partial(sampling.check_not_finite, free, of_shares(2), torch.float32, 72),
    )
    broken = [sampling.CASES[name] for name in sampling.NOT_FINITE]
    yield "not_finite", partial(sampling.check_not_finite, broken, FILTER_OPS, torch.float32, 70)
    yield "gumbel_of_every_kind_of_uniform", check_gumbel
    cpu = torch.device("cpu")
    for name, case in edits.CASES.items():
        yield f"edits-{name}", partial(edits.check, [case], edit_on_triton, cpu, 300)
    together = list(edits.CASES.values())
    yield "edits-together", partial(edits.check, together, edit_on_triton, cpu, 301)


def of_shares(count: int) -> Operators:
    """Candidates from the records of so many shares of the vocabulary."""
    shape = sampling_shape(76, 32)

    def record(
        logits: torch.Tensor, settings: RowSampling, mask_token_id: int, first_token: int
    ) -> torch.Tensor:
        return sampling_triton.launch_record(logits, settings, mask_token_id, first_token, shape)

    sample = sampling.by_shares(count, record, sampling_finish_triton.launch_shares)
    return replace(OPS, sample_confidence=sample)


def edit_on_triton(logits: torch.Tensor, changes: LogitEdits, mask_token_id: int) -> torch.Tensor:
    changed = logits.clone()
    sampling_edits_triton.launch(changed, changes, mask_token_id, max_chunk=128)
    return changed


def digest_checks() -> Iterator[tuple[str, Check]]:
    """Every length with every kind and one seed, so that each of them meets every seed."""
    launch, cpu = digests.launch, torch.device("cpu")
    for row, length in enumerate(digests.LENGTHS):
        for column, kind in enumerate(digests.KINDS):
            seed = digests.SEEDS[(row + column) % len(digests.SEEDS)]
            yield f"{length}-{kind}", partial(digests.check, launch, cpu, length, kind, [seed])
    yield "runs", partial(digests.check_runs, launch, cpu)


def copy_checks() -> Iterator[tuple[str, Check]]:
    yield from copies.checks(torch.device("cpu"))
    yield "small-tiles", copies.check_in_small_tiles


def expert_checks() -> Iterator[tuple[str, Check]]:
    cpu = torch.device("cpu")
    for name, routing in experts.ROUTINGS.items():
        for biased in (False, True):
            check = partial(experts.check_route, paths.route_on_triton, cpu, routing, biased=biased)
            yield f"route-{name}-{'biased' if biased else 'plain'}", check
    yield "route-nan", partial(experts.check_route_of_no_number, paths.route_on_triton, cpu)
    for case in experts.SORTED[:-2]:
        sort = experts_routes_triton.launch_sort
        yield f"sort-{case[0]}", partial(experts.check_sort, sort, cpu, *case)
    yield "sort-401", partial(experts.check_sort, sort, cpu, 401, 10, 32)  # three large parts
    for num_rows, num_experts, tile_rows in experts.SORTED[-2:]:
        small = num_rows // SHRUNK // FEWER, num_experts, tile_rows
        yield f"sort-{num_rows}-shrunk", partial(check_sort_in_small_parts, small)
    for name, layer in experts.LAYERS.items():
        for dtype in (torch.float32, torch.float16):
            suffix = str(dtype).removeprefix("torch.")
            check = partial(experts.check_mlp, paths.experts_on_triton, cpu, dtype, layer)
            yield f"{name}-{suffix}", check
            weights_first = partial(experts.check_mlp, paths.experts_invariant, cpu, dtype, layer)
            yield f"{name}-invariant-{suffix}", weights_first
    few = experts.LAYERS["many_tiles"]
    spread = experts.Spread(
        paths.own_routes_on_triton, paths.experts_on_triton, paths.total_on_triton
    )
    yield "spread", partial(experts.check_spread, spread, cpu, torch.float32, few)
    one_row = experts.LAYERS["one_row"]
    yield "spread-shared", partial(experts.check_spread, spread, cpu, torch.float32, one_row, 4)
    yield "crowd", partial(experts.check_crowd, paths.experts_on_triton, cpu, torch.float32)
    grouped, layer = paths.experts_grouped, experts.LAYERS["odd_sizes"]
    yield "grouped", partial(experts.check_mlp, grouped, cpu, torch.float32, layer)
    yield "grouped-crowd", partial(experts.check_crowd, grouped, cpu, torch.float32)


GROUPS = {
    "attention": attention_checks,
    "distinct": distinct_checks,
    "experts": expert_checks,
    "rows": row_checks,
    "peers": peers.checks,
    "sampling": sampling_checks,
    "digests": digest_checks,
    "copies": copy_checks,
}


def check_sort_in_small_parts(case: tuple[int, int, int]) -> None:
    """As many turns as on a GPU, over fewer parts, each of fewer picks: a large part takes the
    interpreter 0.6 s, a small one 80 ms."""
    module = experts_routes_triton
    few, many, parts = module.FEW_PICKS, module.MANY_PICKS, module.PARTS_TOGETHER
    with patch.multiple(
        module,
        FEW_PICKS=few // SHRUNK,
        MANY_PICKS=many // SHRUNK,
        PARTS_TOGETHER=parts // FEWER,
    ):
        experts.check_sort(experts_routes_triton.launch_sort, torch.device("cpu"), *case)


def check_sampling(name: str, ops: Operators, vocab_size: int) -> None:
    case = (sampling.CASES | sampling.TOP_K_FIRST)[name]
    sampling.check([replace(case, rows=1)], ops, torch.float32, vocab_size)


@triton.jit  # type: ignore[untyped-decorator]
def _gumbel_kernel(bits, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, COUNT)
    tl.store(out + place, gumbel_of_high_bits(tl.load(bits + place)))


def check_gumbel() -> None:
    """The device's noise against fp64, densest where the uniform is near 0, 1/2 and 1."""
    near = torch.arange(1024)
    middle = torch.arange(1024) * (2**24 // 1024)
    bits = torch.cat([near, middle, 2**23 - 512 + near, 2**24 - 1024 + near]).int()
    out = torch.full((4096,), float("nan"))
    _gumbel_kernel[(1,)](bits, out, COUNT=4096)
    torch.testing.assert_close(out, gumbel_of_words(bits.long() << 8), rtol=2e-6, atol=1e-6)


@triton.jit  # type: ignore[untyped-decorator]
def _share_kernel(contexts, rows, out, splits, STEP: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, COUNT)
    share = tokens_per_split(tl.load(contexts + place), tl.load(rows + place), splits, STEP)
    tl.store(out + place, share)


def check_splits() -> None:
    """No more splits than allowed, and none longer than the others by a step or more."""
    lengths = (0, 1, 127, 128, 129, 640, 2080, 8191)
    pairs = torch.cartesian_prod(torch.tensor(lengths), torch.tensor([1, 31, 128, 160])).int()
    contexts, rows = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    for splits in (1, 2, 3, 4, 11):
        share = torch.zeros_like(contexts)
        _share_kernel[(1,)](contexts, rows, share, splits, STEP=SPLIT_STEP, COUNT=len(contexts))
        used = (-(-contexts // share)).clamp(min=1)
        last = contexts + rows - (used - 1) * share
        assert not (share % SPLIT_STEP).any()
        assert (used <= splits).all()
        assert ((last > 0) & ((used < splits) | (last < share + SPLIT_STEP))).all()
        assert (share < -(-(contexts + rows) // splits) + SPLIT_STEP).all()


def check_parts() -> None:
    """Parts against a softmax over all keys in fp64; NaN lies in every part that no token sees.

    Parts are eight times shorter than on a GPU, and so are the sequences, because each token takes
    the interpreter 20 ms.
    """
    sequences = ((137, 9, 137), (62, 3, 0), (0, 88, 0), (576, 3, 576), (12, 5, 0))
    heads, dim, block, part_keys = 3, 16, 8, 64
    batch = make_attention_batch(
        [count for _, count, _ in sequences],
        [context for context, _, _ in sequences],
        [[0] * -(-context // 16) for context, _, _ in sequences],
        [origin for _, _, origin in sequences],
        block_size=block,
        page_size=16,
        device=torch.device("cpu"),
    )
    tokens, count = sum(own for _, own, _ in sequences), 10
    sums = torch.full((count, tokens, heads, dim), float("nan"))
    states = torch.full((2 * count, tokens, heads), float("nan"))
    out = torch.full((tokens, heads, dim), 7.0)
    expected, draw, token = out.double(), torch.Generator().manual_seed(4), 0
    for context, count_rows, origin in sequences:
        for row in range(count_rows):
            position = context + row
            seen = min(position + block - (position - origin) % block, context + count_rows)
            scores = 3 * torch.randn(heads, seen, generator=draw)
            values = torch.randn(heads, seen, dim, generator=draw)
            for part, begin in enumerate(range(0, seen, part_keys)):
                own = slice(begin, begin + part_keys)
                peak = scores[:, own].amax(1)
                weights = torch.exp2(scores[:, own] - peak[:, None])
                sums[part, token] = (weights[:, :, None] * values[:, own]).sum(1)
                states[part, token], states[count + part, token] = peak, weights.sum(1)
            if context + count_rows > part_keys:
                weights = torch.softmax(scores.double() * math.log(2), 1)
                expected[token] = (weights[:, :, None] * values).sum(1)
            token += 1
    with patch.object(attention_splits_triton, "PART_KEYS", part_keys):
        merge_parts(sums, states, batch, out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def main() -> None:
    use_interpreter()
    warnings.simplefilter("error")
    # Rows of -inf give inf - inf in lanes that are then masked: numpy's warning is no finding.
    warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)
    # Beside the best of no token yet, any token has room: exp2 of 1e30.
    warnings.filterwarnings("ignore", "overflow encountered in exp2", RuntimeWarning)
    # As on a device, the largest of nothing but NaN is NaN.
    warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
    for group, checks in GROUPS.items():
        for name, check in checks():
            try:
                check()
                failure = ""
            except AssertionError:
                failure = traceback.format_exc()
            print(json.dumps({"name": f"{group} {name}", "failure": failure}), flush=True)


if __name__ == "__main__":
    main()
