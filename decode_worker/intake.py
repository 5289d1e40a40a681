"""Input and events of a decode engine: requests, boundary states of handoffs, and rehearsals.

A StartDecode message becomes a request, or a reason why it cannot be served here. Values are
checked against the model and the engine's limits; nothing is reserved or stored. The boundary state
is checked against its request: the prompt must be the request's, by length, digest and tail;
shifting models need one hidden vector. All checks read host memory, because reading the device
would wait for queued steps.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from effuse.config.decoding import SettingError, used
from effuse.decode_worker.denoise import AnswerEnd, StepOutcome
from effuse.decode_worker.request import BlockCost, DecodeRequest
from effuse.decode_worker.scheduler import DecodeLimits, check_fits
from effuse.decode_worker.sequence import Block, RequestError, Sequence
from effuse.kvtransfer.connector import ArrivalRefused, Arrived, Cause
from effuse.kvtransfer.digest import prompt_digest
from effuse.kvtransfer.ends import HandoffReceiver
from effuse.kvtransfer.messages import AttemptId, BoundaryState, PageRef
from effuse.kvtransfer.pool import PagePool
from effuse.models.config import ModelConfig
from effuse.placement.records import FEW_PAGES
from effuse.worker.engine_process import Outbox
from effuse.worker.messages import (
    BlockState,
    Committed,
    CoreEvent,
    Draft,
    Failed,
    FailureCode,
    Finished,
    Reserved,
    Resume,
    StartDecode,
    StartRehearsal,
    TokenLogprobs,
    Verified,
)

_CODES: dict[Cause, FailureCode] = {
    Cause.FINGERPRINT: "FAILED_PRECONDITION",
    Cause.INCARNATION: "FAILED_PRECONDITION",
    Cause.PEER: "UNAVAILABLE",
    Cause.LEASE: "DEADLINE_EXCEEDED",
}


def handoff_failed(attempt: AttemptId, handoff: ArrivalRefused) -> Failed:
    """An attempt's pages will not arrive. Another writer's may."""
    return Failed(
        attempt=attempt,
        code=_CODES.get(handoff.cause, "DATA_LOSS"),
        message=handoff.message,
        retryable=handoff.cause is not Cause.FINGERPRINT,
    )


def step_events(request: DecodeRequest, outcome: StepOutcome, cost: BlockCost) -> list[CoreEvent]:
    """A denoise step's commit, its drafts if the request asks for them, and the end."""
    events: list[CoreEvent] = []
    if outcome.num_settled:
        events.append(_committed(request, outcome, cost))
    if outcome.finish is not None:
        events.append(_finished(request, outcome))
    elif request.asked.drafts:
        final_len = request.sequence.final_len
        events += [_draft(request, one) for one in outcome.written if one.end > final_len]
    return events


def begun_drafts(request: DecodeRequest) -> list[CoreEvent]:
    """Drafts of the blocks that have begun since the last time, if the request asks for them. A
    block's first forward may write it completely, and its draft would never be shown otherwise."""
    if not request.asked.drafts:
        return []
    begun = [one for one in request.sequence.blocks if one.end > request.drafted_end]
    request.drafted_end = max([request.drafted_end, *(one.end for one in begun)])
    return [_draft(request, one) for one in begun if one.end > request.sequence.final_len]


