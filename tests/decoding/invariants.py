"""Invariants around every forward of one sequence, whatever the model proposes.

(a) cached length, (b) settled blocks lead, (c) progress, (d) settled blocks are stored together,
(e) nothing is stored beside a mask of its own block; and: written tokens stay, emission appends.
"""

from __future__ import annotations

from decoding.replay import Trace
from decoding.scripts import MASK_ID, STOP_ID, Case
from effuse.config.decoding import Stopping
from effuse.decode_worker import denoise
from effuse.decode_worker.denoise import AnswerEnd, StepOutcome, StepPlan
from effuse.decode_worker.sequence import Sequence


class Broken(AssertionError):
    """An invariant does not hold."""


def hold(condition: bool, message: str) -> None:
    if not condition:
        raise Broken(message)


class Watch:
    """Follows one sequence through its forwards and raises Broken if an invariant fails."""

    def __init__(self, sequence: Sequence, case: Case) -> None:
        self.sequence = sequence
        self.case = case
        cached = sequence.committed_len - sequence.first_block_start
        self.num_committed = cached // case.block_size
        self.num_blocks_before = len(sequence.blocks)
        self.emitted = sequence.num_emitted
        self.final: dict[int, int] = dict(enumerate(case.prompt))

    def before_forward(self, plan: StepPlan) -> None:
        sequence, blocks = self.sequence, self.sequence.blocks
        active = sequence.active
        settled = [block for block in blocks if block.end <= sequence.final_len]
        cached = sequence.first_block_start + self.num_committed * self.case.block_size
        hold(sequence.committed_len == plan.start == cached, "(a) cached length")
        hold(blocks[: len(settled)] == settled, "(b) settled blocks lead")
        hold(active[0].full, "(c) the first active block is full")
        hold(plan.num_stored == len(settled) * self.case.block_size, "(d) stored together")
        stored = slice(plan.start, plan.start + plan.num_stored)
        hold(not sequence.masked[stored].any(), "(e) a mask beside a stored token")
        hold(not sequence.masked[: sequence.prompt_len].any(), "the prompt is not masked")
        for block in blocks:
            left = int(sequence.masked[block.start : block.end].sum())
            hold(left == block.masks_left, "the count of masks is the bitmap's")
        d2f = self.case.settings.algorithm == "d2f"
        hold(len(active) <= (self.case.settings.window if d2f else 1), "window")
        hold(len(blocks) <= self.num_blocks_before + 1, "at most one block is appended")
        self.num_committed += len(settled)

    def after_apply(self, plan: StepPlan, outcome: StepOutcome) -> None:
        sequence = self.sequence
        self.num_blocks_before = len(sequence.blocks)
        hold(bool(outcome.written), "(c) every step writes")
        hold(outcome.token_offset == self.emitted, "emission appends")
        self.emitted += len(outcome.tokens)
        for position, token in self.final.items():
            hold(int(sequence.token_ids[position]) == token, "a written token changed")
        for position in range(plan.start, plan.end):
            if not sequence.masked[position]:
                self.final[position] = int(sequence.token_ids[position])
        hold(STOP_ID not in outcome.tokens, "a stop id was emitted")
        hold(self.emitted <= self.case.max_tokens, "max_tokens")
        for block in sequence.blocks:
            if block.end <= sequence.final_len:
                hold(not block.masks_left, "a settled block holds a mask")


def make_sequence(case: Case) -> Sequence:
    """The sequence of a case, its prompt's KV stored."""
    sequence = Sequence(
        case.prompt,
        origin=case.origin,
        block_size=case.block_size,
        mask_token_id=MASK_ID,
        stopping=Stopping(max_tokens=case.max_tokens, stop_token_ids=frozenset([STOP_ID])),
    )
    sequence.store(sequence.first_block_start)
    return sequence


def decode(case: Case, sequence: Sequence | None = None) -> Trace:
    """Runs the machine on a script under the invariants and returns its actions."""
    sequence = sequence or make_sequence(case)
    watch = Watch(sequence, case)
    trace = Trace()
    limit = sequence.num_blocks_left * (case.block_size + 1)
    for _ in range(limit):
        plan = denoise.open_step(sequence, case.settings)
        watch.before_forward(plan)
        candidates = case.script.candidates(plan.candidates.tolist(), plan.denoise_counts.tolist())
        outcome = denoise.apply_step(sequence, case.settings, plan, candidates)
        trace.forwards.append((plan.start, plan.end, plan.num_stored))
        if outcome.num_settled:
            trace.commits.append((outcome.token_offset, outcome.tokens))
        watch.after_apply(plan, outcome)
        if outcome.finish is not None:
            trace.stopped = outcome.finish is AnswerEnd.STOP
            return trace
    raise Broken(f"(c) not finished after {limit} forwards")
