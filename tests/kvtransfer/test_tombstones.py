"""Aborted transfers are remembered for a while, and no longer, and not too many of them."""

from __future__ import annotations

from effuse.kvtransfer.tombstones import Tombstones


def test_a_transfer_is_remembered_until_its_time_is_over() -> None:
    stones = Tombstones(keep_s=10.0)
    stones.add("a", now=0.0)
    stones.add("b", now=6.0)
    assert "a" in stones and "b" in stones
    stones.add("c", now=11.0)
    assert "a" not in stones and "b" in stones and "c" in stones


def test_a_second_abort_renews_the_memory() -> None:
    stones = Tombstones(keep_s=10.0)
    stones.add("a", now=0.0)
    stones.add("a", now=9.0)
    stones.add("b", now=15.0)
    assert "a" in stones


def test_the_oldest_of_too_many_is_forgotten() -> None:
    stones = Tombstones(keep_s=10.0, most=2)
    for name in "abc":
        stones.add(name, now=1.0)
    assert len(stones) == 2 and "a" not in stones
