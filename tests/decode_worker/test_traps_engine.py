"""The numbered traps of block-parallel decoding, for the whole engine on tiny checkpoints.

The numbers are those of the project's reference note on diffusion engines.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from pathlib import Path

import pytest
import torch
from auditing import audit
from checkpoints import ARCHITECTURES, Architecture, write_tiny_checkpoint
from decoding.engines import Rig, load_tiny, make_request, oracle_settings
from oracle.decode import decode as oracle_decode

from effuse.config.decoding import Sampling
from effuse.models.part import Part, PartResult
from effuse.models.transformer import Transformer
from effuse.worker import messages

PROMPT = tuple(range(20, 31))


class Recorder:
    """Passes parts on to a runner and keeps them, with the results."""

    def __init__(self, rig: Rig) -> None:
        self._inner = rig.forward
        self.parts: list[Part] = []
        self.results: list[PartResult] = []

    def run(self, parts: Listed[Part]) -> list[PartResult]:
        results = self._inner.run(parts)
        self.parts += parts
        self.results += results
        return results


def tiny(directory: Path, architecture: Architecture) -> Transformer:
    return load_tiny(write_tiny_checkpoint(directory / "model", architecture, seed=3))


def recorded(model: Transformer, **limits: int) -> tuple[Rig, Recorder]:
    rig = Rig(model, **limits)  # type: ignore[arg-type]
    recorder = Recorder(rig)
    rig.forward = recorder
    rig.connect(None)
    return rig, recorder


def test_trap_01_stale_kv_at_commit(tmp_path: Path) -> None:
    """Stored KV comes from a forward that saw the block's final tokens."""
    model = tiny(tmp_path, "sdar")
    rig, recorder = recorded(model)
    answer = rig.start(make_request("a", PROMPT, max_tokens=32, stop_token_ids=()))
    rig.run()
    final = [*PROMPT, *answer.token_ids]
    stored: set[int] = set()
    for part in recorder.parts:
        kept = list(part.token_ids[: part.num_stored])
        assert kept == final[part.start : part.start + part.num_stored]
        positions = set(range(part.start, part.start + part.num_stored))
        assert stored.isdisjoint(positions)
        stored |= positions
    assert stored == set(range(max(stored) + 1)) and len(stored) > len(PROMPT)


