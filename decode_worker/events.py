"""Events of a decode engine about its requests; decides nothing."""

from effuse.decode_worker.denoise import AnswerEnd, StepOutcome
from effuse.decode_worker.request import DecodeRequest
from effuse.decode_worker.sequence import Block, BlockPhase
from effuse.kvtransfer.connector import Cause
from effuse.kvtransfer.messages import AttemptId
from effuse.kvtransfer.receiver import HandoffFailed
from effuse.worker.messages import Committed, CoreEvent, Draft, Failed, FailureCode, Finished

_CODES: dict[Cause, FailureCode] = {
    Cause.FINGERPRINT: "FAILED_PRECONDITION",
    Cause.INCARNATION: "FAILED_PRECONDITION",
    Cause.PEER: "UNAVAILABLE",
    Cause.LEASE: "DEADLINE_EXCEEDED",
}


def handoff_failed(attempt: AttemptId, handoff: HandoffFailed) -> Failed:
    """An attempt's pages will not arrive. Another writer's may."""
    return Failed(
        attempt=attempt,
        code=_CODES.get(handoff.cause, "DATA_LOSS"),
        message=handoff.message,
        retryable=handoff.cause is not Cause.FINGERPRINT,
    )


def step_events(request: DecodeRequest, outcome: StepOutcome) -> list[CoreEvent]:
    """A denoise step's commit, its drafts if the request asks for them, and the end."""
    events: list[CoreEvent] = []
    if outcome.num_settled:
        events.append(_committed(request, outcome))
    if outcome.finish is not None:
        events.append(_finished(request, outcome))
    elif request.drafts:
        events += _drafts(request, outcome)
    return events


def begun_drafts(request: DecodeRequest) -> list[CoreEvent]:
    """Drafts of the blocks that have begun since the last time, if the request asks for them. A
    block's first forward may write it completely, and its draft would never be shown otherwise.
    """
    if not request.drafts:
        return []
    begun = [one for one in request.sequence.blocks if one.end > request.drafted_end]
    request.drafted_end = max([request.drafted_end, *(one.end for one in begun)])
    return [_draft(request, one) for one in begun if one.state is BlockPhase.ACTIVE]


def _committed(request: DecodeRequest, outcome: StepOutcome) -> Committed:
    return Committed(
        attempt=request.attempt,
        token_offset=outcome.token_offset,
        token_ids=outcome.tokens,
        forward_passes=request.forward_passes,
        frontier=() if outcome.finish else request.frontier(),
        logprobs=request.take_logprobs(outcome.token_offset, len(outcome.tokens)),
        end_token_id=outcome.end_token_id,
    )


def _finished(request: DecodeRequest, outcome: StepOutcome) -> Finished:
    return Finished(
        attempt=request.attempt,
        stopped=outcome.finish is AnswerEnd.STOP,
        num_tokens=outcome.token_offset + len(outcome.tokens),
        forward_passes=request.forward_passes,
        preemptions=request.preemptions,
    )


def _drafts(request: DecodeRequest, outcome: StepOutcome) -> list[Draft]:
    return [_draft(request, one) for one in outcome.written if one.state is BlockPhase.ACTIVE]


def _draft(request: DecodeRequest, block: Block) -> Draft:
    return Draft(
        attempt=request.attempt,
        token_offset=block.start - request.sequence.prompt_len,
        block=request.sequence.snapshot(block),
    )
