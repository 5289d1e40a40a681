"""What a forward runs for a step of a canvas: between `canvas.py` and the model runner.

Whole sequences, or what their caches lack, a second one for guidance, and how tokens are drawn.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from effuse.config.decoding import Alg
from effuse.decode_worker import canvas
from effuse.decode_worker.logit_edits import edits_for
from effuse.decode_worker.request import DecodeRequest
from effuse.kernels.sampling import ScoreCode
from effuse.kernels.sampling_llada import LladaDraw
from effuse.models.part import Part

_SCORES: Final[Mapping[Alg, ScoreCode]] = {
    "origin": ScoreCode.CONFIDENCE,  # which decides nothing there
    "maskgit_plus": ScoreCode.CONFIDENCE,
    "topk_margin": ScoreCode.MARGIN,
    "entropy": ScoreCode.NEG_ENTROPY,
}


def canvas_parts(request: DecodeRequest) -> list[Part]:
    """The rows of the coming step; with guidance also those of a canvas without a prompt."""
    sequence, settings = request.sequence, request.settings
    token_ids = sequence.token_ids
    if request.num_to_prefill:
        step = request.canvas_step()
        plan = canvas.open_refill(step)
        token_ids = token_ids.copy()
        token_ids[step.block_start : step.block_end] = sequence.mask_token_id
    else:
        plan = request.open_step()
    part = Part(
        token_ids=token_ids[plan.start : plan.end].tolist(),
        start=plan.start,
        pages=request.page_ids,
        num_stored=plan.num_stored,
        num_behind=plan.num_behind,
        unstored=plan.unstored,
        block_origin=sequence.mask_end,  # what lies before it sees all of itself
        candidates=plan.candidates.tolist(),
        denoise_counts=plan.denoise_counts.tolist(),
        sampling=request.sampling,
        score=_SCORES[settings.alg],
        draw=None if settings.algorithm == "dream" or request.shifts else _draw(request),
        guidance=settings.cfg_scale,
        num_logprobs=request.num_logprobs,
        edits=edits_for(request.sampling, sequence, plan.candidates),
    )
    if not settings.cfg_scale:
        return [part]
    prompt_len = sequence.prompt_len
    masked = [sequence.mask_token_id] * prompt_len + list(part.token_ids[prompt_len:])
    return [part, replace(part, token_ids=masked, guidance=0.0, edits=None, num_logprobs=None)]


def _draw(request: DecodeRequest) -> LladaDraw:
    settings, eos, mask = request.settings, request.eos_token_ids, request.sequence.mask_token_id
    return LladaDraw(
        temperature=request.sampling.temperature,
        seed=request.sampling.seed,
        answer_index=request.sampling.answer_index,
        never=(mask, *eos[:1]) if settings.logits_eos_inf else (mask,),
        last=eos if settings.confidence_eos_eot_inf else (),
    )
