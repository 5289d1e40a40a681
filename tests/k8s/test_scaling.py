"""When `make k8s-scale` fails."""

from __future__ import annotations

import pytest
from attempt import AttemptError
from scaling import Phase, check


def _phases(*workers: int, moved_s: float = 40.0) -> list[Phase]:
    """A load that doubles and halves in turns, and the workers at the end of each phase."""
    return [
        Phase(1.0 + turn % 2, 0, number, moved_s, moved_s) for turn, number in enumerate(workers)
    ]


def test_workers_that_follow_pass() -> None:
    check(_phases(1, 2, 1, 3, 1, 2, 1), [])


@pytest.mark.parametrize(
    ("phases", "failed", "named"),
    [
        (_phases(1, 1, 1), [], "did not follow"),
        (_phases(1, 2, 2), [], "did not follow"),
        (_phases(2, 1, 2), [], "did not follow"),
        (_phases(1, 2, 1, moved_s=61.0), [], "after 61 s"),
        (_phases(1, 2, 1), ["UNAVAILABLE"], "1 requests failed, the first with UNAVAILABLE"),
    ],
)
def test_anything_else_does_not(phases: list[Phase], failed: list[str], named: str) -> None:
    with pytest.raises(AttemptError, match=named):
        check(phases, failed)
