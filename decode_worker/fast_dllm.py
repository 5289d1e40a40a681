"""Fast-dLLM's parallel decoding (arXiv 2505.22618): all masks of a block above a threshold
together.

Which masks a step proposes tokens for, and which of them it writes. Pure functions; `canvas.py` has
the order of a step and its caches. The rules differ by model like the authors' loops. Models that
shift their logits by one write the first token of a block from the forward that fills the cache, at
any confidence. Without a cache they have no blocks but a budget that grows by `block_length` at
each step.
"""

import numpy as np

from effuse.decode_worker.sequence import CanvasStep, HostCandidates, IndexArray, IntArray


def proposals(step: CanvasStep) -> IntArray:
    """Masks of the first generation block that has any."""
    masks = step.masks()
    if not step.shifts:
        return masks[masks < step.block_end]
    if step.settings.cache == "none":
        return masks
    first = masks[:1]
    return first if first[0] == step.block_start else masks[masks < step.block_end]


def choose(step: CanvasStep, masks: IntArray, candidates: HostCandidates) -> IndexArray:
    """The best one, and all strictly above the threshold, or as many as `factor` allows."""
    if step.settings.factor:
        return candidates.best(_num_within(step.settings.factor, candidates))
    best = candidates.best(_budget(step, masks))
    above = candidates.confidences[best] > step.settings.confidence_threshold
    written: IndexArray = best[above | (best == candidates.best(1))]
    return written


def _budget(step: CanvasStep, masks: IntArray) -> int:
    """Most masks that this step may write."""
    if not step.shifts or step.settings.cache != "none":
        return len(masks)
    num_tokens = step.sequence.stopping.max_tokens
    goal = min(step.settings.block_length * (step.number + 1), num_tokens)
    return max(1, goal - (num_tokens - len(masks)))


def _num_within(factor: float, candidates: HostCandidates) -> int:
    """How many of the surest masks are written. The n-th one (except the first) is written if 1 -
    confidence is at most factor / (n + 1), and the last one of a block together with the one before
    it.

    In fp64. The authors' code also does not check the last one.
    """
    confidences = np.sort(-candidates.scores.astype(np.float64))
    thresholds = 1 - factor / np.arange(2, len(confidences) + 2)
    fails = np.flatnonzero(-confidences[1:] < thresholds[1:]) + 1
    count = int(fails[0]) if len(fails) else len(confidences)
    return len(confidences) if count >= len(confidences) - 1 else count
