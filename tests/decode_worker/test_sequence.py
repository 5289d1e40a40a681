"""Token state as data: blocks, masks, final, stored and emitted tokens; snapshots can be
restored.
"""

from __future__ import annotations

import numpy as np
import pytest
from decoding.scripts import MASK_ID, STOP_ID

from effuse.config.decoding import Stopping
from effuse.decode_worker.sequence import RequestError, Sequence
from effuse.worker import messages

PROMPT = tuple(range(10, 16))


def make(origin: int = 0, max_tokens: int = 12) -> Sequence:
    return Sequence(
        PROMPT,
        origin=origin,
        block_size=4,
        mask_token_id=MASK_ID,
        stopping=Stopping(max_tokens=max_tokens, stop_token_ids=frozenset([STOP_ID])),
    )


def resume(
    committed: tuple[int, ...], frontier: tuple[messages.BlockState, ...], origin: int = 0
) -> Sequence:
    return Sequence(
        PROMPT,
        origin=origin,
        block_size=4,
        mask_token_id=MASK_ID,
        stopping=Stopping(max_tokens=12, stop_token_ids=frozenset([STOP_ID])),
    ).resume(committed, frontier)


def test_lengths_before_anything_is_stored() -> None:
    sequence = make()
    assert (sequence.prompt_len, sequence.final_len, sequence.committed_len) == (6, 4, 0)
    assert (sequence.last_block_start, sequence.last_block_end) == (16, 20)
    assert sequence.num_blocks_left == 4 and sequence.num_emitted == 0
    assert (sequence.in_flight_start, sequence.in_flight_end) == (4, 4)


def test_writing_marks_tokens_and_progress() -> None:
    sequence = make()
    block = sequence.append_block()
    sequence.write(block, np.asarray([7]), np.asarray([33]))
    assert sequence.token_ids[4:8].tolist() == [14, 15, MASK_ID, 33]
    assert (block.masks_left, block.progress) == (1, 0.5)
    assert not sequence.stop_seen
    sequence.write(block, np.asarray([6]), np.asarray([STOP_ID]))
    assert sequence.stop_seen


def test_a_mask_is_written_only_once() -> None:
    sequence = make()
    block = sequence.append_block()
    sequence.write(block, np.asarray([7]), np.asarray([33]))
    with pytest.raises(AssertionError):
        sequence.write(block, np.asarray([7]), np.asarray([34]))


def test_storing_takes_settled_blocks_out_of_flight_and_preemption_keeps_the_rest() -> None:
    sequence = make()
    sequence.store(4)
    first = sequence.append_block()
    sequence.write(first, np.asarray([6, 7]), np.asarray([30, 31]))
    sequence.final_len = 8
    second = sequence.append_block()
    assert (sequence.num_settled_tokens, len(sequence.active)) == (4, 1)
    sequence.committed_len = 0
    assert (sequence.committed_len, sequence.in_flight_start) == (0, 4)
    sequence.store(4)
    sequence.store(4)
    assert sequence.blocks == [second] and sequence.in_flight_start == 8
    with pytest.raises(AssertionError):
        sequence.store(4)


@pytest.mark.parametrize("origin", [0, 6])
def test_a_frontier_goes_round(origin: int) -> None:
    sequence = make(origin)
    first, second = sequence.append_block(), sequence.append_block()
    sequence.write(first, np.asarray([first.end - 1]), np.asarray([41]))
    sequence.write(second, np.asarray([second.start + 1]), np.asarray([STOP_ID]))
    first.full, first.denoise_count, second.denoise_count = True, 5, 2
    again = resume((), sequence.frontier(), origin)
    assert again.blocks == sequence.blocks and again.frontier() == sequence.frontier()
    assert (again.token_ids == sequence.token_ids).all()
    assert (again.masked == sequence.masked).all()
    assert again.stop_seen


def test_committed_tokens_are_final() -> None:
    sequence = resume((50, 51, 52, 53, 54, 55), ())
    assert (sequence.final_len, sequence.num_emitted, sequence.num_blocks_left) == (12, 6, 2)
    assert sequence.token_ids[6:12].tolist() == [50, 51, 52, 53, 54, 55]


@pytest.mark.parametrize(
    ("committed", "frontier", "said"),
    [
        pytest.param((50,), (), "do not end at the end of a block", id="off-grid"),
        pytest.param((50,) * 14, (), "before position 16", id="beyond-the-end"),
        pytest.param((50, STOP_ID), (), "stop id", id="ended"),
        pytest.param(
            (), (messages.BlockState((14, 15, 3, 3), b"\x0f", True, 0),), "the prompt", id="prompt"
        ),
        pytest.param(
            (), (messages.BlockState((14, 15, 3, 3), b"\x0c", True, -1),), "got -1", id="count"
        ),
        pytest.param(
            (), (messages.BlockState((14, 15, 3, 3), b"", True, 1),), "1 bytes", id="masks"
        ),
    ],
)
def test_a_resume_that_does_not_fit_is_refused(
    committed: tuple[int, ...], frontier: tuple[messages.BlockState, ...], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        resume(committed, frontier)
