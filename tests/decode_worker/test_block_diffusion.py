"""Shares and orders of block diffusion as tables."""

from __future__ import annotations

import numpy as np
import pytest
from decoding.scripts import make_settings

from effuse.config.decoding import Remasking
from effuse.decode_worker.denoise import BlockDiffusion, step_share
from effuse.decode_worker.sequence import Block, HostCandidates


@pytest.mark.parametrize(
    ("size", "steps", "shares"),
    [
        (8, 4, [2, 2, 2, 2, 2]),
        (8, 3, [3, 3, 2, 2]),
        (5, 4, [2, 1, 1, 1, 1]),
        (2, 4, [1, 1, 1, 1, 1]),  # at least one, also where the even share is none
        (4, 1, [4, 4]),
    ],
)
def test_a_block_is_split_as_evenly_as_possible(size: int, steps: int, shares: list[int]) -> None:
    """Also with fewer masks than that, after a prompt that ends in the block."""
    for masks in (size, 1):
        found = [
            step_share(Block(0, size, masks, masks, denoise_count=step), steps)
            for step in range(len(shares))
        ]
        assert found == shares


@pytest.mark.parametrize(
    ("bound", "chosen"),
    [(0.0, [2]), (0.25, [2]), (0.3125, [2]), (0.35, [0, 2]), (9.0, [0, 1, 2, 3])],
)
def test_entropies_add_up_to_less_than_their_bound(bound: float, chosen: list[int]) -> None:
    """Those of the surest are 0.125, 0.3125, 0.8125 and 1.3125 together, and fp32 holds each."""
    settings = make_settings("block_diffusion", remasking="entropy_bounded", entropy=bound)
    assert settings.ranked_by == "neg_entropy"
    scores = -np.asarray([0.1875, 0.5, 0.125, 0.5], dtype=np.float32)
    own = HostCandidates(np.arange(4), np.ones(4, np.float32), scores)
    block = Block(0, 4, masks_at_birth=4, masks_left=4, full=True)
    assert BlockDiffusion.choose(block, settings, own).tolist() == chosen


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
    assert BlockDiffusion.choose(block, settings, own).tolist() == chosen


def test_a_last_step_takes_no_more_than_is_left() -> None:
    settings = make_settings("block_diffusion", remasking="sequential", steps=1)
    own = HostCandidates(np.arange(1), np.ones(1, np.float32), np.ones(1, np.float32))
    block = Block(0, 4, masks_at_birth=4, masks_left=1, full=True)
    assert BlockDiffusion.choose(block, settings, own).tolist() == [0]
