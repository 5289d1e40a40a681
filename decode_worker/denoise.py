"""One denoise step of one sequence, as two pure functions around a forward.

`open_step` appends and activates, and returns the rows of the forward. `apply_step` writes the
algorithm's choices, settles blocks in order, and returns the tokens that became final. No torch, no
I/O. The rules are those of arXiv 2508.09192 (D2F), of SDAR (block diffusion) and of arXiv
2509.26328 (Fast-dLLM v2). Algorithms that denoise prompt and answer as one canvas have their own
steps (`canvas.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from effuse.config.decoding import Algorithm, DecodeSettings
from effuse.decode_worker import block_diffusion, d2f, fast_dllm_v2
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


RULES: Final[Mapping[Algorithm, Rules]] = {
    "d2f": d2f,
    "block_diffusion": block_diffusion,
    "fast_dllm_v2": fast_dllm_v2,
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
        is_greedy=rules is fast_dllm_v2 and fast_dllm_v2.is_greedy(sequence, active[0]),
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
            is_edited = block_diffusion.edit(sequence, block, settings, positions, own)
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
