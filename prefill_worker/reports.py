"""What a prefill engine reports of handoffs."""

import logging

from effuse.kvtransfer.connector import Cause, Pushed, PushFailed
from effuse.kvtransfer.messages import AttemptId
from effuse.worker.messages import Failed, FailureCode, PromptPushed

LOG = logging.getLogger(__name__)

CODES: dict[Cause, FailureCode] = {
    Cause.FINGERPRINT: "FAILED_PRECONDITION",
    Cause.INCARNATION: "FAILED_PRECONDITION",
    Cause.UNKNOWN_TRANSFER: "ABORTED",
    Cause.ATTEMPT: "ABORTED",
    Cause.MALFORMED: "INTERNAL",
    Cause.LEASE: "UNAVAILABLE",
    Cause.UNRESERVED: "UNAVAILABLE",
    Cause.PEER: "UNAVAILABLE",
}
FOR_EVERYONE = (Cause.FINGERPRINT, Cause.MALFORMED)  # another attempt with this pair would fail too


def prompt_pushed(attempt: AttemptId, report: Pushed) -> PromptPushed:
    """The handoff has ended."""
    return PromptPushed(
        attempt=attempt,
        pages=report.pages,
        bytes=report.num_bytes,
        push_s=report.seconds,
        transport=report.route.name,
        is_fallback=report.route.is_fallback,
        moved_s=report.moved_s,
    )


def push_failed(attempt: AttemptId, report: PushFailed) -> Failed:
    """The handoff failed. The peer's address and the library's text only go to the log."""
    message = report.message
    if report.cause is Cause.PEER:
        LOG.warning(
            "request %s, attempt %d: its pages could not be pushed: %s",
            *(attempt.request_id, attempt.attempt, message),
        )
        message = (
            "the pages could not be pushed, because the decode worker's pool cannot be reached"
        )
    return Failed(
        attempt=attempt,
        code=CODES.get(report.cause, "DATA_LOSS"),
        message=message,
        retryable=report.cause not in FOR_EVERYONE,
        field="reservation" if report.cause is Cause.UNRESERVED else None,
    )
