"""The table of a request's states, tested as data, and the only-writer rule for commits."""

from __future__ import annotations

from itertools import product

import pytest
from router.fake_model import request_of

from effuse.router.request import BrokenStream, Request
from effuse.router.request_states import (
    ENDED,
    TRANSITIONS,
    Event,
    IllegalRequestEvent,
    State,
)
from effuse.v1 import generation_pb2
from effuse.v1 import worker_pb2 as pb

GOOD = [Event.PLACED, Event.RESERVED, Event.VERIFIED, Event.COMMITTED, Event.FINISHED]


def test_a_good_life() -> None:
    request = request_of()
    states = [request.answer.apply_event(event, float(at)) for at, event in enumerate(GOOD)]
    assert states == [
        State.STARTING,
        State.PREFILLING,
        State.DECODING,
        State.DECODING,
        State.FINISHED,
    ]
    assert request.answer.is_ended


@pytest.mark.parametrize(("state", "event"), [*product(State, Event)])
def test_every_pair_moves_by_the_table_or_is_refused(state: State, event: Event) -> None:
    request = request_of(state=state)
    if (state, event) in TRANSITIONS:
        assert request.answer.apply_event(event, 0.0) is TRANSITIONS[state, event]
    else:
        text = f"{state.value} does not accept the event {event.value}"
        with pytest.raises(IllegalRequestEvent, match=text):
            request.answer.apply_event(event, 0.0)
        assert request.answer.state is state
        assert not request.answer.moments


@pytest.mark.parametrize("state", State)
def test_an_end_is_an_end_and_everything_else_can_fail_or_be_cancelled(state: State) -> None:
    events = {event for s, event in TRANSITIONS if s is state}
    if state in ENDED:
        assert not events
    else:
        assert {Event.FAILED, Event.CANCELLED} <= events


def test_a_lost_attempt_is_followed_by_another_with_a_higher_number() -> None:
    request = request_of()
    assert request.begin_attempt("p0", "d0", 0.0) == 1
    request.answer.apply_event(Event.LOST, 0.1, "p0 went away")
    assert request.begin_attempt("", "d0", 0.2) == 2
    assert (request.attempts.prefill_worker, request.attempts.decode_worker) == ("", "d0")
    assert request.answer.history() == (
        "placed (p0 -> d0) +0.000s, lost (p0 went away) +0.100s, placed (local -> d0) +0.200s"
    )


def test_the_story_is_bounded() -> None:
    request = request_of()
    for at in range(1000):
        request.answer.apply_event((Event.PLACED, Event.LOST)[at % 2], float(at))
    assert len(request.answer.moments) == 64
    assert request.answer.moments[-1].at_s == 999


def test_a_story_keeps_the_first_and_the_last_of_commits_in_a_row() -> None:
    request = request_of(state=State.DECODING)
    for at in range(4):
        request.answer.apply_event(Event.COMMITTED, float(at), f"{4 * at}+4")
    assert request.answer.history() == "committed (0+4) +0.000s, committed (12+4) +3.000s"
    request = request_of(state=State.DECODING)
    request.answer.apply_event(Event.COMMITTED, 0.0, "0+4")
    request.answer.apply_event(Event.COMMITTED, 1.0, "4+4")
    request.answer.apply_event(Event.LOST, 2.0)
    assert [one.note for one in request.answer.moments] == ["0+4", "4+4", ""], "no two become one"


def delivered(*token_ids: int) -> Request:
    request = request_of()
    request.answer.accept_tokens(0, token_ids)
    return request


@pytest.mark.parametrize(
    ("offset", "ids", "new"),
    [
        (3, [40, 50], [40, 50]),
        (3, [], []),
        (1, [20, 30, 40], [40]),
        (0, [10, 20, 30], []),
        (1, [20], []),
    ],
    ids=["continues", "empty", "overlaps", "repeats all", "lies inside"],
)
def test_what_is_new_is_added_once(offset: int, ids: list[int], new: list[int]) -> None:
    request = delivered(10, 20, 30)
    assert request.answer.accept_tokens(offset, ids) == new
    assert request.answer.token_ids == [10, 20, 30, *new]


@pytest.mark.parametrize(
    ("offset", "ids", "why"),
    [(4, [50], "begins at 4, but only 3"), (1, [21, 30], "changes tokens"), (2, [31], "changes")],
    ids=["gap", "differs", "differs inside"],
)
def test_gaps_and_changes_break_the_stream(offset: int, ids: list[int], why: str) -> None:
    request = delivered(10, 20, 30)
    with pytest.raises(BrokenStream, match=why):
        request.answer.accept_tokens(offset, ids)
    assert request.answer.token_ids == [10, 20, 30]


def test_resume_carries_the_frontier_of_the_last_token_only() -> None:
    early, late = pb.BlockState(denoise_count=1), pb.BlockState(denoise_count=2)
    request = request_of()
    assert request.answer.resumption() is None
    request.answer.accept_tokens(0, [10, 20], [early])
    request.answer.accept_tokens(2, [30], [late])
    request.answer.accept_tokens(0, [10], [early])  # an old commit, sent again
    resume = request.answer.resumption()
    assert resume is not None
    assert list(resume.committed_token_ids) == [10, 20, 30]
    assert list(resume.frontier) == [late]


def test_a_commit_that_is_refused_takes_nothing() -> None:
    """A taken commit counts as delivered: the next attempt would continue after it."""
    request = request_of(state=State.DECODING)
    strange = pb.DecodeCommit(token_ids=[104], logprobs=[generation_pb2.TokenLogprobs()])
    with pytest.raises(BrokenStream, match="1 log-probabilities instead of 0"):
        request.add_commit(strange, 0.0)
    assert (
        request.answer.token_ids,
        request.answer.text.num_tokens,
        request.answer.resumption(),
    ) == ([], 0, None)
