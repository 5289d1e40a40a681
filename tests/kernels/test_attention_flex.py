"""FlexAttention over gathered keys gives the explicit mask's results, packed or not."""

from __future__ import annotations

import pytest
import torch
from operators import attention
from operators.attention import Case, build
from operators.tolerance import assert_close

from effuse.kernels.attention_flex import FlexAttention
from effuse.kernels.pages import distinct_views

CPU = torch.device("cpu")
FAR = Case(
    (attention.Row(130, 200), attention.Row(7, 700, origin=701), attention.Row(70, 0, origin=40)),
    q_heads=14,
    kv_heads=2,
    page_size=32,
    block_size=32,
)
CASES = attention.CASES | {"several_blocks_of_the_mask": FAR}


@pytest.mark.parametrize("name", CASES)
def test_equals_explicit_mask(name: str) -> None:
    """NaN lies in every slot that is not cached."""
    case = CASES[name]
    call = build(case, CPU, torch.float32)
    attend = FlexAttention()
    out = attend(call.q, call.k, call.v, call.k_cache, call.v_cache, call.batch, scale=call.scale)
    exact = attention.reference(case, call, torch.float64)
    plain = attention.reference(case, call, torch.float32)
    assert_close(out, exact, plain)


def test_a_plan_serves_one_batch_alone() -> None:
    attend = FlexAttention()
    for name in ("ragged", "long_context", "ragged"):
        case = CASES[name]
        call = build(case, CPU, torch.float32)
        for _layer in range(2):
            out = attend(
                call.q, call.k, call.v, call.k_cache, call.v_cache, call.batch, scale=call.scale
            )
            exact = attention.reference(case, call, torch.float64)
            assert_close(out, exact, attention.reference(case, call, torch.float32))


def test_blocks_of_the_mask_are_counted_as_they_are_seen() -> None:
    """Every visible key lies in a counted block, and blocks called full hide none."""
    call = build(FAR, CPU, torch.float32)
    attend = FlexAttention()
    attend(call.q, call.k, call.v, call.k_cache, call.v_cache, call.batch, scale=call.scale)
    assert attend._last is not None
    mask = attend._last[1].mask
    assert mask.full_kv_num_blocks is not None and int(mask.full_kv_num_blocks.sum()) > 0
    rows, keys = mask.seq_lengths
    for sequence, row in enumerate(FAR.sequences):
        for block in range(mask.kv_num_blocks.shape[2]):
            queries = torch.arange(block * 128, min(rows, block * 128 + 128))
            queries = queries[queries < row.rows * 7]
            seen = mask.mask_mod(
                torch.tensor(sequence), torch.tensor(0), queries[:, None], torch.arange(keys)
            )
            full = int(mask.full_kv_num_blocks[sequence, 0, block])
            listed = full + int(mask.kv_num_blocks[sequence, 0, block])
            assert bool(seen[:, : full * 128].all())
            assert not bool(seen[:, listed * 128 :].any())


def test_a_sequence_does_not_see_what_another_one_holds() -> None:
    """The rows of the second are padding of the first, which is shorter."""
    call = build(Case((attention.Row(3, 1), attention.Row(8, 0))), CPU, torch.float32)
    attend = FlexAttention()
    cached = call.k_cache, call.v_cache
    before = attend(call.q, call.k, call.v, *cached, call.batch, scale=call.scale)[:3]
    for rows in (call.q, call.k, call.v):
        rows[3:] = torch.nan
    after = attend(call.q, call.k, call.v, *cached, call.batch, scale=call.scale)[:3]
    assert torch.equal(after, before)


def test_the_distinct_layout_is_refused() -> None:
    call = build(CASES["ragged"], CPU, torch.float32)
    memory = torch.zeros(9, 2, 16, 32)
    with pytest.raises(ValueError, match="reads the unified KV layout"):
        FlexAttention()(
            call.q, call.k, call.v, *distinct_views(memory, memory), call.batch, scale=1
        )
