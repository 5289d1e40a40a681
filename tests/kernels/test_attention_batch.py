"""Refusals of a batch, and how it cuts rows into segments."""

from __future__ import annotations

import pytest
import torch

from effuse.kernels.attention_batch import AttentionBatch, block_end, make_attention_batch

CPU = torch.device("cpu")


def batch(
    rows: list[int], contexts: list[int], pages: list[list[int]], origins: list[int]
) -> AttentionBatch:
    return make_attention_batch(
        rows, contexts, pages, origins, block_size=4, page_size=8, device=CPU
    )


def test_tensors_hold_what_was_given() -> None:
    made = batch([3, 0, 2], [9, 0, 8], [[4, 2], [], [7]], [0, 5, 1])
    assert made.cu_seqlens.tolist() == [0, 3, 3, 5]
    assert made.context_lens.tolist() == [9, 0, 8]
    assert made.page_table.tolist() == [[4, 2], [0, 0], [7, 0]]
    assert made.block_origins.tolist() == [0, 5, 1]
    assert (made.max_seqlen, made.max_context) == (3, 9)
    assert made.cu_seqlens.dtype == made.page_table.dtype == torch.int32


@pytest.mark.parametrize("num_seqs", range(1, 9))
def test_no_number_of_sequences_makes_other_kernels(num_seqs: int) -> None:
    """Triton compiles a kernel anew for a pointer that is no multiple of 16."""
    made = batch([1] * num_seqs, [9] * num_seqs, [[4, 2]] * num_seqs, [5] * num_seqs)
    tensors = (made.cu_seqlens, made.context_lens, made.page_table, made.block_origins)
    assert [tensor.data_ptr() % 16 for tensor in tensors] == [0] * 4
    assert made.context_lens.tolist() == [9] * num_seqs
    assert made.block_origins.tolist() == [5] * num_seqs


def test_cached_tokens_are_gathered_in_position_order() -> None:
    made = batch([1, 1], [10, 2], [[4, 2], [7]], [0, 0])
    assert made.gather is not None
    assert made.gather.token_pages.tolist() == [4] * 8 + [2] * 2 + [7] * 2
    assert made.gather.token_offsets.tolist() == [*range(8), 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("rows", "context", "origin", "ends"),
    [
        pytest.param(8, 0, 0, (4, 8), id="whole_blocks"),
        pytest.param(5, 2, 0, (4, 7), id="ragged_at_both_ends"),
        pytest.param(9, 0, 6, (6, 9), id="prompt_before_origin_is_one_segment"),
        pytest.param(3, 0, 6, (3,), id="all_before_origin"),
        pytest.param(6, 5, 3, (7, 11), id="origin_not_aligned"),
        pytest.param(0, 5, 3, (), id="no_rows"),
    ],
)
def test_segments_end_where_blocks_end(
    rows: int, context: int, origin: int, ends: tuple[int, ...]
) -> None:
    made = batch([rows], [context], [[0, 1]], [origin])
    assert made.gather is not None
    assert made.gather.segment_keys == (ends,)
    assert sum(made.gather.segment_lens) == rows


def test_no_sequences_at_all() -> None:
    made = batch([], [], [], [])
    assert made.cu_seqlens.tolist() == [0]
    assert made.page_table.shape[0] == 0


def test_block_end_counts_from_the_origin() -> None:
    assert [block_end(p, 3, 4) for p in (0, 2, 3, 6, 7)] == [3, 3, 7, 7, 11]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(([1], [9], [[0]], [0]), "1 pages of 8 tokens do not cover 9", id="pages"),
        pytest.param(([1], [-1], [[0]], [0]), "expected none negative", id="negative"),
        pytest.param(([1, 2], [0], [[0]], [0]), "one entry per sequence", id="lengths"),
    ],
)
def test_refusals_name_the_fault(
    arguments: tuple[list[int], list[int], list[list[int]], list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        batch(*arguments)


def test_pages_must_cover_what_is_stored_too() -> None:
    with pytest.raises(ValueError, match="6 cached and 3 stored"):
        make_attention_batch(
            [4], [6], [[0]], [0], block_size=4, page_size=8, device=CPU, stored_lens=[3]
        )
