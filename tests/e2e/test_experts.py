"""LLaDA2.0 served by a split fleet: the answers of the authors' own code, prompts handed over."""

from __future__ import annotations

from pathlib import Path

from e2e.client import all_at_once, connect
from e2e.tiny import fleet_of
from e2e.workload import Job
from llada2_answers import Answered, answered, write_answered_checkpoint


def test_a_split_fleet_gives_the_answers_of_the_authors_code(tmp_path: Path) -> None:
    model = write_answered_checkpoint(tmp_path / "llada2")
    runs = [run for run in answered() if run.block == 32]
    assert len(runs) > 16
    with fleet_of(model, connector="zmq") as fleet, connect(fleet.address) as client:
        answers = all_at_once(lambda run: client.generate(job(run).message()), runs)
    for run, answer in zip(runs, answers, strict=True):
        assert tuple(answer.token_ids) == run.answer, run
        assert answer.stats.prefill_worker == "prefill-0"
        assert (answer.stats.kv_pages > 0) == (len(run.prompt) >= run.block)
    assert any(answer.stats.kv_pages for answer in answers)


def job(run: Answered) -> Job:
    """The run as a client asks."""
    return Job(
        prompt=run.prompt,
        max_tokens=run.gen,
        algorithm="block_diffusion",
        confidence_threshold=run.threshold,
        denoising_steps=run.steps,
        stop_token_ids=(run.stop,),
        ignore_eos=True,
    )
