"""The rows beside the fleet answer like a fleet, with an engine's threads, one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import Architecture, write_tiny_checkpoint

from effuse.cli.baseline import Rivals, base_model, check, single_process
from effuse.cli.figures import Run, ServiceGoals
from effuse.cli.load import Tally
from effuse.client.params import Params
from effuse.offline.llm import LLM
from effuse.router.tokenizer import bundled_directory

PROMPTS = ["Tom has 3 pens.", "a " * 20, "b " * 4000]
PARAMS = Params(
    model="served under another name", max_tokens=6, window=2,
    algorithm="d2f", temperature=0.0, top_p=1.0, top_k=0,
)  # fmt: skip


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch's initial number on a machine of two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def measured(
    way: Callable[[Rivals, Tally], None], rivals: Rivals, on_done: Callable[[], None] = lambda: None
) -> Run:
    tally = Tally(on_done)
    way(rivals, tally)
    return tally.run("row", ServiceGoals())


def bundled(concurrency: int = 2) -> Rivals:
    return check(bundled_directory(), None, PROMPTS, PARAMS, concurrency)


@pytest.mark.parametrize("way", [base_model, single_process])
def test_a_row_answers_what_a_fleet_would(way: Callable[[Rivals, Tally], None]) -> None:
    """The prompt that is too long counts as failed, because a router refuses it."""
    run = measured(way, bundled())
    assert (len(run.samples), run.failed) == (2, 1)
    assert sorted(one.prompt for one in run.samples) == [0, 1]
    assert all(0 < one.first_block_s <= one.total_s <= run.total_s for one in run.samples)
    assert all(one.forward_passes > 0 for one in run.samples)


def test_a_prompt_without_room_for_all_of_max_tokens_is_refused_as_by_a_router() -> None:
    words = "word " * 100
    taken = check(bundled_directory(), None, [words], Params(max_tokens=8), 1).taken()
    assert taken == [0]
    assert check(bundled_directory(), None, [words], Params(max_tokens=512), 1).taken() == []


@pytest.mark.parametrize("way", [base_model, single_process])
def test_a_row_computes_with_the_threads_of_an_engine(
    way: Callable[[Rivals, Tally], None], two_threads: None
) -> None:
    """Torch has its own number again in the end."""
    seen: list[int] = []
    rivals = check(bundled_directory(), None, PROMPTS[:2], PARAMS, 2)
    measured(way, rivals, lambda: seen.append(torch.get_num_threads()))
    assert set(seen) == {rivals.num_threads} == {1}
    assert torch.get_num_threads() == 2
    assert "1 thread each" in rivals.described()


def test_a_row_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    measured(single_process, bundled())
    assert threading.active_count() == before


@pytest.mark.parametrize("architecture", ["llada", "dream", "sdar"])
def test_the_base_model_is_answered_by_its_familys_own_loop(
    architecture: Architecture, tmp_path: Path
) -> None:
    """Even if its file names D2F as its algorithm."""
    directory = write_tiny_checkpoint(tmp_path / "tiny", architecture, block_size=4)
    algorithm = {"sdar": "block_diffusion"}.get(architecture, architecture)
    rivals = check(directory, None, ["abc"], Params(max_tokens=8), 1)
    assert rivals.config.family.algorithm == algorithm
    assert f"base model: {algorithm}, after" in rivals.described()
    run = measured(base_model, rivals)
    with LLM(
        directory, device="cpu", dtype="float32", default_algorithm=rivals.config.family.algorithm
    ) as llm:
        (answer,) = llm.generate("abc", Params(max_tokens=8, temperature=0.0))
    assert [one.text for one in run.samples] == [answer.text]
    assert run.samples[0].forward_passes == answer.stats.forward_passes
    if architecture == "llada":
        assert answer.stats.forward_passes == 8  # one token a forward


def test_what_is_complete_is_kept_when_a_row_is_broken_off() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    tally = Tally(stop)
    with pytest.raises(KeyboardInterrupt):
        base_model(check(bundled_directory(), None, PROMPTS[:2], PARAMS, 1), tally)
    assert len(tally.run("row", ServiceGoals()).samples) == 1
