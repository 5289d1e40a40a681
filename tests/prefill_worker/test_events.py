"""What a failed push is told as: a code for the router, and no address for the client."""

from __future__ import annotations

import pytest

from effuse.kvtransfer.connector import Cause, PushFailed
from effuse.kvtransfer.messages import AttemptId
from effuse.prefill_worker.events import push_failed
from effuse.worker.messages import Failed

ONE = AttemptId("r", 1, "t")


def told(cause: Cause, message: str) -> Failed:
    return push_failed(ONE, PushFailed(ONE.transfer_id, cause, message))


def test_where_a_peer_lives_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    failed = told(Cause.PEER, "the receiver at tcp://10.3.2.1:4711 closed the connection")
    assert (failed.code, failed.retryable) == ("UNAVAILABLE", True)
    assert "10.3.2.1" not in failed.message
    assert "10.3.2.1" in caplog.text


def test_what_differs_is_told() -> None:
    failed = told(Cause.DIGEST, "page 3 differs")
    assert (failed.code, failed.message) == ("DATA_LOSS", "page 3 differs")
