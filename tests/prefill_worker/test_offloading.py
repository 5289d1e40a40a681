"""Prompts whose KV comes back from host memory instead of being computed."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from checkpoints import write_tiny_checkpoint
from prefill_worker.rig import Rig

BLOCK = 4


def hand_over(rig: Rig, name: str, prompt: list[int]) -> torch.Tensor:
    """KV of a prompt of whole blocks as it arrives; nothing of it stays in use."""
    rig.push_to(rig.start(name, prompt), -(-len(prompt) // rig.layout.page_size))
    rig.settle()
    (arrived,) = rig.arrived()
    kv = rig.handed(arrived, len(prompt)).clone()
    rig.target_pool.release(rig.pages_of(arrived))
    rig.said.clear()
    return kv


def test_prompts_that_have_left_the_pool_are_not_computed_again(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", seed=3, block_size=BLOCK)
    rig = Rig(path, num_pages=16, num_slots=40)
    prompts = [random.Random(seed).choices(range(3, 203), k=40) for seed in range(3)]
    first = [hand_over(rig, f"a{name}", prompt) for name, prompt in enumerate(prompts)]
    again = [hand_over(rig, f"b{name}", prompt) for name, prompt in enumerate(prompts)]
    for one, other in zip(first, again, strict=True):
        assert float((one - other).abs().max()) <= 1e-5
    parts = [(part.start, len(part.token_ids)) for ran in rig.forward.ran for part in ran]
    assert parts == [(0, 40)] * 3
    load = rig.engine.load()
    assert load.offload_loaded >= 14 * rig.layout.page_bytes  # three times nine, less 16 kept ones
    rig.check_idle()
    rig.close()
