"""Views, bytes and tails of pages are the same memory."""

from __future__ import annotations

import pytest
import torch

from effuse.kvtransfer.layout import KVLayout, PageMemory, consecutive_runs

LAYOUT = KVLayout("unified", 3, 2, 4, 8, "float32")
ALL = range(3)  # groups of its layers
HEADS = LAYOUT.heads
DISTINCT = KVLayout("distinct", 3, 2, 4, 8, "float32")


def filled(dtype: str = "float32") -> PageMemory:
    memory = PageMemory(KVLayout("unified", 3, 2, 4, 8, dtype), 5)
    values = torch.arange(memory.tensor.numel(), dtype=torch.float32)
    memory.tensor.copy_(values.view_as(memory.tensor))
    return memory


def test_layer_views_are_strided_views_of_the_tensor() -> None:
    memory = PageMemory(LAYOUT, 5)
    views = memory.layer_views()
    assert [tuple(k.shape) for k, _ in views] == [(5, 8, 2, 4)] * 3
    keys, values = views[1]
    keys[2, 7, 1, 3] = 1.5
    values[2, 7, 1, 3] = 2.5
    assert memory.tensor[2, 1, 1, 0, 0, 7, 3] == 1.5
    assert memory.tensor[2, 1, 1, 0, 1, 7, 3] == 2.5
    assert int(memory.tensor.count_nonzero()) == 2


@pytest.mark.parametrize("kind", ["unified", "distinct"])
def test_a_range_of_heads_of_a_group_of_layers_is_one_part_of_a_page(kind: str) -> None:
    """Six layers in three groups: heads 1 and 2 of the second group, and nothing else."""
    memory = PageMemory(KVLayout(kind, 6, 4, 8, 4, "float32", most_groups=4), 3)
    layout = memory.layout
    assert memory.tensor.shape[1:] == layout.page_shape == (3, 4, 2, 2, 4, 8)
    for keys, values in memory.layers()[2:4]:
        keys[1, 1:3], values[1, 1:3] = 1.0, 1.0
    written = memory.byte_rows().view(torch.float32).nonzero()
    assert set(written[:, 0].tolist()) == {1}
    first = layout.group_bytes + layout.head_bytes
    assert written[:, 1].tolist() == list(range(first // 4, (first + 2 * layout.head_bytes) // 4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_page_bytes_are_the_page_and_nothing_else(dtype: str) -> None:
    memory = filled(dtype)
    view = memory.bytes_at(3)
    assert view.nbytes == memory.page_bytes
    assert bytes(view) == memory.tensor[3].view(torch.uint8).numpy().tobytes()
    view[:] = bytes(memory.page_bytes)
    assert not memory.tensor[3].any() and memory.tensor[2].any() and memory.tensor[4].any()


def test_consecutive_pages_are_one_piece_of_bytes() -> None:
    memory = filled()
    joined = bytes(memory.bytes_at(1)) + bytes(memory.bytes_at(2))
    assert bytes(memory.bytes_at(1, 2)) == joined


def test_the_view_outlives_its_pool() -> None:
    memory = filled()
    expected = bytes(memory.bytes_at(4))
    view = memory.bytes_at(4)
    del memory
    assert bytes(view) == expected


def test_pages_are_viewed_in_runs_and_written_one_by_one() -> None:
    memory, source = PageMemory(LAYOUT, 5), filled()
    views = source.views([1, 2, 4], ALL, HEADS)
    assert [view.nbytes for view in views] == [2 * memory.page_bytes, memory.page_bytes]
    memory.write([4, 0, 2], ALL, views, HEADS)
    assert torch.equal(memory.tensor[[4, 0, 2]], source.tensor[[1, 2, 4]])
    with pytest.raises(ValueError, match="longer"):
        memory.write([0], ALL, views, HEADS)
    with pytest.raises(IndexError, match="of a pool of 5"):
        memory.write([5], ALL, views[1:], HEADS)


def test_groups_of_layers_are_viewed_and_written_alone() -> None:
    memory, source = PageMemory(LAYOUT, 5), filled()
    views = source.views([1, 2], range(1, 3), HEADS)
    assert [view.nbytes for view in views] == [2 * LAYOUT.group_bytes] * 2
    memory.write([3, 0], range(1, 3), views, HEADS)
    assert torch.equal(memory.tensor[[3, 0], 1:], source.tensor[[1, 2], 1:])
    assert not memory.tensor[:, 0].any() and not memory.tensor[[1, 2, 4]].any()


def test_rows_of_bytes_are_the_pages() -> None:
    memory = filled()
    assert bytes(memory.byte_rows()[3].numpy().data) == bytes(memory.bytes_at(3))


@pytest.mark.parametrize("used", [0, 3, 8])
def test_zero_tail_clears_exactly_the_unused_slots(used: int) -> None:
    memory = filled()
    before = memory.tensor.clone()
    memory.zero_tail(1, used)
    assert not memory.tensor[1, ..., used:, :].any()
    assert torch.equal(memory.tensor[1, ..., :used, :], before[1, ..., :used, :])
    assert torch.equal(memory.tensor[[0, 2, 3, 4]], before[[0, 2, 3, 4]])


@pytest.mark.parametrize("used", [0, 3, 8])
def test_a_distinct_page_is_the_same_bytes_in_another_order(used: int) -> None:
    """Storing token by token and zeroing the tail touch nothing but the page and the layer."""
    memory = PageMemory(DISTINCT, 5)
    for keys, values in memory.layer_views():
        assert (keys.shape, values.shape) == ((5, 2, 1, 8, 4), (5, 2, 4, 8))
    keys, values = memory.layer_views()[1]
    keys[2, :, :, :used] = 1.5
    values[2, :, :, :used] = 2.5
    assert int((memory.layers()[1][0][2] == 1.5).sum()) == used * 2 * 4
    assert int((memory.layers()[1][1][2] == 2.5).sum()) == used * 2 * 4
    before = memory.tensor.clone()
    assert int(before.count_nonzero()) == 2 * used * 2 * 4
    memory.zero_tail(2, used)
    assert torch.equal(memory.tensor, before)
    memory.tensor.fill_(1.0)
    memory.zero_tail(2, used)
    for keys, values in memory.layer_views():
        assert keys[2, :, :, :used].all() and not keys[2, :, :, used:].any()
        assert values[2, ..., :used].all() and not values[2, ..., used:].any()
    assert memory.tensor[[0, 1, 3, 4]].all()


def test_zero_tail_refuses_a_count_beyond_the_page() -> None:
    with pytest.raises(ValueError, match="9 used slots"):
        filled().zero_tail(0, 9)


def test_pages_outside_the_pool_have_no_bytes() -> None:
    with pytest.raises(IndexError):
        filled().bytes_at(5)


def test_consecutive_runs() -> None:
    assert consecutive_runs([4, 5, 6, 1, 2, 9, 8]) == [(4, 3), (1, 2), (9, 1), (8, 1)]
    assert consecutive_runs([]) == []


def test_a_pool_may_be_empty() -> None:
    assert PageMemory(LAYOUT, 0).num_bytes == 0
