"""Which ids run, which are remembered, and for how long."""

from __future__ import annotations

import pytest
from router.fake_model import request_of
from router.fakes import FakeStore

from effuse.placement.writer import PlacementWriter
from effuse.protos.errors import AlreadyRunning
from effuse.router.request import AnswerAttempts
from effuse.router.shared_request import MOST_REMEMBERED, REMEMBERED_S, KnownRequests, Sharing
from effuse.v1 import generation_pb2 as pb


def alone() -> Sharing:
    """A router without others."""
    store = FakeStore()
    return Sharing(
        router_id="us",
        store=store,
        placements=PlacementWriter(store),
        address_of=lambda _: "",
        keep_answers_s=0.0,
    )


def described(request_id: str, attempt: int = 0) -> pb.GetRequestResponse:
    return pb.GetRequestResponse(
        request_id=request_id, state=pb.REQUEST_STATE_QUEUED, attempt=attempt
    )


def test_an_id_runs_once_and_may_be_used_again_afterwards() -> None:
    known = KnownRequests(alone(), lambda: 0.0)
    first, second = request_of("a"), request_of("a", attempts=AnswerAttempts(count=2))
    with known.running(first):
        with pytest.raises(AlreadyRunning, match="'a' is already running"), known.running(second):
            pass
        assert known.find("a") == described("a")
    with known.running(second):
        assert known.find("a") == described("a", attempt=2)
    assert known.idle.is_set()


def test_ended_requests_are_remembered_for_a_while() -> None:
    now = 0.0
    known = KnownRequests(alone(), lambda: now)
    with known.running(request_of("a")):
        pass
    assert known.find("a") == described("a")
    now = REMEMBERED_S
    assert known.find("a") is None


def test_memory_is_bounded() -> None:
    known = KnownRequests(alone(), lambda: 0.0)
    for at in range(MOST_REMEMBERED + 10):
        with known.running(request_of(str(at))):
            pass
    assert known.find("9") is None
    assert known.find("10") is not None
