"""A worker's lease as data: every transition, when actions are due, and forbidden events."""

from __future__ import annotations

import pytest

from effuse.placement.leases import (
    RENEW_S,
    RETRY_S,
    TRANSITIONS,
    TTL_S,
    IllegalLeaseEvent,
    Lease,
    LeaseEvent,
    LeaseState,
    advance,
)


@pytest.mark.parametrize(("state", "event"), list(TRANSITIONS), ids=lambda value: value.value)
def test_every_listed_transition(state: LeaseState, event: LeaseEvent) -> None:
    after = advance(Lease(state), event, now=10.0)
    assert after.state is TRANSITIONS[state, event]


@pytest.mark.parametrize("state", LeaseState)
@pytest.mark.parametrize("event", LeaseEvent)
def test_what_is_not_listed_is_refused_by_name(state: LeaseState, event: LeaseEvent) -> None:
    if (state, event) in TRANSITIONS:
        return
    with pytest.raises(IllegalLeaseEvent, match=f"{state.value}.*{event.value}"):
        advance(Lease(state), event, now=0.0)


def test_a_new_lease_is_taken_at_once_then_renewed() -> None:
    lease = Lease()
    assert (lease.state, lease.wait_s(now=100.0)) == (LeaseState.ABSENT, 0.0)
    lease = advance(lease, LeaseEvent.HELD, now=100.0)
    assert (lease.state, lease.wait_s(now=100.125)) == (LeaseState.HELD, RENEW_S - 0.125)


def test_unreachable_keeps_what_is_held_and_asks_again_sooner() -> None:
    held = advance(Lease(), LeaseEvent.HELD, now=0.0)
    lease = advance(held, LeaseEvent.UNREACHABLE, now=1.0)
    assert (lease.state, lease.wait_s(now=1.0)) == (LeaseState.HELD, RETRY_S)


@pytest.mark.parametrize("event", [LeaseEvent.SUPERSEDED, LeaseEvent.RELEASED])
def test_the_ends_are_final(event: LeaseEvent) -> None:
    lease = advance(advance(Lease(), LeaseEvent.HELD, 0.0), event, 1.0)
    assert lease.is_over
    assert not any(state is lease.state for state, _ in TRANSITIONS)


def test_a_lease_outlives_a_late_renewal() -> None:
    assert 0 < RETRY_S <= RENEW_S < TTL_S
