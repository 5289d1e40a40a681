"""A request's rows in a forward: a chunk of its prompt, or its denoise step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import msgspec

from effuse.config.decoding import Alg
from effuse.decode_worker import canvas
from effuse.decode_worker.denoise import StepPlan
from effuse.decode_worker.request import DecodeRequest
from effuse.kernels.sampling_llada import LladaDraw
from effuse.kernels.values import ScoreCode
from effuse.models.part import Part

_SCORES: Final[Mapping[Alg, ScoreCode]] = {
    "origin": ScoreCode.CONFIDENCE,  # which decides nothing there
    "maskgit_plus": ScoreCode.CONFIDENCE,
    "topk_margin": ScoreCode.MARGIN,
    "entropy": ScoreCode.NEG_ENTROPY,
}


def parts_of(request: DecodeRequest, num_rows: int) -> list[Part]:
    """The parts of a forward for a request; the first one's results are the request's. num_rows: of
    a prompt."""
    if not request.num_to_prefill:
        return _with_guide(request, denoise_part(request, request.open_step()))
    if request.settings.is_canvas:
        return _with_guide(request, _refill_part(request))
    return [prefill_part(request, num_rows)]


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
