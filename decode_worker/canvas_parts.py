"""What a forward runs for a step of a canvas: between `canvas.py` and the model runner.

Whole sequences without pages, a second one for guidance, and how their tokens are drawn.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from effuse.config.decoding import Alg
from effuse.decode_worker.denoise import StepPlan
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


def canvas_parts(request: DecodeRequest, plan: StepPlan) -> list[Part]:
    """The whole canvas as one bidirectional part; with guidance also the one without a prompt."""
    sequence, settings = request.sequence, request.settings
    canvas = Part(
        token_ids=sequence.token_ids[: plan.end].tolist(),
        start=0,
        pages=(),
        num_stored=0,
        block_origin=plan.end,  # what lies before it sees all of itself
        candidates=plan.candidates.tolist(),
        denoise_counts=plan.denoise_counts.tolist(),
        sampling=request.sampling,
        score=_SCORES[settings.alg],
        draw=_draw(request) if settings.algorithm == "llada" else None,
        guidance=settings.cfg_scale,
    )
    if not settings.cfg_scale:
        return [canvas]
    prompt_len = sequence.prompt_len
    masked = [sequence.mask_token_id] * prompt_len + list(canvas.token_ids[prompt_len:])
    return [canvas, replace(canvas, token_ids=masked, guidance=0.0)]


def _draw(request: DecodeRequest) -> LladaDraw:
    settings, eos, mask = request.settings, request.eos_token_ids, request.sequence.mask_token_id
    return LladaDraw(
        temperature=request.sampling.temperature,
        seed=request.sampling.seed,
        answer_index=0,
        never=(mask, *eos[:1]) if settings.logits_eos_inf else (mask,),
        last=eos if settings.confidence_eos_eot_inf else (),
    )
