"""A prefill engine whose chunks are the micro-batches of a pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import Architecture, write_tiny_checkpoint
from prefill_worker.rig import Rig

from effuse.worker.messages import PrefillDone, PromptPushed

BLOCK = 4
PROMPTS = {"a": [3 + (7 * i) % 200 for i in range(70)], "b": [9] * 22, "c": [8, 7] * 11}


@pytest.mark.parametrize(("architecture", "budget"), [("sdar", 16), ("dream", 72)])
@pytest.mark.parametrize("count", [2, 3])
def test_it_hands_over_what_one_forward_at_a_time_hands_over(
    tmp_path: Path, architecture: Architecture, budget: int, count: int
) -> None:
    path = write_tiny_checkpoint(tmp_path / "m", architecture, seed=3, block_size=BLOCK)
    seen = []
    for stages in (0, count):
        rig = Rig(path, budget=budget, page_size=16, stages=stages)
        paged = {name: len(ids) // BLOCK * BLOCK if architecture == "sdar" else len(ids)
                 for name, ids in PROMPTS.items()}  # fmt: skip
        attempts = {name: rig.start(name, ids) for name, ids in PROMPTS.items()}
        for name, attempt in attempts.items():
            rig.push_to(attempt, -(-paged[name] // 16))
        rig.settle()
        arrived = {report.manifest.attempt: report for report in rig.arrived()}
        reports = [arrived[attempt] for attempt in attempts.values()]
        pages = [rig.handed(one, n) for one, n in zip(reports, paged.values(), strict=True)]
        seen.append((pages, [one.manifest.boundary for one in reports]))
        assert len(rig.take(PrefillDone)) == len(rig.take(PromptPushed)) == 3
        if stages:
            assert rig.stages is not None
            under_way = rig.stages.under_way()
            assert max(map(len, under_way)) == min(count, len(rig.stages.parts))
            first = [rig.stages.parts[n][0].pages for n in (0, 1)]
            assert (first[0] == first[1]) == (architecture == "sdar"), "two chunks of one prompt"
            assert under_way[1] == [0, 1], "the second began before the first had ended"
        rig.check_idle()
        rig.close()
    (one, before), (other, after) = seen
    assert before == after
    assert all(map(torch.equal, one, other))


def test_an_aborted_prompt_keeps_its_pages_until_its_forwards_have_ended(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "m", "sdar", seed=3, block_size=BLOCK)
    rig = Rig(path, budget=16, stages=3)
    attempt = rig.start("a", PROMPTS["a"])
    rig.step()
    rig.step()
    free = rig.pool.num_free
    assert len(rig.forward.ran) > 1 and rig.engine.is_computing
    rig.abort(attempt)
    assert rig.pool.num_free == free < rig.pool.num_pages
    rig.settle()
    assert rig.pool.num_free == rig.pool.num_pages
    rig.close()
