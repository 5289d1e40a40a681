"""One denoise step of one sequence, as two pure functions around a forward.

`open_step` appends and activates, and returns the rows of the forward. `apply_step` writes the
algorithm's choices, settles blocks in order, and returns the tokens that became final. No torch, no
I/O. The rules are those of SDAR (block diffusion) and of arXiv 2509.26328 (Fast-dLLM v2), which
follow the steps here, and of arXiv 2508.09192 (`d2f.py`). Algorithms that denoise prompt and answer
as one canvas have their own steps (`canvas.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from effuse.config.decoding import Algorithm, DecodeSettings
from effuse.decode_worker import d2f
from effuse.decode_worker.sequence import Block, HostCandidates, IndexArray, IntArray, Sequence


class Rules(Protocol):
    """The decisions of an algorithm."""

    def wants_block(self, sequence: Sequence, settings: DecodeSettings) -> bool: ...
    def activate(self, sequence: Sequence, settings: DecodeSettings) -> None: ...
    def proposals(self, sequence: Sequence, block: Block, settings: DecodeSettings) -> IntArray: ...
    def choose(
        self, block: Block, settings: DecodeSettings, candidates: HostCandidates
    ) -> IndexArray: ...


class AnswerEnd(Enum):
    """Why an answer ended."""

    STOP = auto()  # a stop id
    LENGTH = auto()  # max_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows [start, end) of the coming forward; the KV of the first `num_stored` is stored."""

    start: int
    end: int
    num_stored: int
    candidates: IntArray  # absolute positions that need a token, ascending
    denoise_counts: npt.NDArray[np.int64]  # parallel to candidates
    num_behind: int = 0  # cached tokens after the rows
    unstored: range = range(0)  # positions that are not stored
    is_greedy: bool = False  # its candidates are the likeliest tokens, at any temperature


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The changes that a forward made."""

    # newly final tokens of the answer, without the stop id and all after it
    tokens: tuple[int, ...]
    token_offset: int  # of the first of them, in the answer
    finish: AnswerEnd | None
    end_token_id: int | None  # the stop id after the tokens, if it ends the answer
    written: tuple[Block, ...]  # blocks that lost masks or were edited, including settled ones
    num_settled: int  # blocks that settled


class BlockDiffusion:
    """Block diffusion as in SDAR: one block in flight, filled in a number of steps."""

    @staticmethod
    def wants_block(sequence: Sequence, settings: DecodeSettings) -> bool:
        """True if no block has masks: the next one is denoised together with the last one's
        commit."""
        return not sequence.active

    @staticmethod
    def activate(sequence: Sequence, settings: DecodeSettings) -> None:
        """Every block must advance."""
        for block in sequence.blocks:
            block.full = True

    @staticmethod
    def proposals(sequence: Sequence, block: Block, settings: DecodeSettings) -> IntArray:
        """All masks of the block; if tokens may be edited, all its tokens except the prompt's."""
        if not settings.edits_tokens:
            return sequence.masks(block)
        return np.arange(max(block.start, sequence.prompt_len), block.end)

    @staticmethod
    def choose(block: Block, settings: DecodeSettings, candidates: HostCandidates) -> IndexArray:
        """Indices of the block's candidates that this step writes, by the remasking rule.

        SDAR's own code writes the whole share even if fewer masks are left, over existing tokens;
        here no written token changes.
        """
        if settings.remasking == "entropy_bounded":
            return _within_entropy(settings.entropy_bound, candidates)
        share = min(step_share(block, settings.denoising_steps), len(candidates))
        if settings.remasking == "sequential":
            return np.arange(share, dtype=np.intp)
        if settings.remasking == "low_confidence_dynamic":
            above = candidates.above(settings.confidence_threshold)
            if len(above) >= share:
                return above
        return candidates.best(share)


class FastDllmV2(BlockDiffusion):
    """Fast-dLLM v2: a block part by part, with its first token separately.

    The model shifts its logits by one, so the forward that stores a block gives the next one's
    first token. It is written separately: the likeliest token, at any confidence and temperature.
    From then on each step fills the first part of `block_length` tokens that has masks.
    """

    @staticmethod
    def proposals(sequence: Sequence, block: Block, settings: DecodeSettings) -> IntArray:
        """The block's first position if it is a mask, or the masks of its first unfinished part."""
        masks = sequence.masks(block)
        first = masks[:1]
        if not len(first) or first[0] == block.start:
            return first
        part = (first[0] - block.start) // settings.block_length
        wanted: IntArray = masks[masks < block.start + (part + 1) * settings.block_length]
        return wanted

    choose = staticmethod(d2f.choose)  # its blocks are always full

    @staticmethod
    def is_greedy(sequence: Sequence, block: Block) -> bool:
        """Whether the coming step writes the block's first token, which is not drawn at random."""
        return bool(sequence.masked[block.start])


RULES: Final[Mapping[Algorithm, Rules]] = {
    "d2f": d2f,
    "block_diffusion": BlockDiffusion,
    "fast_dllm_v2": FastDllmV2,
}
"""Of the algorithms that denoise block by block; `canvas.py` has those of the others."""


