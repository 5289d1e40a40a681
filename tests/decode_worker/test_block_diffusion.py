"""Shares and orders of block diffusion as tables."""

from __future__ import annotations

import numpy as np
import pytest
from decoding.scripts import make_settings

from effuse.config.decoding import Remasking
from effuse.decode_worker import block_diffusion
from effuse.decode_worker.sequence import Block, HostCandidates


@pytest.mark.parametrize(
    ("masks", "steps", "shares"),
    [
        (8, 4, [2, 2, 2, 2, 2]),
        (8, 3, [3, 3, 2, 2]),
        (5, 4, [2, 1, 1, 1, 1]),
        (2, 4, [1, 1, 1, 1, 1]),  # at least one, also where the even share is none
        (4, 1, [4, 4]),
    ],
)
def test_a_block_is_split_as_evenly_as_possible(masks: int, steps: int, shares: list[int]) -> None:
    found = [
        block_diffusion.step_share(Block(0, 8, masks, masks, denoise_count=step), steps)
        for step in range(len(shares))
    ]
    assert found == shares


@pytest.mark.parametrize(
    ("remasking", "confidences", "chosen"),
    [
        ("sequential", [0.1, 0.2, 0.95, 0.99], [0, 1]),
        ("low_confidence_static", [0.1, 0.97, 0.95, 0.99], [1, 3]),
        ("low_confidence_dynamic", [0.1, 0.97, 0.95, 0.99], [1, 2, 3]),
        ("low_confidence_dynamic", [0.1, 0.2, 0.3, 0.99], [2, 3]),
    ],
)
def test_which_masks_a_step_writes(
    remasking: Remasking, confidences: list[float], chosen: list[int]
) -> None:
    settings = make_settings("block_diffusion", remasking=remasking, steps=2)
    values = np.asarray(confidences, dtype=np.float32)
    own = HostCandidates(np.arange(4), values, values)
    block = Block(0, 4, masks_at_birth=4, masks_left=4, full=True)
    assert block_diffusion.choose(block, settings, own).tolist() == chosen


def test_a_last_step_takes_no_more_than_is_left() -> None:
    settings = make_settings("block_diffusion", remasking="sequential", steps=1)
    own = HostCandidates(np.arange(1), np.ones(1, np.float32), np.ones(1, np.float32))
    block = Block(0, 4, masks_at_birth=4, masks_left=1, full=True)
    assert block_diffusion.choose(block, settings, own).tolist() == [0]
