"""Whatever is done to a transfer on its way is found out, and would not be without the checks."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
from kvtransfer.tampering import Served, run
from kvtransfer.tricks import ENCODERS, Trick
from simulation import mutants
from simulation.mutants import Patch

from effuse.kvtransfer import reception

COUNT = 160  # of each kind; `make chaos` has 5000
MOST = 1000  # in which each planted bug is seen


@pytest.mark.parametrize("kind", sorted(ENCODERS))
def test_whatever_is_done_to_a_transfer_it_is_not_served(kind: str) -> None:
    found = run(kind, seed=1, count=COUNT)
    assert found.total() == COUNT
    assert {trick for trick, _ in found} == set(Trick)


def seals_not_compared() -> Patch:
    class Anything(bytes):
        def __ne__(self, other: object) -> bool:
            return False

    return patch.object(reception, "seal_of", lambda manifest, elapsed_us: Anything())


@pytest.mark.parametrize(
    ("bug", "trick"),
    [
        (mutants.digests_not_compared, Trick.BIT_FLIPPED),
        (mutants.attempt_not_compared, Trick.PAGES_FLIPPED),
        (mutants.incarnation_not_compared, Trick.PAGES_FLIPPED),
        (mutants.pages_and_generations_not_compared, Trick.PAGES_FLIPPED),
        (seals_not_compared, Trick.FINISH_FLIPPED),
    ],
)
def test_without_a_check_it_is_served(bug: Callable[[], Patch], trick: Trick) -> None:
    # Without their check, page numbers beyond the prompt may end the receiver instead.
    with bug(), pytest.raises((Served, ValueError)):
        run("zmq", seed=2, count=MOST, tricks=[trick])
