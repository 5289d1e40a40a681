"""The decisions of block-parallel denoising, one short function each, so that a test can break one.

No tensors: sequences of blocks over a list of tokens. The loop that asks a model is `decode.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from oracle.settings import Candidate, Settings


class State(Enum):
    """SETTLED blocks are final. There is no COMMITTED: a decoder without cache stores nothing."""

    ACTIVE = "active"
    SETTLED = "settled"


@dataclass(slots=True)
class Block:
    """Positions start..end-1; `births` were masks when it was appended."""

    start: int
    end: int
    births: int
    state: State = State.ACTIVE
    full: bool = False
    denoise_count: int = 0


@dataclass(slots=True)
class Canvas:
    """Prompt and blocks in flight. `masked` marks the masks, not their id."""

    tokens: list[int]
    masked: list[bool]
    prompt_len: int
    origin: int
    block_size: int
    limit: int  # P + N
    blocks: list[Block] = field(default_factory=list)
    stop_written: bool = False

    def masks(self, block: Block) -> list[int]:
        """Masked positions, ascending."""
        return [p for p in range(block.start, block.end) if self.masked[p]]

    def append(self, mask_token_id: int) -> None:
        """Append the next block of the grid; the first one may begin inside the prompt."""
        start = self.blocks[-1].end if self.blocks else self._first_start()
        end = start + self.block_size
        births = end - len(self.tokens)
        self.tokens += [mask_token_id] * births
        self.masked += [True] * births
        self.blocks.append(Block(start, end, births))

    def _first_start(self) -> int:
        return self.prompt_len - (self.prompt_len - self.origin) % self.block_size

    def is_complete(self) -> bool:
        """No block remains to be appended."""
        return bool(self.blocks) and self.blocks[-1].end >= self.limit


def progress(canvas: Canvas, block: Block) -> float:
    """Share of the block's masks that has been written."""
    return (block.births - len(canvas.masks(block))) / block.births


def reached(value: float, threshold: float) -> bool:
    """At least, at fp32: thresholds travel as fp32, and 0.1 must be reached by 1 of 10."""
    return bool(np.float32(value) >= np.float32(threshold))


def passes(confidence: float, threshold: float) -> bool:
    """Above, strictly, at fp32."""
    return bool(np.float32(confidence) > np.float32(threshold))


def wants_block(canvas: Canvas, settings: Settings) -> bool:
    """Step 1: whether a block of masks is appended now."""
    if canvas.is_complete() or canvas.stop_written:
        return False
    active = [block for block in canvas.blocks if block.state is State.ACTIVE]
    if settings.algorithm == "block_diffusion":
        return not active
    if len(active) >= settings.window:
        return False
    if not canvas.blocks or canvas.blocks[-1].state is State.SETTLED:
        return True
    return reached(progress(canvas, canvas.blocks[-1]), settings.block_add_threshold)


def activate(canvas: Canvas, settings: Settings) -> None:
    """Step 2: blocks must progress from now on if enough of their predecessor is written."""
    for index, block in enumerate(canvas.blocks):
        before = progress(canvas, canvas.blocks[index - 1]) if index else 1.0
        if settings.algorithm == "block_diffusion":
            before = 1.0
        block.full |= reached(before, settings.full_activation_threshold)


def choose(block: Block, candidates: dict[int, Candidate], settings: Settings) -> Sequence[int]:
    """Step 4: positions of one block that are written; `candidates` are those of its masks."""
    above = [
        p for p, c in candidates.items() if passes(c.confidence, settings.confidence_threshold)
    ]
    if settings.algorithm == "d2f":
        return above or (best(candidates, 1) if block.full else [])
    if settings.remasking == "entropy_bounded":
        return within_entropy(candidates, settings.entropy_bound)
    share = step_share(block, settings)
    if settings.remasking == "sequential":
        return sorted(candidates)[:share]
    if settings.remasking == "low_confidence_dynamic" and len(above) >= share:
        return above
    return best(candidates, share)


def best(candidates: dict[int, Candidate], count: int) -> list[int]:
    """Positions of the highest scores; among equals the lowest."""
    return sorted(candidates, key=lambda p: (-candidates[p].score, p))[:count]


def within_entropy(candidates: dict[int, Candidate], bound: float) -> list[int]:
    """Positions of the lowest entropies, as many as together stay below the bound in fp32, and at
    least one. Scores are negative entropies.
    """
    ranked = best(candidates, len(candidates))
    total, below = 0.0, 0
    for position in ranked:
        total -= candidates[position].score
        below += bool(total < np.float32(bound))
    return ranked[: max(below, 1)]


def step_share(block: Block, settings: Settings) -> int:
    """How many tokens of the block the schedule wants in this step."""
    size = block.end - block.start
    steps = settings.denoising_steps or size
    if settings.caps_steps:
        steps = min(steps, settings.max_tokens)
    shares = [size // steps + (t < size % steps) for t in range(steps)]
    return max(shares[min(block.denoise_count, steps - 1)], 1)


def may_settle(canvas: Canvas, index: int) -> bool:
    """Step 5: no mask left, and every predecessor settled."""
    earlier = all(block.state is State.SETTLED for block in canvas.blocks[:index])
    return earlier and not canvas.masks(canvas.blocks[index])


def settle(canvas: Canvas) -> list[Block]:
    """Settle what may be, ascending."""
    settled = []
    for index, block in enumerate(canvas.blocks):
        if block.state is State.ACTIVE and may_settle(canvas, index):
            block.state = State.SETTLED
            settled.append(block)
    return settled


def cut(canvas: Canvas, block: Block, stops: Sequence[int]) -> tuple[list[int], bool]:
    """The block's share of the answer, and whether a stop id ends it there."""
    first, last = max(block.start, canvas.prompt_len), min(block.end, canvas.limit)
    text = canvas.tokens[first:last]
    at = min((text.index(stop) for stop in stops if stop in text), default=math.inf)
    return (text, False) if at == math.inf else (text[: int(at)], True)
