"""Prompts whose KV comes back from host memory instead of being computed."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from checkpoints import write_tiny_checkpoint
from kvtransfer.fake_pool import FakePool, SharedUnits
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


def test_a_prompt_is_computed_once_for_all_prefill_workers(tmp_path: Path) -> None:
    """The second worker starts after the first one has ended, and has the pool alone."""
    path = write_tiny_checkpoint(tmp_path, "sdar", seed=3, block_size=BLOCK)
    shared = SharedUnits()
    prompt = random.Random(1).choices(range(3, 203), k=40)
    handed, ran = [], []
    for name in "ab":
        rig = Rig(path, num_pages=16, num_slots=40, stores=lambda _: [FakePool(shared)])
        handed.append(hand_over(rig, name, prompt))
        while rig.engine.load().offload_pool_kept < (name == "a") * 10 * rig.layout.page_bytes:
            rig.step()
        ran.append([(part.start, len(part.token_ids)) for one in rig.forward.ran for part in one])
        rig.check_idle()
        rig.close()
    assert float((handed[0] - handed[1]).abs().max()) <= 1e-5
    assert ran == [[(0, 40)], []]
    load = rig.engine.load()
    assert load.offload_pool_read == 10 * rig.layout.page_bytes
    assert load.offload_pool_failures == 0
