"""The rivals answer what a fleet would, and what it would refuse counts as failed."""

from __future__ import annotations

from unittest.mock import Mock

from effuse.cli.baseline import Baseline
from effuse.client.params import Params
from effuse.router.tokenizer import bundled_directory

PROMPTS = [(5, 6, 7), (8,) * 20, (9,) * 100_000]


def test_both_answer_the_same_requests() -> None:
    params = Params(model="served under another name", max_tokens=6, window=2)
    rivals = Baseline(bundled_directory(), None, PROMPTS[:2], params, concurrency=2)
    assert rivals.size() == (2, 12)
    for run in (rivals.single_process, rivals.vanilla):
        ticks = Mock()
        told = run(ticks)
        assert (len(told.samples), told.failed) == (2, 0)
        assert all(0 <= one.first_block_s <= one.total_s <= told.total_s for one in told.samples)
        assert ticks.call_count == (2 if "D2F" in told.name else 12)
        if "vanilla" in told.name:
            assert [one.forward_passes for one in told.samples] == [6, 6]


def test_a_prompt_beyond_the_context_fails_as_in_a_fleet() -> None:
    rivals = Baseline(bundled_directory(), None, PROMPTS, Params(max_tokens=2), concurrency=1)
    assert rivals.size() == (2, 4)
    assert rivals.single_process(lambda: None).failed == 1
