"""Runs the forward of a step: chunks of prompts, and denoise steps.

The host feeds every forward, except for the denoise steps of requests in the slots of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from effuse.config.decoding import Alg
from effuse.decode_worker import canvas, denoise
from effuse.decode_worker.denoise import StepOutcome, StepPlan
from effuse.decode_worker.request import DecodeRequest
from effuse.decode_worker.sequence import HostCandidates, IntArray
from effuse.kernels.pages import Place, QueuedLayers
from effuse.kernels.sampling_llada import LladaDraw
from effuse.kernels.values import ScoreCode
from effuse.models.part import Forward, HostLogprobs, Part, PartResult
from effuse.worker.engine_process import ForwardFailed, ForwardGuard
from effuse.worker.messages import TokenLogprobs

if TYPE_CHECKING:
    from effuse.decode_worker.device_slots import DeviceSlots

_SCORES: Final[Mapping[Alg, ScoreCode]] = {
    "origin": ScoreCode.CONFIDENCE,  # which decides nothing there
    "maskgit_plus": ScoreCode.CONFIDENCE,
    "topk_margin": ScoreCode.MARGIN,
    "entropy": ScoreCode.NEG_ENTROPY,
}


class Counters(msgspec.Struct):
    """Counters of an engine since its start, by their names in `Load`."""

    steps: int = 0  # forwards
    step_requests: int = 0  # sum of the requests in each
    step_tokens: int = 0  # sum of the tokens in each
    preemptions: int = 0
    prompts_shared: int = 0  # whose KV came from another request
    prompt_tokens: int = 0  # of prompts that were computed here
    prompts_overdue: int = 0  # forwards whose prompts had waited too long for room
    kv_bytes: int = 0  # received from prefill workers
    kv_bytes_held: int = 0  # that the cache had, and no prefill worker sent


@dataclass(frozen=True, slots=True)
class Share:
    """One request's share of a step: all rows of its denoise step, or a chunk of its prefill."""

    request: DecodeRequest
    num_rows: int
    is_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Prefilled:
    """KV of a request's chunk is stored."""

    request: DecodeRequest


@dataclass(frozen=True, slots=True)
class Denoised:
    """A denoise step has changed a request's sequence."""

    request: DecodeRequest
    outcome: StepOutcome


@dataclass(frozen=True, slots=True)
class Broken:
    """A request cannot go on; none of its work runs any more."""

    request: DecodeRequest
    message: str  # for the caller
    is_retryable: bool


StepResult = Prefilled | Denoised | Broken
NOT_FINITE = "the model gave no finite probabilities"


