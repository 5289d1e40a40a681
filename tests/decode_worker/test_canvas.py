"""Canvases through the engine: the authors' tokens, whatever shares the batch or is lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_tiny_checkpoint
from decoding.device_rig import DeviceRig
from decoding.engines import Answer, Rig, load_tiny, make_request, random_requests
from decoding.published import Published, published_model, published_runs
from padded_prompts import PaddedPrompts
from torch import Tensor

from effuse.config.decoding import Algorithm, Sampling
from effuse.decode_worker.intake import Intake
from effuse.decode_worker.request import denoise_part
from effuse.decode_worker.sequence import RequestError
from effuse.models.packing import PackedParts
from effuse.models.part import Part
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer
from effuse.worker import messages
from effuse.worker.messages import Resume, StartDecode

CACHES = ("none", "prefix", "dual")
LOOPS = ("llada", "dream", "fast_dllm")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Transformer]:
    home = tmp_path_factory.mktemp("published")
    keys = {(run.architecture, run.checkpoint) for name in LOOPS for run in published_runs(name)}
    return {key: published_model(home, *key) for key in sorted(keys)}


@pytest.fixture(scope="module")
def model(models: dict[tuple[str, int], Transformer]) -> Transformer:
    return models["llada", 1]


class CountingGraphs(PaddedPrompts):
    """Counts their forwards."""

    num_runs = 0

    def run(self, parts: Sequence[Part], packed: PackedParts) -> tuple[Tensor, Tensor | None]:
        self.num_runs += 1
        return super().run(parts, packed)


def some_runs(name: str) -> list[Published]:
    """Long ones on the first checkpoint: blocks settle while others hold masks."""
    return [run for run in published_runs(name) if run.checkpoint == 1 and run.max_tokens > 16]


def ask(rig: Rig, requests: Iterable[StartDecode]) -> list[Answer]:
    answers = [rig.start(request) for request in requests]
    rig.run()
    return answers


@pytest.mark.parametrize("name", LOOPS)
def test_tokens_are_those_of_the_published_loop(
    name: str, models: dict[tuple[str, int], Transformer]
) -> None:
    runs = published_runs(name)
    for key, model in models.items():
        own = [run for run in runs if (run.architecture, run.checkpoint) == key]
        answers = ask(Rig(model), [run.request(str(at)) for at, run in enumerate(own)])
        for run, answer in zip(own, answers, strict=True):
            assert list(answer.token_ids) == run.tokens, run
            assert not answer.finished.stopped


@pytest.mark.parametrize("name", LOOPS)
def test_who_shares_the_batch_changes_nothing(
    name: str, models: dict[tuple[str, int], Transformer]
) -> None:
    """Alone, and among requests that have pages and are preempted for them."""
    runs = some_runs(name)[:6]
    others = random_requests(6, "d2f", block_size=8, seed=1)
    for architecture in sorted({run.architecture for run in runs}):
        own = [run for run in runs if run.architecture == architecture]
        model = models[architecture, 1]
        rig = Rig(model, num_pages=32)
        answers = ask(rig, [*others, *(run.request(str(at)) for at, run in enumerate(own))])
        assert rig.engine.counters.preemptions > 0
        for run, answer in zip(own, answers[len(others) :], strict=True):
            assert list(answer.token_ids) == run.tokens
            (alone,) = ask(Rig(model), [run.request("alone")])
            assert list(alone.token_ids) == run.tokens
        for other, answer in zip(others, answers, strict=False):
            (alone,) = ask(Rig(model), [other])
            assert alone.token_ids == answer.token_ids


@pytest.mark.parametrize("name", ["llada", "fast_dllm"])
def test_it_runs_from_the_host_beside_denoising_on_the_device(
    name: str, model: Transformer
) -> None:
    runs = [run for run in some_runs(name) if run.architecture == "llada"][:3]
    others = random_requests(3, "d2f", block_size=8)
    rig = DeviceRig(model)
    answers = ask(rig, [*others, *(run.request(str(at)) for at, run in enumerate(runs))])
    expected = ask(Rig(model), others)
    assert [a.token_ids for a in answers[: len(others)]] == [a.token_ids for a in expected]
    assert [list(a.token_ids) for a in answers[len(others) :]] == [run.tokens for run in runs]


@pytest.mark.parametrize("name", LOOPS)
def test_it_goes_on_from_every_commit(
    name: str, models: dict[tuple[str, int], Transformer]
) -> None:
    """Another engine writes the same rest, random choices included."""
    num_resumed = 0
    for run in [r for r in some_runs(name) if r.temperature][:8]:
        model = models[run.architecture, 1]
        (answer,) = ask(Rig(model), [run.request("whole")])
        told: list[int] = []
        for commit in answer.commits[:-1]:
            told += commit.token_ids
            resume = Resume(committed_token_ids=tuple(told), frontier=commit.frontier)
            (later,) = ask(Rig(model), [run.request("later", resume=resume)])
            assert later.commits[0].token_offset == len(told)
            rest = [token for one in later.commits for token in one.token_ids]
            assert told + rest == run.tokens
            num_resumed += 1
    assert num_resumed > 2


def test_a_stop_id_ends_it_once_all_before_is_written(model: Transformer) -> None:
    run = next(r for r in some_runs("llada") if r.settings["block_length"] == 8)
    stop = next(token for token in run.tokens[:8] if run.tokens.index(token) > 0)
    request = run.request("stopped", stop_token_ids=(stop,))
    (answer,) = ask(Rig(model), [request])
    assert list(answer.token_ids) == run.tokens[: run.tokens.index(stop)]
    assert answer.finished.stopped
    (whole,) = ask(Rig(model), [run.request("whole")])
    assert answer.finished.forward_passes < whole.finished.forward_passes


def test_llada_leads_and_bars_on_a_model_that_shifts_its_logits(
    models: dict[tuple[str, int], Transformer],
) -> None:
    """Guidance and barred ends count as on any other model, alone and beside one that edits."""
    model = models["dream", 1]
    (eos, *_) = model.config.eos_token_ids
    likely = Sampling(logit_bias=((eos, 100.0),))
    common: dict[str, Any] = {"algorithm": "llada", "max_tokens": 8, "stop_token_ids": ()}
    plain = make_request("plain", range(20, 33), **common)
    led = make_request("led", range(20, 33), cfg_scale=4.0, **common)
    barred = make_request("barred", range(20, 33), logits_eos_inf=True, sampling=likely, **common)
    without, alone, bars = (ask(Rig(model), [one])[0] for one in (plain, led, barred))
    beside, _ = ask(Rig(model), [led, barred])
    assert alone.token_ids != without.token_ids
    assert beside.token_ids == alone.token_ids
    assert eos not in bars.token_ids


def test_it_holds_no_page_and_takes_two_passes_with_guidance(model: Transformer) -> None:
    prompt = tuple(range(20, 33))
    rows = {}
    for scale in (0.0, 1.5):
        rig = Rig(model)
        rig.start(make_request("a", prompt, max_tokens=8, algorithm="llada", cfg_scale=scale))
        rig.step()
        assert rig.pool.num_free == rig.pool.num_pages
        assert rig.engine.load().running == 1
        rows[scale] = rig.engine.counters.step_tokens
    assert rows == {0.0: 21, 1.5: 42}


@pytest.mark.parametrize(
    ("cache", "num_pages", "rows"),
    [
        ("none", [0, 0, 0, 0], [23, 23, 23, 23]),
        ("prefix", [4, 4, 4, 5], [23, 10, 10, 23]),
        ("dual", [5, 5, 5, 5], [23, 4, 4, 23]),
    ],
)
def test_a_cache_holds_what_surrounds_the_block(
    cache: str, num_pages: list[int], rows: list[int], model: Transformer
) -> None:
    """A prompt of 13 and blocks of 4, 4 and 2, in pages of 4: threshold 1 writes one a step."""
    rig = Rig(model)
    settings = {"algorithm": "fast_dllm", "cache": cache, "block_length": 4}
    rig.start(
        make_request("a", range(20, 33), max_tokens=10, confidence_threshold=1.0, **settings)  # type: ignore[arg-type]
    )
    held, ran = [], []
    for _ in range(5):
        before = rig.engine.counters.step_tokens
        rig.step()
        held.append(rig.pool.num_pages - rig.pool.num_free)
        ran.append(rig.engine.counters.step_tokens - before)
    assert [held[at] for at in (0, 1, 2, 4)] == num_pages
    assert [ran[at] for at in (0, 1, 2, 4)] == rows


def test_caches_are_approximations(model: Transformer) -> None:
    """Where they changed no token, nothing would be cached, or nothing of use."""
    run = next(r for r in some_runs("fast_dllm") if r.architecture == "llada")
    answers = ask(Rig(model), [run.request(cache, cache=cache) for cache in CACHES])
    assert len({answer.token_ids for answer in answers}) > 1


@pytest.mark.parametrize("architecture", ["llada", "dream"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_lost_cache_is_filled_again(
    cache: str, architecture: str, models: dict[tuple[str, int], Transformer]
) -> None:
    """Preempted in the middle of its blocks, each answer is that of an undisturbed request."""
    model = models[architecture, 1]
    prompts = [range(first, first + 20) for first in (10, 50, 90, 130)]
    requests = [
        make_request(
            str(at), prompt, max_tokens=32, algorithm="fast_dllm", cache=cache, block_length=8,
            confidence_threshold=0.6, stop_token_ids=(),
        )
        for at, prompt in enumerate(prompts)
    ]  # fmt: skip
    alone = [ask(Rig(model), [request])[0].token_ids for request in requests]
    rig = Rig(model, num_pages=24)
    filler = make_request("d2f", range(40), max_tokens=40, stop_token_ids=())
    answers = ask(rig, [filler, *requests])
    assert [answer.token_ids for answer in answers[1:]] == alone
    assert rig.engine.counters.preemptions > 0


@pytest.mark.parametrize("architecture", ["llada", "dream"])
def test_forwards_that_propose_nothing_may_run_as_graphs_of_prompts(
    architecture: str, models: dict[tuple[str, int], Transformer]
) -> None:
    """Caches that are refilled, and steps whose random choice was empty, as on a GPU."""
    model = models[architecture, 1]
    rig = Rig(model)
    kv = rig.memory.layer_views()
    graphs = CountingGraphs(model, kv, page_size=4, block_size=8)
    rig.forward = ModelRunner(model, kv, page_size=4, block_size=8, graphs=graphs)
    rig.connect(None)
    for run in some_runs("fast_dllm" if architecture == "llada" else "dream"):
        if run.architecture == architecture and run.settings.get("alg", "origin") == "origin":
            answer = rig.start(run.request(f"{run.seed}"))
            for _ in range(3):
                rig.step()
            for request in list(rig.engine.roster.running):
                rig.engine.roster.preempt(request, rig.engine.room)
            rig.run()
            assert list(answer.token_ids) == run.tokens
    assert graphs.num_runs > 0


def test_drafts_show_the_blocks_that_were_written(model: Transformer) -> None:
    run = some_runs("llada")[0]
    (answer,) = ask(Rig(model), [run.request("a", drafts=True)])
    drafts = [event for event in answer.events if isinstance(event, messages.Draft)]
    assert {draft.token_offset % 8 for draft in drafts} == {0}
    left = [sum(map(int.bit_count, draft.block.masks)) for draft in drafts]
    begun = len({draft.token_offset for draft in drafts})  # in the first draft, as one canvas
    assert sum(left[:begun]) == len(answer.token_ids)
    assert all(count < 8 for count in left[begun:]) and any(left[begun:])


def _frontier(model: Transformer, keep: int) -> Resume:
    run = some_runs("llada")[0]
    (answer,) = ask(Rig(model), [run.request("whole")])
    first = answer.commits[0]
    return Resume(committed_token_ids=first.token_ids, frontier=first.frontier[:keep])


@pytest.mark.parametrize("keep", [0, 1])
def test_a_frontier_that_lacks_blocks_is_refused(keep: int, model: Transformer) -> None:
    run = some_runs("llada")[0]
    resume = _frontier(model, keep)
    (answer,) = ask(Rig(model), [run.request("cut", resume=resume, max_tokens=48)])
    assert answer.failed.code == "INVALID_ARGUMENT"
    assert "all blocks that are not final" in answer.failed.message


@pytest.mark.parametrize(
    ("changes", "message", "field"),
    [
        ({"writer": "prefill-1"}, "without a prefill worker", ""),
        ({"max_tokens": 60, "cfg_scale": 1.0}, "one denoise step may need 122 tokens", "prompt"),
    ],
)
def test_what_cannot_run_here_is_refused(
    changes: dict[str, object], message: str, field: str, model: Transformer
) -> None:
    request = make_request("a", [5], algorithm="llada", **changes)  # type: ignore[arg-type]
    intake = Intake(model.config, Rig(model, budget=100).limits)
    with pytest.raises(RequestError, match=message) as caught:
        intake.make_request(request, arrival=0, now=0.0)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("algorithm", "unused"),
    [
        ("dream", {"cache": "prefix", "cfg_scale": 1.0}),
        ("llada", {"cache": "dual"}),
        ("fast_dllm", {"cfg_scale": 1.0, "logits_eos_inf": True}),
        ("d2f", {"remasking": "random", "cache": "dual"}),
    ],
)
def test_settings_of_another_algorithm_change_nothing(
    algorithm: Algorithm, unused: dict[str, Any], model: Transformer
) -> None:
    order = {"remasking": "low_confidence"} if algorithm == "llada" else {}
    for kind in (Rig, DeviceRig):
        plain, other = (
            make_request(name, [20, 21, 22], algorithm=algorithm, **{**order, **more})
            for name, more in (("a", {}), ("b", unused))
        )
        found = [answer.token_ids for answer in ask(kind(model), [plain, other])]
        assert found[0] == found[1] and found[0], kind


@pytest.mark.parametrize(("asked", "last"), [(False, ()), (True, (126081, 126348))])
def test_llada_puts_off_the_end_of_a_turn_too_which_its_files_do_not_name(
    asked: bool, last: tuple[int, ...], model: Transformer
) -> None:
    published = replace(model.config, vocab_size=126464, eos_token_ids=(126081,))
    intake = Intake(published, Rig(model).limits)
    message = make_request("a", [5], algorithm="llada", confidence_eos_eot_inf=asked)
    request = intake.make_request(message, arrival=0, now=0.0)
    part = denoise_part(request, request.open_step())
    assert part.draw is not None and part.draw.last == last


def test_a_block_causal_model_denoises_no_canvas(tmp_path: Path) -> None:
    rig = Rig(load_tiny(write_tiny_checkpoint(tmp_path / "m", "sdar", seed=3)))
    (answer,) = ask(rig, [make_request("a", [5], algorithm="llada")])
    assert answer.failed.code == "INVALID_ARGUMENT"
    assert "attends to all of itself" in answer.failed.message


def test_a_batch_of_canvases_keeps_to_the_budget(model: Transformer) -> None:
    runs: Sequence[Published] = some_runs("llada")[:3]
    most = max(len(run.prompt) + run.max_tokens for run in runs) * 2
    rig = Rig(model, budget=most)
    answers = [rig.start(run.request(str(at))) for at, run in enumerate(runs)]
    before = 0
    while rig.step():
        assert rig.engine.counters.step_tokens - before <= most
        before = rig.engine.counters.step_tokens
    assert [list(a.token_ids) for a in answers] == [run.tokens for run in runs]
