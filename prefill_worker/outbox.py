"""What a prefill engine says to its front, in order. Makes messages; decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from effuse.kvtransfer import connector
from effuse.kvtransfer.connector import Cause, PushFailed
from effuse.kvtransfer.messages import AttemptId
from effuse.prefill_worker.prompt import Prompt
from effuse.worker.messages import (
    AbortDone,
    CoreEvent,
    Failed,
    FailureCode,
    PrefillDone,
    PromptPushed,
)

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


class Outbox:
    """Messages since the last drain."""

    def __init__(self) -> None:
        self._said: list[CoreEvent] = []

    def drain(self) -> Sequence[CoreEvent]:
        """Hands over what was said, and starts anew."""
        said, self._said = self._said, []
        return said

    def computed(self, prompt: Prompt, now: float) -> None:
        """The prompt's KV is complete."""
        self._said.append(
            PrefillDone(
                attempt=prompt.attempt,
                queue_s=prompt.started_s - prompt.arrived_s,
                compute_s=now - prompt.started_s,
            )
        )

    def pushed(self, attempt: AttemptId, report: connector.Pushed) -> None:
        """The handoff is over."""
        self._said.append(
            PromptPushed(
                attempt=attempt,
                pages=report.pages,
                bytes=report.num_bytes,
                push_s=report.seconds,
                transport=report.route.name,
                is_fallback=report.route.is_fallback,
            )
        )

    def missed(self, attempt: AttemptId, report: PushFailed) -> None:
        """The handoff did not work. Where a peer lives and what a library says of it is logged."""
        message = report.message
        if report.cause is Cause.PEER:
            LOG.warning("the push of %s failed: %s", attempt, message)
            message = "the pages could not be pushed: the decode worker's pool is out of reach"
        self.failed(
            attempt,
            CODES.get(report.cause, "DATA_LOSS"),
            message,
            retryable=report.cause not in FOR_EVERYONE,
            field="reservation" if report.cause is Cause.UNRESERVED else None,
        )

    def failed(
        self,
        attempt: AttemptId,
        code: FailureCode,
        message: str,
        *,
        retryable: bool = False,
        field: str | None = None,
    ) -> None:
        """An attempt has ended without success."""
        self._said.append(
            Failed(attempt=attempt, code=code, message=message, retryable=retryable, field=field)
        )

    def abort_done(self, attempt: AttemptId, *, was_running: bool) -> None:
        """Nothing of the attempt is left here."""
        self._said.append(AbortDone(attempt=attempt, was_running=was_running))