class Executor:
    """Launches steps, and returns their results once they have ended.

    Results must be applied before the next ones are read, because they refer to the current
    sequences. Prompts, canvases and some requests are fed from the host: their results are there
    when the launch returns. With `slots` the other denoise steps run on the device, one behind.

    On a device a prompt's forward, or a page's copy, may write pages long after its launch returns.
    Later work in the same queue comes after them, but a prefill worker's bytes do not.
    """

    def __init__(
        self,
        forward: Forward,
        copy_page: Callable[[int, int], None],
        place: Callable[[], Place] | None = None,
        queued: QueuedLayers | None = None,
        slots: DeviceSlots | None = None,
        *,
        replica: int = 0,
        ask: Callable[[Executor, Sequence[Share]], None] | None = None,
    ) -> None:
        """`copy_page` copies pages. On a device `place` returns the place after all launched work.
        `queued` are the forward's layers, whose ends are signs of life. With `ask` forwards of the
        host are asked for there, whose caller calls `parts_of` and `take`."""
        self.counters = Counters()
        self.num_ended = 0  # launches whose results are there
        self.runs_ahead = slots is not None  # a step is launched before the last one is read
        self._forward = forward
        self._copy_page = copy_page
        self._place = place
        self._queued = queued
        self._slots = slots
        self._replica = replica
        self._ask = ask
        self._guard, self._slots_guard = ForwardGuard(), ForwardGuard()
        self._results: list[StepResult] = []  # of the host's forwards, and of failed launches
        # Work that may still write pages: those of a request, by transfer id, or named ones.
        self.writing: dict[str | int, Place] = {}

    @property
    def is_full(self) -> bool:
        """Whether results must be read before the next launch."""
        return self._slots is not None and self._slots.stepper.num_ahead > 1

    @property
    def is_running(self) -> bool:
        """Whether a step was launched whose results were not read."""
        return bool(self._results or (self._slots and self._slots.stepper.num_ahead))

    def launch(self, shares: Sequence[Share]) -> bool:
        """Launches a step; False if there was nothing to run. Each share has its pages. Requests
        on the device take part until they end."""
        slots = self._slots
        if slots is None:
            self.num_ended += bool(shares)
            return self._launch_from_host(shares)
        from_host = [share for share in shares if share.request.runs_from_host]
        for share in shares:
            if not share.request.runs_from_host:
                slots.bring_up(share.request)
        has_run = self._launch_from_host(from_host)
        if not slots.residents:
            self.num_ended += has_run
            return has_run
        self._launch_slots(slots)
        return True

    def has_results(self) -> bool:
        """Whether results can be read without waiting."""
        if self._queued is not None:
            self._queued.look()
        return bool(self._results) or (self._slots is not None and self._slots.has_ended())

    def read(self) -> list[StepResult]:
        """Results of the oldest running step; waits for it."""
        if self._slots is not None and not self._results:
            return self._read_slots(self._slots)
        results, self._results = self._results, []
        return results

    def remove(self, request: DecodeRequest) -> bool:
        """Removes a request from steps that are launched from now on. True if steps with unread
        results may still write its pages; it waits for other writers."""
        if self.writing:
            keys: set[str | int] = {request.transfer_id, *request.page_ids}
            for key in keys & self.writing.keys():
                place = self.writing.pop(key)
                self._wait(place.query)
                place.synchronize()
        return self._slots is not None and self._slots.remove(request)

    def copy_page(self, source: int, target: int) -> None:
        """Copies the page with this id to another one, after all earlier launches."""
        self._copy_page(source, target)
        self._note([source, target])

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Shows signs of life while layers end, until all have or `is_over`."""
        if self._queued is not None:
            self._queued.wait(is_over)

    def _note(self, keys: Iterable[str | int]) -> None:
        """Waits for all launched work before the pages of these requests change hands."""
        if self._place is not None:
            writing = {key: place for key, place in self.writing.items() if not place.query()}
            self.writing = writing | dict.fromkeys(keys, self._place())

    def _launch_slots(self, slots: DeviceSlots) -> None:
        """Launches a step of the slots; if that fails, only their requests fail."""
        self.counters.steps += 1
        self.counters.step_requests += len(slots.residents)
        try:
            self._slots_guard.run(slots.stepper.launch, len(slots.residents))
        except ForwardFailed as failure:
            for resident in list(slots.residents.values()):
                slots.remove(resident.request)
                self._results.append(Broken(resident.request, str(failure), is_retryable=True))
            while slots.stepper.num_ahead:
                # None of its work may still run when pages are released.
                self._wait(slots.stepper.has_ended)
                slots.stepper.read()
                self.num_ended += 1

    def _read_slots(self, slots: DeviceSlots) -> list[StepResult]:
        self._wait(slots.stepper.has_ended)
        self.num_ended += 1
        results: list[StepResult] = []
        for request, plan, outcome in slots.read():
            if outcome is None:
                results.append(Broken(request, NOT_FINITE, is_retryable=False))
            else:
                self.counters.step_tokens += plan.end - plan.start
                results.append(Denoised(request, outcome))
        return results

    def parts_of(self, shares: Sequence[Share]) -> list[list[Part]]:
        """The parts of a forward for each share."""
        parts = [_parts_of(share) for share in shares]
        if self._replica:
            parts = [[replace(part, replica=self._replica) for part in each] for each in parts]
        self.counters.steps += 1
        self.counters.step_requests += len(shares)
        self.counters.step_tokens += sum(len(part.token_ids) for each in parts for part in each)
        return parts

    def take(
        self,
        shares: Sequence[Share],
        parts: Sequence[Sequence[Part]],
        results: Iterator[PartResult],
    ) -> None:
        """Applies a forward's results, which are there for all parts in their order."""
        for share, each in zip(shares, parts, strict=True):
            first, *_ = [next(results) for _ in each]
            self._results.append(_apply(share.request, each[0], first))
        self._note([share.request.transfer_id for share in shares])

    def _launch_from_host(self, shares: Sequence[Share]) -> bool:
        if not shares:
            return False
        if self._ask is not None:
            self._ask(self, shares)
            return True
        parts = self.parts_of(shares)
        flat = [part for each in parts for part in each]
        try:
            results = self._guard.run(lambda: self._forward.run(flat), len(shares))
        except ForwardFailed as failure:
            self._results += [
                Broken(share.request, str(failure), is_retryable=True) for share in shares
            ]
            self._note([share.request.transfer_id for share in shares])
        else:
            self.take(shares, parts, iter(results))
        return True


def _parts_of(share: Share) -> list[Part]:
    """The parts of a forward for a request; the first one's results are the request's."""
    request = share.request
    if not request.num_to_prefill:
        return _with_guide(request, denoise_part(request, request.open_step()))
    if request.settings.is_canvas:
        return _with_guide(request, _refill_part(request))
    return [prefill_part(request, share.num_rows)]


