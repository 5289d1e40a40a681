"""What a prefill engine says of its prompts: makes the events; decides nothing."""

from __future__ import annotations

import logging

from effuse.kvtransfer.connector import Cause, Pushed, PushFailed
from effuse.kvtransfer.messages import AttemptId
from effuse.prefill_worker.prompt import Prompt
from effuse.worker.messages import Failed, FailureCode, PrefillDone, PromptPushed

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
FOR_EVERYONE = (Cause.FINGERPRINT, Cause.MALFORMED)  # no other attempt of this pair would work


def prefill_done(prompt: Prompt, now: float) -> PrefillDone:
    """The prompt's KV is complete."""
    return PrefillDone(
        attempt=prompt.attempt,
        queue_s=prompt.started_s - prompt.arrived_s,
        compute_s=now - prompt.started_s,
    )


def prompt_pushed(attempt: AttemptId, report: Pushed) -> PromptPushed:
    """The handoff is over."""
    return PromptPushed(
        attempt=attempt,
        pages=report.pages,
        bytes=report.num_bytes,
        push_s=report.seconds,
        transport=report.route.name,
        is_fallback=report.route.is_fallback,
    )


def push_failed(attempt: AttemptId, report: PushFailed) -> Failed:
    """The handoff did not work. Where a peer lives and what a library says of it is logged."""
    message = report.message
    if report.cause is Cause.PEER:
        LOG.warning("the push of %s failed: %s", attempt, message)
        message = "the pages could not be pushed: the decode worker's pool is out of reach"
    return Failed(
        attempt=attempt,
        code=CODES.get(report.cause, "DATA_LOSS"),
        message=message,
        retryable=report.cause not in FOR_EVERYONE,
        field="reservation" if report.cause is Cause.UNRESERVED else None,
    )
