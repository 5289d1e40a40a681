"""What an engine's failure becomes for a caller: every code, its retry, and no inner text."""

from __future__ import annotations

from typing import get_args

import grpc
import msgspec
import pytest

from effuse.kvtransfer.messages import AttemptId
from effuse.protos.errors import InvalidRequest, TransferFailed, to_status
from effuse.worker.failures import to_error
from effuse.worker.messages import Failed, FailureCode

CODES: dict[str, grpc.StatusCode] = {
    "INVALID_ARGUMENT": grpc.StatusCode.INVALID_ARGUMENT,
    "ALREADY_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "FAILED_PRECONDITION": grpc.StatusCode.FAILED_PRECONDITION,
    "RESOURCE_EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "ABORTED": grpc.StatusCode.FAILED_PRECONDITION,
    "DEADLINE_EXCEEDED": grpc.StatusCode.UNAVAILABLE,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "DATA_LOSS": grpc.StatusCode.UNAVAILABLE,
    "INTERNAL": grpc.StatusCode.INTERNAL,
}


def failed(code: FailureCode, **more: object) -> Failed:
    return Failed(attempt=AttemptId("r", 1, "t"), code=code, message="why", retryable=True, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", get_args(FailureCode))
def test_every_code_has_a_status(code: FailureCode) -> None:
    error = to_error(failed(code))
    assert error.code is CODES[code]
    needs_hint = error.code in (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
    )
    assert (error.retry_after_s is not None) is needs_hint


def test_the_engine_s_own_hint_and_field_are_kept() -> None:
    assert to_error(failed("RESOURCE_EXHAUSTED", retry_after_s=7.0)).retry_after_s == 7.0
    assert to_error(failed("FAILED_PRECONDITION", field="page_size")).labels == {
        "field": "page_size"
    }
    wrong = to_error(failed("INVALID_ARGUMENT", field="max_tokens"))
    assert isinstance(wrong, InvalidRequest)
    assert wrong.violations[0].field == "max_tokens"


def test_a_handoff_whose_lease_ran_out_is_the_writer_s_failure() -> None:
    assert type(to_error(failed("DEADLINE_EXCEEDED"))) is TransferFailed


@pytest.mark.parametrize("retryable", [True, False])
def test_of_its_own_mistakes_the_engine_says_whether_another_try_may_work(retryable: bool) -> None:
    told = msgspec.structs.replace(failed("INTERNAL"), retryable=retryable)
    assert to_error(told).retryable is retryable


def test_a_refusal_carries_retry_info() -> None:
    names = [detail.TypeName() for detail in to_status(to_error(failed("DATA_LOSS"))).details]
    assert "google.rpc.RetryInfo" in names
