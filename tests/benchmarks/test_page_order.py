"""The comparison of page orders: what it views, and that both orders give the same bits."""

from __future__ import annotations

import pytest
import torch

from effuse.benchmarks import page_order
from effuse.kvtransfer.layout import KVLayout, PageMemory


def test_the_old_order_has_the_heads_of_a_layer_side_by_side() -> None:
    layout = KVLayout("unified", 4, 2, 8, 4, "float32", most_groups=2)
    memory = PageMemory(layout, 3)
    keys, values = page_order.old_views(layout, memory.tensor)[1]
    assert keys.shape == values.shape == (3, 4, 2, 8)
    keys[2].fill_(1.0)
    values[2].fill_(2.0)
    page = memory.tensor[2].flatten()
    layer = page[layout.page_bytes // 16 :][: layout.page_bytes // 16]
    assert layer.tolist() == [1.0] * 64 + [2.0] * 64 and int(page.count_nonzero()) == 128


@pytest.mark.parametrize(("pages", "layers"), [(1, 36), (2400, 30), (1 << 20, 6)])
def test_a_pool_has_as_many_groups_as_fit(pages: int, layers: int) -> None:
    layout = page_order.MODELS[1].layout
    found = page_order.fitting(layout, pages, 10 << 30)
    assert (found.num_layers, found.head_bytes) == (layers, layout.head_bytes)


def test_both_orders_give_the_same_bits_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_order, "IN_FLIGHT", 32)
    layout = KVLayout("unified", 6, 2, 16, page_order.PAGE_SIZE, "float32", most_groups=2)
    model = page_order.Model("tiny", 4, layout)
    page_order.check(model, 2, 64, torch.device("cpu"))
