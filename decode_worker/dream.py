"""Dream's own diffusion_generate (arXiv 2508.15487): masks anywhere in the answer, by a schedule.

Time goes from 1 to `eps` in equal steps. The step from t to s writes a mask with probability 1 -
s/t (`origin`), or that share of the remaining masks, the best ones by `alg`. The last step writes
all. Pure functions; `canvas.py` has the order of a step.
"""

from dataclasses import replace

import numpy as np

from effuse.decode_worker.sequence import CanvasStep, HostCandidates, IndexArray, IntArray


def proposals(step: CanvasStep) -> IntArray:
    """All masks; with `origin` randomly chosen ones, whatever their candidates are."""
    masks = step.masks()
    if step.settings.alg != "origin":
        return masks
    return masks[step.drawn(masks).astype(np.float32) < _transfer_rate(step)]


def choose(step: CanvasStep, masks: IntArray, candidates: HostCandidates) -> IndexArray:
    """The step's share of the best ones, or a random draw that prefers better ones."""
    if step.settings.alg == "origin":
        return np.arange(len(masks), dtype=np.intp)
    count = int(np.float32(len(masks)) * _transfer_rate(step))
    if not count:
        return np.empty(0, dtype=np.intp)
    if step.settings.alg_temp:
        # Drawing without replacement by softmax(score / temperature) is a top-k with Gumbel noise.
        gumbel = -np.log(-np.log(step.drawn(masks)))
        noisy = candidates.scores / step.settings.alg_temp + gumbel
        candidates = replace(candidates, scores=noisy)
    return candidates.best(count)


def _transfer_rate(step: CanvasStep) -> np.float32:
    """1 - s/t of this step, in float32 like the authors' code; 1 in the last one."""
    steps = step.settings.steps or step.sequence.stopping.max_tokens
    if step.number >= steps - 1:
        return np.float32(1)
    eps = np.float32(step.settings.eps)
    now, then = _time(step.number, steps, eps), _time(step.number + 1, steps, eps)
    return np.float32(1) - then / now


def _time(number: int, steps: int, eps: np.float32) -> np.float32:
    """Entry `number` of the steps + 1 from 1 to eps, with the exact bits of torch.linspace: counted
    from the nearer end by a float32 stride, and rounded once."""
    stride = float((eps - np.float32(1)) / np.float32(steps))
    if number < (steps + 1) // 2:
        return np.float32(1 + stride * number)
    return np.float32(float(eps) - stride * (steps - number))
