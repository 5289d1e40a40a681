"""Keeps a host's sequence beside the device's: takes over from a record what a step has written.

The choice was made on the device; the rest of the step is the pure machine's own, so that commits,
drafts and resuming know no difference.
"""

from effuse.decode_worker.denoise import StepOutcome, StepPlan, settle_step
from effuse.decode_worker.device_slots import Record
from effuse.decode_worker.sequence import Block, Sequence


def apply_record(sequence: Sequence, plan: StepPlan, record: Record) -> StepOutcome:
    """`denoise.apply_step` with the device's choice: `record` is of the step that `plan` opened."""
    assert sequence.step_open
    sequence.step_open = False
    sequence.store(plan.num_stored)
    assert record.start == sequence.in_flight_start, "the device stored what the plan stores"
    written: list[Block] = []
    num_semi_writes = 0
    for block in sequence.blocks:
        if not block.masks_left:
            continue
        block.denoise_count += 1
        num_written = _take_over(sequence, block, record)
        if num_written:
            written.append(block)
            num_semi_writes += 0 if block.full else num_written
    return settle_step(sequence, written, num_semi_writes)


def _take_over(sequence: Sequence, block: Block, record: Record) -> int:
    """Writes the block's tokens that the record shows and the sequence masks; how many."""
    span = slice(block.start, block.end)
    shown = record.tokens[block.start - record.start : block.end - record.start]
    positions = ((shown >= 0) & sequence.masked[span]).nonzero()[0]
    if len(positions):
        sequence.write(block, positions + block.start, shown[positions].astype("int64"))
    return len(positions)
