"""The only-writer rule: what a commit may add."""

from __future__ import annotations

import pytest

from effuse.router.delivery import BrokenStream, Delivery
from effuse.v1 import worker_pb2 as pb


def delivered(*token_ids: int) -> Delivery:
    delivery = Delivery()
    delivery.accept(0, token_ids)
    return delivery


@pytest.mark.parametrize(
    ("offset", "ids", "new"),
    [
        (3, [40, 50], [40, 50]),
        (3, [], []),
        (1, [20, 30, 40], [40]),
        (0, [10, 20, 30], []),
        (1, [20], []),
    ],
    ids=["continues", "empty", "overlaps", "repeats all", "lies inside"],
)
def test_what_is_new_is_added_once(offset: int, ids: list[int], new: list[int]) -> None:
    delivery = delivered(10, 20, 30)
    assert delivery.accept(offset, ids) == new
    assert delivery.token_ids == [10, 20, 30, *new]


@pytest.mark.parametrize(
    ("offset", "ids", "why"),
    [(4, [50], "begins at 4, but only 3"), (1, [21, 30], "changes tokens"), (2, [31], "changes")],
    ids=["gap", "differs", "differs inside"],
)
def test_gaps_and_changes_break_the_stream(offset: int, ids: list[int], why: str) -> None:
    delivery = delivered(10, 20, 30)
    with pytest.raises(BrokenStream, match=why):
        delivery.accept(offset, ids)
    assert delivery.token_ids == [10, 20, 30]


def test_resume_carries_the_frontier_of_the_last_token_only() -> None:
    early, late = pb.BlockState(denoise_count=1), pb.BlockState(denoise_count=2)
    delivery = Delivery()
    assert delivery.resume() is None
    delivery.accept(0, [10, 20], [early])
    delivery.accept(2, [30], [late])
    delivery.accept(0, [10], [early])  # an old commit, said again
    resume = delivery.resume()
    assert resume is not None
    assert list(resume.committed_token_ids) == [10, 20, 30]
    assert list(resume.frontier) == [late]
