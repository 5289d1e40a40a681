"""What one request sends into a forward, and what comes back, in the model runner's terms."""

import numpy as np

from effuse.decode_worker.candidates import HostCandidates
from effuse.decode_worker.denoise import StepPlan
from effuse.decode_worker.request import Request
from effuse.kernels.sampling import ScoreCode
from effuse.models.part import Part, PartResult


def prefill_part(request: Request, num_rows: int) -> Part:
    """The next `num_rows` tokens of what precedes the blocks in flight; all are stored."""
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


def denoise_part(request: Request, plan: StepPlan) -> Part:
    """All blocks in flight; the settled ones are stored, the masks want candidates."""
    return Part(
        token_ids=request.sequence.token_ids[plan.start : plan.end].tolist(),
        start=plan.start,
        pages=request.page_ids,
        num_stored=plan.num_stored,
        block_origin=request.sequence.origin,
        candidates=plan.candidates.tolist(),
        boundary=request.boundary,
        keep_boundary=plan.num_stored > 0,
        denoise_counts=plan.denoise_counts.tolist(),
        sampling=request.sampling,
        score=ScoreCode.named(request.settings.score),
    )


def candidates_of(result: PartResult) -> HostCandidates:
    """The runner's lists as arrays."""
    return HostCandidates(
        np.asarray(result.tokens, dtype=np.int64),
        np.asarray(result.confidences, dtype=np.float32),
        np.asarray(result.scores, dtype=np.float32),
    )
