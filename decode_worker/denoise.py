"""One denoise step of one sequence, as two pure functions around a forward.

`open_step` appends and activates and says which rows the forward takes; `apply_step` writes what
the algorithm chooses, settles blocks in order and says which tokens became final. No torch, no I/O.
The rules are those of arXiv 2508.09192 (D2F) and of SDAR (block diffusion). Algorithms that denoise
prompt and answer as one canvas have steps of their own (`canvas.py`).
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import numpy as np
import numpy.typing as npt

from effuse.config.decoding import DecodeSettings
from effuse.decode_worker import block_diffusion, d2f
from effuse.decode_worker.sequence import (
    Block,
    BlockPhase,
    HostCandidates,
    IndexArray,
    IntArray,
    Sequence,
)


class Rules(Protocol):
    """What an algorithm decides."""

    def wants_block(self, sequence: Sequence, settings: DecodeSettings) -> bool: ...
    def activate(self, sequence: Sequence, settings: DecodeSettings) -> None: ...
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
    candidates: IntArray  # absolute positions of all masks, ascending
    denoise_counts: npt.NDArray[np.int64]  # parallel to candidates
    num_behind: int = 0  # cached tokens behind the rows
    unstored: range = range(0)  # positions that are left out of the stored ones


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a forward changed."""

    tokens: tuple[int, ...]  # final now, for the answer; the stop id and all after it left out
    token_offset: int  # of the first of them, in the answer
    finish: AnswerEnd | None
    end_token_id: int | None  # the stop id behind the tokens, where it ends the answer
    written: tuple[Block, ...]  # blocks that lost masks, settled ones included
    num_settled: int  # blocks that settled
    num_semi_writes: int  # tokens written in blocks that were not full
    stop_is_waiting: bool  # a stop id is written while an earlier block holds masks


def rules_of(settings: DecodeSettings) -> Rules:
    """The rules of the settings' algorithm."""
    match settings.algorithm:
        case "d2f":
            return d2f
        case "block_diffusion":
            return block_diffusion
        case "llada" | "dream" | "fast_dllm":
            raise ValueError(f"{settings.algorithm} denoises a canvas: `canvas.py`")


def open_step(sequence: Sequence, settings: DecodeSettings) -> StepPlan:
    """Appends at most one block, activates, and plans the forward over all blocks in flight.

    A step that could not run (no budget, no pages) may be opened again: nothing is appended twice.
    """
    if not sequence.step_open:
        rules = rules_of(settings)
        if may_append(sequence) and rules.wants_block(sequence, settings):
            sequence.append_block()
        rules.activate(sequence, settings)
        sequence.step_open = True
    active = [block for block in sequence.blocks if block.state is BlockPhase.ACTIVE]
    assert active, "a sequence that is not finished has a block to denoise"
    start, end = sequence.in_flight_start, sequence.in_flight_end
    return StepPlan(
        start=start,
        end=end,
        num_stored=sequence.num_settled_tokens,
        candidates=np.flatnonzero(sequence.masked[start:end]) + start,
        denoise_counts=np.repeat(
            [block.denoise_count for block in active], [block.masks_left for block in active]
        ),
    )


def may_append(sequence: Sequence) -> bool:
    """True while blocks remain and no stop id was written."""
    return sequence.may_grow and not sequence.stop_seen


def apply_step(
    sequence: Sequence, settings: DecodeSettings, plan: StepPlan, candidates: HostCandidates
) -> StepOutcome:
    """Commits what the forward stored, writes candidates, settles blocks in ascending order."""
    assert sequence.step_open and len(candidates) == len(plan.candidates)
    sequence.step_open = False
    sequence.store(plan.num_stored)
    written, num_semi_writes = _write(sequence, settings, plan, candidates)
    return settle_step(sequence, written, num_semi_writes)


def settle_step(sequence: Sequence, written: list[Block], num_semi_writes: int) -> StepOutcome:
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
        num_semi_writes=num_semi_writes,
        stop_is_waiting=sequence.stop_seen and finish is None,
    )


def _write(
    sequence: Sequence, settings: DecodeSettings, plan: StepPlan, candidates: HostCandidates
) -> tuple[list[Block], int]:
    rules = rules_of(settings)
    written: list[Block] = []
    num_semi_writes = 0
    first = 0
    for block in sequence.blocks:
        if not block.masks_left:
            continue
        end = first + block.masks_left
        own = candidates.part(first, end)
        chosen = rules.choose(block, settings, own)
        block.denoise_count += 1
        if len(chosen):
            sequence.write(block, plan.candidates[first:end][chosen], own.tokens[chosen])
            written.append(block)
            num_semi_writes += 0 if block.full else len(chosen)
        first = end
    return written, num_semi_writes


def _settle(sequence: Sequence) -> int:
    """Settles blocks without masks, in order, up to the first that still has one."""
    num_settled = 0
    for block in sequence.blocks:
        if block.masks_left:
            break
        if block.state is BlockPhase.ACTIVE:
            block.state = BlockPhase.SETTLED
            sequence.final_len = block.end
            num_settled += 1
    return num_settled


def _emit(sequence: Sequence, offset: int) -> tuple[tuple[int, ...], int | None]:
    """The answer's tokens from `offset` on that are final, cut before the first stop id, and that
    id."""
    start = sequence.prompt_len + offset
    end = sequence.prompt_len + sequence.num_emitted
    tokens = tuple(sequence.token_ids[start:end].tolist())
    stop_ids = sequence.stopping.stop_token_ids
    for index, token in enumerate(tokens if sequence.stop_seen else ()):
        if token in stop_ids:
            return tokens[:index], token
    return tokens, None