def test_trap_03_pages_need_not_end_where_blocks_do(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        model = tiny(tmp_path / architecture, architecture)
        request = make_request("a", PROMPT, max_tokens=23, confidence_threshold=0.7)
        answers = set()
        for page_size in (1, 3, 4, 16):
            rig = Rig(model, page_size=page_size)
            rig.engine.handle(request)
            rig.run()
            answers.add(rig.answers["transfer-a"].token_ids)
        assert len(answers) == 1


def test_trap_05_literal_mask_id_in_prompt(tmp_path: Path) -> None:
    """Masks are a bitmap: a prompt that holds the id is context, and the answer ends."""
    model = tiny(tmp_path, "sdar")
    rig, recorder = recorded(model)
    mask = model.config.mask_token_id
    rig.engine.handle(make_request("a", (9, 9, 9, 9, 9, mask), max_tokens=8, stop_token_ids=()))
    rig.run()
    assert rig.answers["transfer-a"].finished.num_tokens == 8
    assert all(5 not in part.candidates for part in recorder.parts)


def test_trap_09_answers_do_not_depend_on_batch_mates(tmp_path: Path) -> None:
    model = tiny(tmp_path, "dream")
    requests = [
        make_request(str(index), PROMPT[: 3 + index], max_tokens=20, confidence_threshold=0.6)
        for index in range(6)
    ]
    together = Rig(model)
    for request in requests:
        together.engine.handle(request)
    together.run()
    for request in requests:
        alone = Rig(model, page_size=5)
        alone.engine.handle(request)
        alone.run()
        name = request.attempt.transfer_id
        assert alone.answers[name].token_ids == together.answers[name].token_ids


def test_trap_10_each_request_ends_by_itself(tmp_path: Path) -> None:
    rig = Rig(tiny(tmp_path, "llada"))
    rig.engine.handle(make_request("short", PROMPT, max_tokens=4, stop_token_ids=()))
    rig.engine.handle(make_request("long", PROMPT, max_tokens=64, stop_token_ids=()))
    while not rig.answers.get("transfer-short") or not isinstance(
        rig.answers["transfer-short"].events[-1], messages.Finished
    ):
        assert rig.step()
    assert rig.engine.load().running == 1
    rig.run()
    assert rig.answers["transfer-long"].finished.num_tokens == 64


def test_trap_12_only_settled_tokens_are_committed_and_never_revised(tmp_path: Path) -> None:
    rig = Rig(tiny(tmp_path, "sdar"))
    request = make_request("a", PROMPT, max_tokens=40, stop_token_ids=(), drafts=True)
    rig.engine.handle(request)
    seen: tuple[int, ...] = ()
    while rig.step():
        now = rig.answers["transfer-a"].token_ids
        assert now[: len(seen)] == seen
        seen = now
    drafts = [e for e in rig.answers["transfer-a"].events if isinstance(e, messages.Draft)]
    assert drafts and len(seen) == 40


def test_trap_13_the_boundary_row_survives_order_preemption_and_ends_with_its_request(
    tmp_path: Path,
) -> None:
    """Dream: constant while nothing is stored, replaced by the forward that stores."""
    rig, recorder = recorded(tiny(tmp_path, "dream"))
    rig.engine.handle(make_request("a", PROMPT, max_tokens=24, stop_token_ids=()))
    rig.run()
    pairs = zip(recorder.parts, recorder.results, strict=True)
    kept: torch.Tensor | None = None
    for part, result in pairs:
        if part.candidates:
            assert part.boundary is kept
        assert (result.boundary is not None) == (part.num_stored > 0)
        kept = kept if result.boundary is None else result.boundary
    assert rig.engine.load().running == 0


def test_trap_14_counters_are_part_of_what_a_resumed_answer_needs(tmp_path: Path) -> None:
    """The denoise count keys the randomness: without it a sampled answer would change."""
    model = tiny(tmp_path, "sdar")
    sampling = Sampling(temperature=1.0, seed=11)
    request = make_request(
        "a", PROMPT, max_tokens=40, sampling=sampling, stop_token_ids=(), confidence_threshold=0.5
    )
    rig = Rig(model)
    rig.engine.handle(request)
    rig.run()
    whole = rig.answers["transfer-a"]
    counted = [c for c in whole.commits if any(block.denoise_count for block in c.frontier)]
    assert counted
    changed = 0
    for number, commit in enumerate(counted):
        head = whole.token_ids[: commit.token_offset + len(commit.token_ids)]
        assert resumed(rig, request, f"r{number}", head, commit.frontier) == whole.token_ids
        forgotten = tuple(
            messages.BlockState(b.token_ids, b.masks, b.full, 0) for b in commit.frontier
        )
        changed += resumed(rig, request, f"f{number}", head, forgotten) != whole.token_ids
    assert changed


def resumed(
    rig: Rig,
    request: messages.StartDecode,
    name: str,
    head: tuple[int, ...],
    frontier: tuple[messages.BlockState, ...],
) -> tuple[int, ...]:
    again = make_request(
        name,
        request.prompt_token_ids,
        max_tokens=request.stopping.max_tokens,
        sampling=request.sampling,
        stop_token_ids=(),
        confidence_threshold=request.settings.confidence_threshold,
        resume=messages.Resume(committed_token_ids=head, frontier=frontier),
    )
    rig.engine.handle(again)
    rig.run()
    commits = rig.answers[f"transfer-{name}"].commits
    return head + tuple(token for commit in commits for token in commit.token_ids)


def test_trap_15_positions_are_the_requests_own(tmp_path: Path) -> None:
    rig, recorder = recorded(tiny(tmp_path, "llada"), budget=64)
    for index, length in enumerate((3, 11, 7)):
        rig.engine.handle(make_request(str(index), PROMPT[:length], max_tokens=12))
    rig.run()
    for part in recorder.parts:
        end = part.start + len(part.token_ids)
        assert all(part.start <= position < end for position in part.candidates)


def test_trap_16_abort_frees_every_page_in_every_state(tmp_path: Path) -> None:
    """Waiting, prefilling, denoising with a settled block, preempted."""
    model = tiny(tmp_path, "sdar")
    for steps in range(12):
        rig = Rig(model, num_pages=14, page_size=4, budget=16)
        requests = [
            make_request(str(index), range(20, 41), max_tokens=24, stop_token_ids=())
            for index in range(3)
        ]
        for request in requests:
            rig.engine.handle(request)
        for _ in range(steps):
            rig.step()
        for request in requests:
            rig.engine.handle(messages.Abort(attempt=request.attempt))
            audit(rig.engine)
        assert rig.pool.num_free == rig.pool.num_pages
        assert not rig.step()


@pytest.mark.parametrize("architecture", ["dream", "llada"])
def test_trap_17_a_rebuild_keeps_the_original_block_origin(
    tmp_path: Path, architecture: Architecture
) -> None:
    """Prompt and answer are not re-encoded as one bidirectional prompt."""
    directory = tmp_path / "model"
    write_tiny_checkpoint(directory, architecture, seed=3)
    model = load_tiny(directory)
    rig, recorder = recorded(model, num_pages=14, page_size=4, budget=40, caches=False)
    requests = [
        make_request(str(index), range(20, 33), max_tokens=40, stop_token_ids=())
        for index in range(2)
    ]
    for request in requests:
        rig.engine.handle(request)
    rig.run()
    assert rig.engine.counters.preemptions > 0
    assert {part.block_origin for part in recorder.parts} == {13}
    rebuilt = [part for part in recorder.parts if not part.candidates and part.start == 0]
    assert all(len(part.token_ids) >= 13 for part in rebuilt) and len(rebuilt) > 2
    for request in requests:
        expected = oracle_decode(directory, request.prompt_token_ids, oracle_settings(request))
        assert rig.answers[request.attempt.transfer_id].token_ids == expected.token_ids


def test_trap_19_blocks_in_flight_take_no_pages(tmp_path: Path) -> None:
    rig, recorder = recorded(tiny(tmp_path, "sdar"), page_size=4)
    rig.engine.handle(make_request("a", PROMPT, max_tokens=40, window=6, stop_token_ids=()))
    while rig.step():
        part = recorder.parts[-1]
        assert len(part.pages) == -(-(part.start + part.num_stored) // 4)


def test_trap_20_many_requests_share_one_forward(tmp_path: Path) -> None:
    rig, recorder = recorded(tiny(tmp_path, "sdar"))
    for index in range(8):
        rig.engine.handle(make_request(str(index), PROMPT, max_tokens=8, stop_token_ids=()))
    rig.step()
    rig.step()
    assert len(recorder.parts) == 16 and rig.engine.counters.steps == 2
