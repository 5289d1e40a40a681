"""The handoff's benchmark: its pages, its limits, and that the pages arrive."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from effuse.benchmarks import handoff
from effuse.benchmarks.handoff import limit_s, medians_s, shares_of
from effuse.benchmarks.raw_transfer import (
    IN_ORDER,
    SCATTERED,
    WAYS,
    Move,
    _check_order,
    digest,
    raw_rounds_s,
    scattered,
)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_scattered_pages_are_all_pages_and_no_two_make_a_run(count: int, seed: int) -> None:
    pages = scattered(count, seed)
    assert sorted(pages) == list(range(count))
    assert all(second != first + 1 for first, second in pairwise(pages))
    assert pages == scattered(count, seed), "both processes must mean the same pages"


def test_both_sides_of_a_handoff_are_scattered_differently() -> None:
    move = handoff.MOVES[SCATTERED]
    assert move.source != move.target
    assert move.num_bytes == handoff.MOVES[IN_ORDER].num_bytes == handoff.NUM_BYTES


@pytest.mark.parametrize("kind", ["nixl", "zmq"])
def test_the_limit_is_the_faster_way_that_moves_the_same_pages(kind: str) -> None:
    for order, other in ((SCATTERED, IN_ORDER), (IN_ORDER, SCATTERED)):
        same = [way for way, moved in WAYS[kind].items() if moved == order]
        bare = {way: 1.0 if moved == other else 9.0 for way, moved in WAYS[kind].items()}
        for fastest in same:
            assert limit_s(bare | {fastest: 4.0}, kind, order) == 4.0


def test_a_share_is_that_of_one_turn() -> None:
    """Over the turns' medians it would be 2 / 8 here, and no turn had that."""
    bare = dict.fromkeys(WAYS["zmq"], 1.0)
    turns = [
        ({way: pace * seconds for way, seconds in bare.items()}, {SCATTERED: ours, IN_ORDER: 1.0})
        for pace, ours in ((1.0, 8.0), (2.0, 4.0), (4.0, 16.0))
    ]
    assert shares_of(turns, "zmq", SCATTERED) == [1 / 8, 1 / 4, 1 / 2]
    assert shares_of(turns, "zmq", IN_ORDER) == [1.0, 2.0, 4.0]


def test_rounds_that_warm_up_do_not_count() -> None:
    rounds = [100.0] * handoff.WARM_UP + [1.0, 3.0, 2.0]
    assert medians_s({"a": rounds}) == {"a": 2.0}


def test_bytes_in_the_wrong_pages_are_noticed() -> None:
    move = Move(4, (2, 0, 1), (1, 0, 2))
    sent = np.arange(12, dtype=np.uint8)
    received = np.zeros(12, dtype=np.uint8)
    for source, target in zip(move.source, move.target, strict=True):
        received[4 * target : 4 * target + 4] = sent[4 * source : 4 * source + 4]
    _check_order(sent, move, digest(received, 4, move.target))
    with pytest.raises(RuntimeError, match="wrong bytes"):
        _check_order(sent, move, digest(sent, 4, move.target))


@pytest.mark.parametrize("kind", ["nixl", "zmq"])
def test_every_bare_way_moves_every_page(kind: str) -> None:
    """Between two processes; it raises if scattered pages did not arrive in their places."""
    move = Move(8192, scattered(8, 1), scattered(8, 2))
    rounds = raw_rounds_s(kind, move, 2)
    assert list(rounds) == list(WAYS[kind])
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in rounds.values())
