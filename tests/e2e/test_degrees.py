"""A sample of `e2e.degrees`: workers of several devices give the reference decoder's tokens.

`make degrees` has all cases, among them replicas and the loops of LLaDA and Dream. Two ranks each
are in `test_roles.py`; `worker/test_ranks.py` compares a group's tokens for replicas, Dream and
experts.
"""

from __future__ import annotations

import pytest
from e2e.degrees import Case, differing


@pytest.mark.parametrize(
    "case",
    [
        Case("sdar", "nixl", 1, 2, ("d2f",), context=2),
        Case("LLaDA2's loop, experts spread", "zmq", 2, 1),
    ],
    ids=str,
)
def test_tokens_equal_the_oracles(case: Case) -> None:
    num_wrong, num_tokens = differing(case, most=8)
    assert num_tokens > 500
    assert num_wrong == 0
