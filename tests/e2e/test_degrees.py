"""A sample of `e2e.degrees`: workers of several devices give the reference decoder's tokens."""

from __future__ import annotations

import pytest
from e2e.degrees import Case, differing


@pytest.mark.parametrize(
    "case",
    [
        Case("sdar", "nixl", 1, 2, ("d2f",)),
        Case("dream", "zmq", 2, 1, ("block_diffusion",)),
        Case("LLaDA2's loop, experts spread", "zmq", 2, 2),
        Case("LLaDA2's loop, replicas", "nixl", 1, 2),
        Case("Dream's loops", "zmq", 0, 2),
    ],
    ids=str,
)
def test_tokens_equal_the_oracles(case: Case) -> None:
    num_wrong, num_tokens = differing(case)
    assert num_tokens > 500
    assert num_wrong == 0
