"""The table of a request's life, tested as data."""

from __future__ import annotations

from itertools import product

import pytest

from effuse.router.request import ENDED, TRANSITIONS, Event, IllegalTransition, Life, State

GOOD = [Event.PLACED, Event.RESERVED, Event.VERIFIED, Event.COMMITTED, Event.FINISHED]


def life_in(state: State) -> Life:
    return Life("r", state)


def test_a_good_life() -> None:
    life = Life("r")
    states = [life.handle(event, float(at)) for at, event in enumerate(GOOD)]
    assert states == [
        State.STARTING,
        State.PREFILLING,
        State.DECODING,
        State.DECODING,
        State.FINISHED,
    ]
    assert life.is_ended


@pytest.mark.parametrize(("state", "event"), [*product(State, Event)])
def test_every_pair_moves_by_the_table_or_is_refused(state: State, event: Event) -> None:
    life = life_in(state)
    if (state, event) in TRANSITIONS:
        assert life.handle(event, 0.0) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"{state.value} cannot be {event.value}"):
            life.handle(event, 0.0)
        assert life.state is state
        assert not life.story


@pytest.mark.parametrize("state", State)
def test_an_end_is_an_end_and_everything_else_can_fail_or_be_cancelled(state: State) -> None:
    events = {event for s, event in TRANSITIONS if s is state}
    if state in ENDED:
        assert not events
    else:
        assert {Event.FAILED, Event.CANCELLED} <= events


def test_a_lost_attempt_is_followed_by_another_with_a_higher_number() -> None:
    life = Life("r")
    assert life.place("p0", "d0", 0.0) == 1
    life.handle(Event.LOST, 0.1, "p0 went away")
    assert life.place("", "d0", 0.2) == 2
    assert (life.prefill_worker, life.decode_worker) == ("", "d0")
    assert life.tell() == (
        "placed (p0 -> d0) +0.000s, lost (p0 went away) +0.100s, placed (local -> d0) +0.200s"
    )


def test_the_story_is_bounded() -> None:
    life = life_in(State.DECODING)
    for at in range(1000):
        life.handle(Event.COMMITTED, float(at))
    assert len(life.story) == 64
    assert life.story[-1].at_s == 999
