"""Moving K and V, and whole pages."""

from __future__ import annotations

import pytest
import torch
from operators import rows
from operators.paths import public

from effuse.kernels.pages import gather_pages, scatter_pages, zero_tail

OPS = public(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_store_then_load(dtype: torch.dtype) -> None:
    rows.check_store(OPS, dtype)


def test_slot_minus_one_stores_nothing() -> None:
    rows.check_store_of_nothing(OPS, torch.float32)


def test_gathered_pages_scatter_back_elsewhere() -> None:
    memory = rows.random(6, 2, 2, 3, 4, 8)
    run = gather_pages(memory, torch.tensor([5, 0, 2]))
    assert run.is_contiguous()
    assert torch.equal(run, torch.stack([memory[5], memory[0], memory[2]]))
    other = torch.zeros_like(memory)
    scatter_pages(run, other, torch.tensor([1, 4, 3]))
    assert torch.equal(other[[1, 4, 3]], memory[[5, 0, 2]])
    assert not other[[0, 2, 5]].any()


def test_gather_into_a_given_place() -> None:
    memory = rows.random(4, 1, 2, 1, 4, 8)
    place = torch.full((2, 1, 2, 1, 4, 8), float("nan"))
    assert gather_pages(memory, torch.tensor([3, 1]), place) is place
    assert torch.equal(place, memory[[3, 1]])


@pytest.mark.parametrize("kept", [0, 3, 8])
def test_zero_tail_leaves_the_head_and_other_pages(kept: int) -> None:
    memory = torch.ones(3, 2, 2, 2, 8, 4)
    zero_tail(memory, 1, kept)
    assert memory[1, :, :, :, :kept].all()
    assert not memory[1, :, :, :, kept:].any()
    assert memory[[0, 2]].all()


def test_zero_tail_refuses_more_tokens_than_a_page_holds() -> None:
    with pytest.raises(ValueError, match=r"within 0\.\.8, got 9"):
        zero_tail(torch.ones(1, 1, 2, 1, 8, 4), 0, 9)
