"""What the engine says to its front, in order. Makes messages; decides nothing."""

from collections.abc import Sequence

from effuse.decode_worker.denoise import AnswerEnd, StepOutcome
from effuse.decode_worker.request import Request
from effuse.decode_worker.sequence import BlockPhase
from effuse.kvtransfer.connector import Cause
from effuse.kvtransfer.messages import AttemptId, Reservation
from effuse.kvtransfer.receiver import HandoffFailed
from effuse.worker.messages import (
    AbortDone,
    Committed,
    CoreEvent,
    Draft,
    Failed,
    FailureCode,
    Finished,
    Reserved,
    Verified,
)

_CODES: dict[Cause, FailureCode] = {
    Cause.FINGERPRINT: "FAILED_PRECONDITION",
    Cause.INCARNATION: "FAILED_PRECONDITION",
    Cause.PEER: "UNAVAILABLE",
    Cause.LEASE: "DEADLINE_EXCEEDED",
}


class Outbox:
    """Messages since the last drain."""

    def __init__(self) -> None:
        self._said: list[CoreEvent] = []

    def drain(self) -> Sequence[CoreEvent]:
        """Hands over what was said, and starts anew."""
        said, self._said = self._said, []
        return said

    def reserved(self, reservation: Reservation) -> None:
        self._said.append(Reserved(reservation=reservation))

    def verified(self, attempt: AttemptId, num_bytes: int, pages: int, handoff_s: float) -> None:
        self._said.append(
            Verified(attempt=attempt, bytes=num_bytes, pages=pages, handoff_s=handoff_s)
        )

    def progress(self, request: Request, outcome: StepOutcome) -> None:
        """A denoise step's commit, its drafts where they were asked for, and the end."""
        if outcome.num_settled:
            self._said.append(_committed(request, outcome))
        if outcome.finish is not None:
            self._said.append(_finished(request, outcome))
        elif request.drafts:
            self._said.extend(_drafts(request, outcome))

    def missed(self, attempt: AttemptId, handoff: HandoffFailed) -> None:
        """A request's pages will not come. Another attempt may work, but not with this writer's
        model."""
        code = _CODES.get(handoff.cause, "DATA_LOSS")
        retryable = handoff.cause is not Cause.FINGERPRINT
        self.failed(attempt, code, handoff.message, retryable=retryable)

    def failed(
        self, attempt: AttemptId, code: FailureCode, message: str, *, retryable: bool
    ) -> None:
        self._said.append(Failed(attempt=attempt, code=code, message=message, retryable=retryable))

    def abort_done(self, attempt: AttemptId, *, was_running: bool) -> None:
        self._said.append(AbortDone(attempt=attempt, was_running=was_running))


def _committed(request: Request, outcome: StepOutcome) -> Committed:
    return Committed(
        attempt=request.attempt,
        token_offset=outcome.token_offset,
        token_ids=outcome.tokens,
        forward_passes=request.forward_passes,
        frontier=() if outcome.finish else request.sequence.frontier(),
    )


def _finished(request: Request, outcome: StepOutcome) -> Finished:
    return Finished(
        attempt=request.attempt,
        stopped=outcome.finish is AnswerEnd.STOP,
        num_tokens=outcome.token_offset + len(outcome.tokens),
        forward_passes=request.forward_passes,
        preemptions=request.preemptions,
    )


def _drafts(request: Request, outcome: StepOutcome) -> list[Draft]:
    sequence = request.sequence
    return [
        Draft(
            attempt=request.attempt,
            token_offset=block.start - sequence.prompt_len,
            block=sequence.snapshot(block),
        )
        for block in outcome.written
        if block.state is BlockPhase.ACTIVE
    ]