def _apply(request: DecodeRequest, part: Part, result: PartResult) -> StepResult:
    """Applies a forward's stored tokens and proposals to a request."""
    if result.boundary is not None:
        request.boundary = result.boundary
    if request.num_to_prefill:
        if request.settings.is_canvas:
            request.cache_of = request.canvas_step().block_start
        else:
            request.sequence.store(part.num_stored)
        return Prefilled(request)
    candidates = _candidates_of(result)
    if not candidates.is_finite():
        return Broken(request, NOT_FINITE, is_retryable=False)
    plan = request.close_step()
    before = request.sequence.token_ids[plan.candidates]
    if request.settings.is_canvas:
        step = request.canvas_step()
        if plan.num_stored:
            request.cache_of = step.block_start
        outcome = canvas.apply_step(step, plan, candidates)
    else:
        outcome = denoise.apply_step(request.sequence, request.settings, plan, candidates)
    if result.logprobs is not None:
        _note_logprobs(request, plan.candidates, before, result.logprobs)
    return Denoised(request, outcome)


def _note_logprobs(
    request: DecodeRequest, positions: IntArray, before: IntArray, told: HostLogprobs
) -> None:
    """Keeps log-probabilities of candidates that were written at these positions. `before` are the
    previous ids: an unchanged token keeps its earlier ones.
    """
    for index in np.flatnonzero(request.sequence.token_ids[positions] != before).tolist():
        ids, top = told.top_token_ids[index], told.top[index]
        entry = TokenLogprobs(told.chosen[index], tuple(ids), tuple(top))
        request.logprobs[int(positions[index])] = entry


def prefill_part(request: DecodeRequest, num_rows: int) -> Part:
    """The next `num_rows` tokens before the blocks in flight; all are stored."""
    sequence = request.sequence
    start = sequence.committed_len
    return Part(
        token_ids=sequence.token_ids[start : start + num_rows].tolist(),
        start=start,
        pages=request.page_ids,
        num_stored=num_rows,
        block_origin=sequence.origin,
        keep_boundary=num_rows == request.num_to_prefill,
    )


def denoise_part(request: DecodeRequest, plan: StepPlan) -> Part:
    """The rows of a step: all blocks in flight, or a canvas. Masks need candidates."""
    sequence, settings, sampling = request.sequence, request.settings, request.asked.sampling
    is_canvas = settings.is_canvas
    if plan.is_greedy:
        sampling = msgspec.structs.replace(sampling, temperature=0.0)
    return Part(
        token_ids=sequence.token_ids[plan.start : plan.end].tolist(),
        start=plan.start,
        pages=request.page_ids,
        num_stored=plan.num_stored,
        num_behind=plan.num_behind,
        unstored=plan.unstored,
        # On a canvas each token before its end sees all of them.
        block_origin=sequence.mask_end if is_canvas else sequence.origin,
        candidates=plan.candidates.tolist(),
        boundary=request.boundary,
        keep_boundary=plan.num_stored > 0 and not is_canvas,
        denoise_counts=plan.denoise_counts.tolist(),
        sampling=sampling,
        score=_SCORES[settings.alg] if is_canvas else ScoreCode[settings.ranked_by.upper()],
        draw=_draw(request) if is_canvas else None,
        guidance=settings.cfg_scale if is_canvas else 0.0,
        num_logprobs=request.asked.num_logprobs,
        edits=request.edits(plan.candidates),
    )


def _refill_part(request: DecodeRequest) -> Part:
    """The rows that fill the lost cache of a canvas, before its block had any tokens."""
    step = request.canvas_step()
    part = denoise_part(request, canvas.open_refill(step))
    token_ids = request.sequence.token_ids.copy()
    token_ids[step.block_start : step.block_end] = request.sequence.mask_token_id
    return replace(
        part, token_ids=token_ids[part.start : part.start + len(part.token_ids)].tolist()
    )


def _with_guide(request: DecodeRequest, part: Part) -> list[Part]:
    """The part, and with guidance also that of a canvas without a prompt."""
    if not part.guidance:
        return [part]
    prompt_len = request.sequence.prompt_len
    masked = [request.sequence.mask_token_id] * prompt_len + list(part.token_ids[prompt_len:])
    return [part, replace(part, token_ids=masked, guidance=0.0, edits=None, num_logprobs=None)]


def _candidates_of(result: PartResult) -> HostCandidates:
    """The runner's lists as arrays."""
    return HostCandidates(
        np.asarray(result.tokens, dtype=np.int64),
        np.asarray(result.confidences, dtype=np.float32),
        np.asarray(result.scores, dtype=np.float32),
    )


def _draw(request: DecodeRequest) -> LladaDraw | None:
    """Draws of LLaDA's loop, and of Fast-dLLM's except for models that shift their logits."""
    settings, model, sampling = request.settings, request.model, request.asked.sampling
    if settings.algorithm == "dream" or (settings.algorithm == "fast_dllm" and model.shift_logits):
        return None
    eos = model.eos_token_ids[:1] if settings.logits_eos_inf else ()
    return LladaDraw(
        temperature=sampling.temperature,
        seed=sampling.seed,
        answer_index=sampling.answer_index,
        never=(request.sequence.mask_token_id, *eos),
        last=model.postponed_ids if settings.confidence_eos_eot_inf else (),
    )
