"""Events of a decode engine about its requests; decides nothing."""

from msgspec.structs import replace

from effuse.decode_worker.denoise import AnswerEnd, StepOutcome
from effuse.decode_worker.request import DecodeRequest
from effuse.decode_worker.sequence import Block
from effuse.kvtransfer.connector import Cause
from effuse.kvtransfer.messages import AttemptId
from effuse.kvtransfer.receiver import HandoffFailed
from effuse.worker.messages import (
    BlockState,
    Committed,
    CoreEvent,
    Draft,
    Failed,
    FailureCode,
    Finished,
    TokenLogprobs,
)

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
    elif request.asked.drafts:
        final_len = request.sequence.final_len
        events += [_draft(request, one) for one in outcome.written if one.end > final_len]
    return events


def begun_drafts(request: DecodeRequest) -> list[CoreEvent]:
    """Drafts of the blocks that have begun since the last time, if the request asks for them. A
    block's first forward may write it completely, and its draft would never be shown otherwise.
    """
    if not request.asked.drafts:
        return []
    begun = [one for one in request.sequence.blocks if one.end > request.drafted_end]
    request.drafted_end = max([request.drafted_end, *(one.end for one in begun)])
    return [_draft(request, one) for one in begun if one.end > request.sequence.final_len]


def _committed(request: DecodeRequest, outcome: StepOutcome) -> Committed:
    return Committed(
        attempt=request.asked.attempt,
        token_offset=outcome.token_offset,
        token_ids=outcome.tokens,
        forward_passes=request.forward_passes,
        frontier=() if outcome.finish else _frontier(request),
        logprobs=_take_logprobs(request, outcome.token_offset, len(outcome.tokens)),
        end_token_id=outcome.end_token_id,
    )


def _take_logprobs(request: DecodeRequest, offset: int, count: int) -> tuple[TokenLogprobs, ...]:
    """Those of `count` final tokens from `offset` on, if the request asks for them."""
    if request.asked.num_logprobs is None:
        return ()
    first = request.sequence.prompt_len + offset
    return tuple(request.logprobs.pop(position) for position in range(first, first + count))


def _frontier(request: DecodeRequest) -> tuple[BlockState, ...]:
    """The sequence's frontier, with the log-probabilities of its written tokens."""
    states, size = request.sequence.frontier(), request.sequence.block_size
    if request.asked.num_logprobs is None:
        return states
    blocks = range(request.sequence.final_len, request.sequence.in_flight_end, size)
    return tuple(
        replace(
            state,
            logprobs=tuple(request.logprobs.get(at) for at in range(start, start + size)),
        )
        for state, start in zip(states, blocks, strict=True)
    )


def _finished(request: DecodeRequest, outcome: StepOutcome) -> Finished:
    return Finished(
        attempt=request.asked.attempt,
        stopped=outcome.finish is AnswerEnd.STOP,
        num_tokens=outcome.token_offset + len(outcome.tokens),
        forward_passes=request.forward_passes,
        preemptions=request.preemptions,
    )


def _draft(request: DecodeRequest, block: Block) -> Draft:
    return Draft(
        attempt=request.asked.attempt,
        token_offset=block.start - request.sequence.prompt_len,
        block=request.sequence.snapshot(block),
    )