def _committed(request: DecodeRequest, outcome: StepOutcome, cost: BlockCost) -> Committed:
    return Committed(
        attempt=request.asked.attempt,
        token_offset=outcome.token_offset,
        token_ids=outcome.tokens,
        forward_passes=request.forward_passes,
        frontier=() if outcome.finish else _frontier(request),
        logprobs=_take_logprobs(request, outcome.token_offset, len(outcome.tokens)),
        end_token_id=outcome.end_token_id,
        prompts_s=cost.prompts_s,
        batch=cost.batch,
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
            state, logprobs=tuple(request.logprobs.get(at) for at in range(start, start + size))
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


MOST_BYTES = 64 << 20  # about the size of a large model's prompt
MOST_PAGES = 1 << 14  # each is named and digested
LEAST_SHARE = 8  # of the pool: at most one page in this many


@dataclass(frozen=True, slots=True)
class Intake:
    """Makes requests for one model under one engine's limits."""

    model: ModelConfig
    limits: DecodeLimits

    def make_request(self, message: StartDecode, *, arrival: int, now: float) -> DecodeRequest:
        """A request that can finish here. Raises RequestError with the fault."""
        if message.settings.denoising_steps > self.limits.block_size:
            raise RequestError(
                f"denoising_steps must be at most the block size {self.limits.block_size}, "
                f"got {message.settings.denoising_steps}",
                "decoding.denoising_steps",
            )
        try:
            settings = used(message.settings)
        except SettingError as error:
            raise RequestError(str(error), f"decoding.{error.name}") from None
        canvas = settings.is_canvas
        request = DecodeRequest(
            asked=replace(
                message, prompt_token_ids=(), resume=None, group="" if canvas else message.group
            ),
            model=self.model,
            arrival=arrival,
            arrived_s=now,
            sequence=self._sequence(message),
            settings=self.model.block_steps(settings, message.stopping.max_tokens),
        )
        if message.num_logprobs is not None and message.resume is not None:
            _resume_logprobs(request, message.resume)
        if why := self.model.unfit(name := request.settings.algorithm):
            raise RequestError(why, "decoding.algorithm")
        if canvas and message.writer is not None:
            text = f"{name} computes prompt and answer together, without a prefill worker"
            raise RequestError(text)
        if not canvas:  # all blocks of one are in flight together, outside of device slots
            _check_window(request, self.limits)
        _check_stops(request, self.limits)
        cause = "prompt" if canvas else "decoding.window"
        check_fits(request.footprint(), self.limits, cause)
        return request

    def _sequence(self, message: StartDecode) -> Sequence:
        prompt = message.prompt_token_ids
        self._check_length(len(prompt), message.stopping.max_tokens)
        self._check_ids("prompt_token_ids", prompt)
        self._check_ids("stop_token_ids", message.stopping.stop_token_ids)
        self._check_ids("logit_bias", [token for token, _ in message.sampling.logit_bias])
        resume = message.resume or Resume(committed_token_ids=(), frontier=())
        self._check_ids("committed_token_ids", resume.committed_token_ids)
        for block in resume.frontier:
            self._check_ids("token_ids of the frontier", block.token_ids)
        is_canvas = message.settings.is_canvas
        sequence = Sequence(
            prompt,
            origin=self.model.block_origin(len(prompt)),
            block_size=self.limits.block_size,
            mask_token_id=self.model.mask_token_id,
            stopping=message.stopping,
            is_canvas=is_canvas,
        )
        committed, frontier = resume.committed_token_ids, resume.frontier
        return sequence.resume(committed, frontier, is_canvas=is_canvas)

    def _check_length(self, prompt_len: int, max_tokens: int) -> None:
        """Refuses absurd lengths before it makes anything of that size."""
        most = self.limits.max_model_len
        if prompt_len + max_tokens > most:
            raise RequestError(
                f"a prompt of {prompt_len} tokens and max_tokens {max_tokens} add up to "
                f"{prompt_len + max_tokens} tokens; max_model_len is {most}",
                "prompt",
            )

    def _check_ids(self, name: str, token_ids: Collection[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.model.vocab_size:
            raise RequestError(
                f"{name} must lie in 0..{self.model.vocab_size - 1}, "
                f"got {min(token_ids)}..{max(token_ids)}"
            )


def _resume_logprobs(request: DecodeRequest, resume: Resume) -> None:
    """Restores the log-probabilities of written tokens in the frontier."""
    sequence = request.sequence
    for block, state in zip(sequence.blocks, resume.frontier, strict=True):
        first = max(block.start, sequence.prompt_len)
        logprobs = state.logprobs or (None,) * sequence.block_size
        for position in range(first, min(block.end, sequence.mask_end)):
            entry = logprobs[position - block.start]
            if entry is not None and not sequence.masked[position]:
                request.logprobs[position] = entry
            elif entry is None and not sequence.masked[position]:
                raise RequestError("the frontier has no log-probabilities for its written tokens")


def _check_window(request: DecodeRequest, limits: DecodeLimits) -> None:
    most_active = request.settings.most_active
    if most_active > limits.max_window:
        raise RequestError(
            f"expected a window of at most this worker's max_window {limits.max_window}, got "
            f"{most_active}",
            "decoding.window",
        )
    num_active = len(request.sequence.active)
    if num_active > most_active:
        raise RequestError(
            f"the frontier holds {num_active} blocks; the settings allow {most_active}"
        )


def _check_stops(request: DecodeRequest, limits: DecodeLimits) -> None:
    num_stops = len(request.sequence.stopping.stop_token_ids)
    if num_stops > limits.max_stop_ids:
        raise RequestError(
            f"expected no more stop ids than this worker's max_stop_ids {limits.max_stop_ids}, "
            f"got {num_stops}, end-of-sequence ids included",
            "stopping.stop_token_ids",
        )


class BoundaryError(ValueError):
    """The boundary state does not belong to this request."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The valid form of boundary states for one model."""

    hidden_size: int | None  # None if logits are not shifted: no vector is needed
    dtype: torch.dtype
    device: torch.device

    def accept(self, state: BoundaryState, sequence: Sequence) -> Tensor | None:
        """The hidden vector [hidden_size] on the host, pinned if it goes to a GPU, or None.

        Raises BoundaryError that names the difference.
        """
        if state.prompt_len != sequence.prompt_len:
            raise BoundaryError(
                f"the pages that arrived hold a prompt of {state.prompt_len} tokens, the request "
                f"has {sequence.prompt_len}"
            )
        if state.prompt_digest != prompt_digest(sequence.prompt_ids):
            raise BoundaryError("the pages that arrived hold the KV of another prompt")
        tail = sequence.token_ids[sequence.first_block_start : sequence.prompt_len].tolist()
        if list(state.tail_token_ids) != tail:
            raise BoundaryError(
                "the prompt's last tokens differ from those that arrived with the pages"
            )
        if self.hidden_size is None or sequence.first_block_start == 0:
            return None  # nothing is stored before a first block
        return self._vector(state.hidden, self.hidden_size)

    def _vector(self, data: bytes | None, size: int) -> Tensor:
        expected = size * self.dtype.itemsize
        if data is None or len(data) != expected:
            found = "none" if data is None else f"{len(data)} bytes"
            raise BoundaryError(f"expected a hidden vector of {expected} bytes, got {found}")
        vector = torch.frombuffer(bytearray(data), dtype=self.dtype)
        if not bool(torch.isfinite(vector).all()):
            raise BoundaryError("the hidden vector is not finite")
        return vector.pin_memory() if self.device.type == "cuda" else vector


class RehearsalReceiver:
    """The rehearsal that an engine receives: free pages that a prefill worker writes once, to
    measure the link. Its own thread calls it.

    They are reserved, written and verified like a prompt's, and free again afterwards. They are
    held only while most of the free pages stay free, and for one rehearsal at a time.
    """

    def __init__(self, pool: PagePool, handoffs: HandoffReceiver, outbox: Outbox) -> None:
        self._pool = pool
        self._handoffs = handoffs
        self._outbox = outbox
        self._attempt: AttemptId | None = None  # while its pages may still arrive
        self._pages: tuple[PageRef, ...] = ()
        self._last = ""  # transfer id of the last one, which may have left pages in quarantine

    def reserve(self, message: StartRehearsal, *, is_busy: bool, now: float) -> None:
        """Opens free pages to the writer; refuses if requests may need them."""
        attempt, free = message.attempt, self._pool.num_free
        if not self._handoffs.can_receive:
            text = "this worker has no connector, so it only accepts local prefill"
            self._outbox.failed(attempt, "FAILED_PRECONDITION", text)
            return
        most = min(MOST_BYTES // self._handoffs.page_bytes, self._pool.num_pages // LEAST_SHARE)
        asked = max(1, message.most_pages // self._handoffs.context_degree)
        count = min(max(1, most), MOST_PAGES, asked)
        if message.most_pages <= FEW_PAGES:  # a link warms up, and no prompt takes it before that
            is_busy, count = False, min(count, max(1, free // 2))
        if self._attempt is not None or self._handoffs.is_open(self._last):
            self._refuse(attempt, "another rehearsal is running")
        elif is_busy or count > self._pool.num_lendable:
            self._refuse(
                attempt,
                f"requests need the pages: a rehearsal cannot have {count} of {free} free pages",
            )
        else:
            pages = self._pool.allocate(count)
            assert pages is not None, "they were counted"
            self._attempt, self._pages, self._last = attempt, pages, attempt.transfer_id
            reservation = self._handoffs.reserve(attempt, pages, message.writer, now)
            self._outbox.add(Reserved(reservation=reservation))

    def take_report(self, report: Arrived | ArrivalRefused) -> bool:
        """Handles the end of a handoff; False if it is not the rehearsal's."""
        attempt, pages = self._attempt, self._pages
        if attempt is None or report.transfer_id != attempt.transfer_id:
            return False
        self._attempt, self._pages = None, ()
        if isinstance(report, ArrivalRefused):
            self._outbox.add(handoff_failed(attempt, report))
        else:
            self._pool.release(pages)
            self._outbox.add(
                Verified(
                    attempt=attempt,
                    bytes=report.num_bytes,
                    pages=len(pages),
                    handoff_s=report.seconds,
                )
            )
        return True

    def is_of(self, transfer_id: str) -> bool:
        """Whether this rehearsal is running."""
        return self._attempt is not None and self._attempt.transfer_id == transfer_id

    def abort(self, transfer_id: str) -> bool:
        """Abandons the rehearsal; False if there is none of this name."""
        if not self.is_of(transfer_id):
            return False
        self._attempt, self._pages = None, ()
        self._handoffs.abort(transfer_id)
        return True

    def _refuse(self, attempt: AttemptId, message: str) -> None:
        self._outbox.failed(attempt, "RESOURCE_EXHAUSTED", message, retryable=True)
