"""All interleavings of two handoffs over one page, and planted bugs that one of them must show."""

from __future__ import annotations

import re

import pytest

from effuse.kvtransfer.handoff import RECEIVER, ReceiverEvent, ReceiverState
from simulation import mutants
from simulation.clock import Violation
from simulation.handoffs import Trust, World, has_let_go
from simulation.mutants import Patch
from simulation.search import search

DEPTH = 16  # within which planted bugs show


@pytest.mark.parametrize(("is_two_sided", "num_states"), [(False, 50_000), (True, 50_000)])
def test_no_interleaving_breaks_a_table_or_never_ends(is_two_sided: bool, num_states: int) -> None:
    found = search(is_two_sided=is_two_sided)  # all states that there are
    assert found.states > num_states and found.ends > 1000


def once_its_lease_has_run_out(world: World, which: int) -> bool:
    return has_let_go(world, which) or (which == 1 and world.is_missed)


def once_it_is_dead(world: World, which: int) -> bool:
    return has_let_go(world, which) or not world.handoff(which).is_alive


@pytest.mark.parametrize("trust", [once_its_lease_has_run_out, once_it_is_dead])
def test_only_a_writer_itself_can_say_that_its_writes_are_over(trust: Trust) -> None:
    with pytest.raises(Violation, match="bytes of 1 land in a page that is FREE"):
        search(trust, DEPTH)


@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        (mutants.pages_freed_at_abort, "bytes of 1 land in a page that is FREE"),
        (mutants.pages_freed_when_the_lease_ends, "bytes of 1 land in a page that is FREE"),
        (mutants.source_freed_at_abort, "source pages are free while a write reads them"),
    ],
)
def test_a_planted_bug_in_a_table_is_found(mutant: type[Patch], said: str) -> None:
    with mutant(), pytest.raises(Violation, match=said):
        search(most_depth=DEPTH)


@pytest.mark.parametrize(
    ("state", "event"),
    [key for key in RECEIVER if key != (ReceiverState.RESERVED, ReceiverEvent.OFFERED)],
    ids=lambda part: part.name,
)
def test_no_entry_of_the_receivers_table_is_idle(
    state: ReceiverState, event: ReceiverEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, something that happens has no answer."""
    monkeypatch.delitem(RECEIVER, (state, event))
    is_two_sided = (state, event) == (ReceiverState.ABORTING, ReceiverEvent.FENCED)
    with pytest.raises(Violation, match=re.escape(f"{event.name} of a reservation")):
        search(most_depth=DEPTH, is_two_sided=is_two_sided)