def open_step(sequence: Sequence, settings: DecodeSettings) -> StepPlan:
    """Appends at most one block, activates, and plans the forward over all blocks in flight.

    A step that could not run (no budget, no pages) may be opened again: nothing is appended twice.
    """
    rules = RULES[settings.algorithm]
    if not sequence.step_open:
        if may_append(sequence) and rules.wants_block(sequence, settings):
            block = sequence.append_block()
            block.edits_left = settings.max_post_steps if settings.edits_tokens else 0
        rules.activate(sequence, settings)
        sequence.step_open = True
    active = sequence.active
    assert active, "an unfinished sequence has a block to denoise"
    proposals = [rules.proposals(sequence, block, settings) for block in active]
    return StepPlan(
        start=sequence.in_flight_start,
        end=sequence.in_flight_end,
        num_stored=sequence.num_settled_tokens,
        candidates=np.concatenate(proposals),
        denoise_counts=np.repeat(
            [block.denoise_count for block in active], [len(wanted) for wanted in proposals]
        ),
        is_greedy=rules is FastDllmV2 and FastDllmV2.is_greedy(sequence, active[0]),
    )


def may_append(sequence: Sequence) -> bool:
    """True while blocks remain and no stop id was written."""
    return sequence.may_grow and not sequence.stop_seen


def apply_step(
    sequence: Sequence, settings: DecodeSettings, plan: StepPlan, candidates: HostCandidates
) -> StepOutcome:
    """Commits the stored tokens, writes candidates, and settles blocks in ascending order."""
    assert sequence.step_open and len(candidates) == len(plan.candidates)
    sequence.step_open = False
    sequence.store(plan.num_stored)
    return settle_step(sequence, _write(sequence, settings, plan, candidates))


def settle_step(sequence: Sequence, written: list[Block]) -> StepOutcome:
    """The second half of `apply_step`, after masks were written: settles, and ends."""
    offset = sequence.num_emitted
    num_settled = _settle(sequence)
    tokens, end_token_id = _emit(sequence, offset)
    finish = None
    if end_token_id is not None:
        finish = AnswerEnd.STOP
    elif sequence.final_len >= sequence.answer_end:
        finish = AnswerEnd.LENGTH
    return StepOutcome(
        tokens=tokens,
        token_offset=offset,
        finish=finish,
        end_token_id=end_token_id,
        written=tuple(written),
        num_settled=num_settled,
    )


def _write(
    sequence: Sequence, settings: DecodeSettings, plan: StepPlan, candidates: HostCandidates
) -> list[Block]:
    """Writes and edits tokens; returns the blocks in which it did."""
    rules = RULES[settings.algorithm]
    written: list[Block] = []
    for block in sequence.blocks:
        if not block.is_pending:
            continue
        first, end = np.searchsorted(plan.candidates, (block.start, block.end)).tolist()
        own, positions = candidates.pick(slice(first, end)), plan.candidates[first:end]
        is_edited = False
        if settings.edits_tokens:
            masks = np.flatnonzero(sequence.masked[positions])
            is_edited = edit(sequence, block, settings, positions, own)
            own, positions = own.pick(masks), positions[masks]
        chosen = rules.choose(block, settings, own) if len(own) else np.empty(0, dtype=np.intp)
        block.denoise_count += 1
        if len(chosen):
            sequence.write(block, positions[chosen], own.tokens[chosen])
        if len(chosen) or is_edited:
            written.append(block)
    return written


def _settle(sequence: Sequence) -> int:
    """Settles finished blocks in order, up to the first unfinished one."""
    num_settled = 0
    for block in sequence.active:
        if block.is_pending:
            break
        sequence.final_len = block.end
        num_settled += 1
    return num_settled


def _emit(sequence: Sequence, offset: int) -> tuple[tuple[int, ...], int | None]:
    """The answer's final tokens from `offset` on, cut before the first stop id, and that id."""
    start = sequence.prompt_len + offset
    end = sequence.prompt_len + sequence.num_emitted
    tokens = tuple(sequence.token_ids[start:end].tolist())
    stop_ids = sequence.stopping.stop_token_ids
    for index, token in enumerate(tokens if sequence.stop_seen else ()):
        if token in stop_ids:
            return tokens[:index], token
    return tokens, None


def edit(
    sequence: Sequence,
    block: Block,
    settings: DecodeSettings,
    positions: IntArray,
    candidates: HostCandidates,
) -> bool:
    """Replaces written tokens for which the model is sure of another one (LLaDA2.1); returns
    whether it did.

    A block without masks is done after the first step that changes nothing, or after
    `max_post_steps`.
    """
    is_other = candidates.tokens != sequence.token_ids[positions]
    is_sure = candidates.confidences > settings.editing_threshold
    edited = np.flatnonzero(~sequence.masked[positions] & is_other & is_sure)
    if not block.masks_left:
        block.edits_left = block.edits_left - 1 if len(edited) else 0
    if len(edited):
        sequence.edit(positions[edited], candidates.tokens[edited])
    return len(edited) > 0


def step_share(block: Block, denoising_steps: int) -> int:
    """Masks that the block's coming step fills: an even split, with the remainder first.

    Of the block's length, even if a prompt's tail left it fewer masks, as in SDAR's code.
    """
    step = min(block.denoise_count, denoising_steps - 1)
    even, remainder = divmod(block.end - block.start, denoising_steps)
    return max(1, even + (step < remainder))


def _within_entropy(bound: float, candidates: HostCandidates) -> IndexArray:
    """The surest masks whose entropies add up to less than `bound` nats, and at least one; scores
    are negative entropies. Computed in fp64, so that a device gets the same result."""
    surest = np.argsort(-candidates.scores, kind="stable")
    entropies = -candidates.scores[surest].astype(np.float64)
    count = max(1, int((entropies.cumsum() < bound).sum()))
    return np.sort(surest[:count])
