"""What a forward runs for a step of a canvas, and what ranks the tokens that it proposes.

Between the pure steps of `canvas.py` and the model runner: whole sequences without pages, a second
one for guidance, and the noise that is drawn for positions rather than tokens.
"""

from dataclasses import replace

import numpy as np

from effuse.decode_worker.canvas import num_steps
from effuse.decode_worker.denoise import StepPlan
from effuse.decode_worker.request import DecodeRequest
from effuse.decode_worker.sequence import HostCandidates
from effuse.kernels.sampling_llada import LladaDraw, position_noise
from effuse.models.part import Part


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
        draw=_draw(request),
        guidance=settings.cfg_scale,
    )
    if not settings.cfg_scale:
        return [canvas]
    prompt_len = sequence.prompt_len
    masked = [sequence.mask_token_id] * prompt_len + list(canvas.token_ids[prompt_len:])
    return [canvas, replace(canvas, token_ids=masked, guidance=0.0)]


def rank(request: DecodeRequest, plan: StepPlan, candidates: HostCandidates) -> HostCandidates:
    """The candidates with scores drawn by lot, where the settings ask for that."""
    if request.settings.remasking != "random":
        return candidates
    positions = plan.candidates.tolist()
    noise = position_noise(request.sampling.seed, positions, num_steps(request.sequence), 0)
    return replace(candidates, scores=np.asarray(noise, dtype=np.float32))


def _draw(request: DecodeRequest) -> LladaDraw:
    settings, eos, mask = request.settings, request.eos_token_ids, request.sequence.mask_token_id
    return LladaDraw(
        temperature=request.sampling.temperature,
        seed=request.sampling.seed,
        answer_index=0,
        never=(mask, *eos[:1]) if settings.logits_eos_inf else (mask,),
        last=eos if settings.confidence_eos_eot_inf else (),
    )
