"""A worker's lease as data: every transition, when actions are due, and forbidden events."""

from __future__ import annotations

import pytest

from effuse.placement.leases import (
    TRANSITIONS,
    IllegalLeaseEvent,
    Lease,
    LeaseEvent,
    LeaseState,
    LeaseTimes,
    advance,
)

TIMES = LeaseTimes(ttl_s=5.0, renew_s=1.0, retry_s=0.25)


@pytest.mark.parametrize(("state", "event"), list(TRANSITIONS), ids=lambda value: value.value)
def test_every_listed_transition(state: LeaseState, event: LeaseEvent) -> None:
    after = advance(Lease(TIMES, state), event, now=10.0)
    assert after.state is TRANSITIONS[state, event]


@pytest.mark.parametrize("state", LeaseState)
@pytest.mark.parametrize("event", LeaseEvent)
def test_what_is_not_listed_is_refused_by_name(state: LeaseState, event: LeaseEvent) -> None:
    if (state, event) in TRANSITIONS:
        return
    with pytest.raises(IllegalLeaseEvent, match=f"{state.value}.*{event.value}"):
        advance(Lease(TIMES, state), event, now=0.0)


def test_a_new_lease_is_taken_at_once_then_renewed() -> None:
    lease = Lease(TIMES)
    assert (lease.state, lease.wait_s(now=100.0)) == (LeaseState.ABSENT, 0.0)
    lease = advance(lease, LeaseEvent.HELD, now=100.0)
    assert (lease.state, lease.wait_s(now=100.25)) == (LeaseState.HELD, 0.75)


def test_unreachable_keeps_what_is_held_and_asks_again_sooner() -> None:
    held = advance(Lease(TIMES), LeaseEvent.HELD, now=0.0)
    lease = advance(held, LeaseEvent.UNREACHABLE, now=1.0)
    assert (lease.state, lease.wait_s(now=1.0)) == (LeaseState.HELD, TIMES.retry_s)


@pytest.mark.parametrize("event", [LeaseEvent.SUPERSEDED, LeaseEvent.RELEASED])
def test_the_ends_are_final(event: LeaseEvent) -> None:
    lease = advance(advance(Lease(TIMES), LeaseEvent.HELD, 0.0), event, 1.0)
    assert lease.is_over
    assert not any(state is lease.state for state, _ in TRANSITIONS)


@pytest.mark.parametrize("times", [(1.0, 1.0, 0.5), (5.0, 1.0, 2.0), (5.0, 1.0, 0.0)])
def test_times_that_cannot_hold_a_lease_are_refused(times: tuple[float, float, float]) -> None:
    ttl_s, renew_s, retry_s = times
    with pytest.raises(ValueError, match="retry_s <= renew_s < ttl_s"):
        LeaseTimes(ttl_s=ttl_s, renew_s=renew_s, retry_s=retry_s)
