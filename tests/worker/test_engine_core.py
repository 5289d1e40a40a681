"""Which failures of forwards an engine survives, and what its outbox hands over."""

from __future__ import annotations

import pytest

from effuse.kvtransfer.messages import AttemptId
from effuse.worker.engine_core import ForwardFailed, ForwardGuard, Outbox
from effuse.worker.messages import AbortDone, Failed

ONE = AttemptId("request", 1, "transfer")


def fail() -> None:
    raise RuntimeError("secret: address 0xdeadbeef")


def fail_times(guard: ForwardGuard, count: int) -> None:
    for _ in range(count):
        with pytest.raises(ForwardFailed):
            guard.run(fail, 1)


def test_a_failure_is_logged_and_told_without_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ForwardFailed, match=r"^the model failed in this step$"):
        ForwardGuard().run(fail, 3)
    assert "a forward over 3 requests failed" in caplog.text and "0xdeadbeef" in caplog.text


def test_the_eighth_failure_in_a_row_is_raised_as_it_is() -> None:
    guard = ForwardGuard()
    fail_times(guard, 7)
    with pytest.raises(RuntimeError, match="secret"):
        guard.run(fail, 1)


def test_one_good_forward_forgives_those_before_it() -> None:
    guard = ForwardGuard()
    for _ in range(3):
        fail_times(guard, 7)
        assert guard.run(lambda: "fine", 1) == "fine"


def test_an_outbox_hands_over_what_was_said_once_and_in_order() -> None:
    outbox = Outbox()
    outbox.failed(ONE, "INTERNAL", "text", retryable=True)
    outbox.abort_done(ONE, was_running=False)
    failed = Failed(attempt=ONE, code="INTERNAL", message="text", retryable=True)
    assert list(outbox.drain()) == [failed, AbortDone(attempt=ONE, was_running=False)]
    assert not outbox.drain()
