"""Parts in, candidates out: rows, shift, boundary, storage, and independence of batch mates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, MASK_TOKEN_ID, Architecture, write_tiny_checkpoint
from expert_checkpoints import write_expert_checkpoint
from hf_reference import HfReference
from paged_model import PagedModel
from torch import Tensor
from torch.nn import functional

from effuse.config.decoding import Sampling
from effuse.kernels import rowwise
from effuse.kernels.sampling import sample_confidence
from effuse.kernels.sampling_llada import LladaDraw
from effuse.kernels.values import Candidates, ScoreCode
from effuse.models import runner
from effuse.models.runner import Part, PartResult

BLOCK = 4


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture: Architecture = request.param
    path = tmp_path_factory.mktemp("tiny") / architecture
    return write_tiny_checkpoint(path, architecture, seed=1, gain=0.5, block_size=BLOCK)


@pytest.fixture
def model(checkpoint: Path) -> PagedModel:
    return PagedModel(checkpoint, page_size=8, block_size=BLOCK)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def prompt_part(model: PagedModel, prompt: list[int], cached: int) -> Part:
    return Part(
        token_ids=prompt[:cached],
        start=0,
        pages=model.pages(len(prompt) + 4 * BLOCK),
        num_stored=cached,
        block_origin=model.model.config.block_origin(len(prompt)),
        keep_boundary=True,
    )


def masks_part(before: Part, boundary: Tensor | None, blocks: int, seed: int = 0) -> Part:
    """Blocks after `before` of which every second position is a mask."""
    start = len(before.token_ids)
    ids = tokens_of(blocks * BLOCK, seed)
    ids[::2] = [MASK_TOKEN_ID] * len(ids[::2])
    candidates = list(range(start, start + len(ids), 2))
    return Part(
        token_ids=ids,
        start=start,
        pages=before.pages,
        num_stored=0,
        block_origin=before.block_origin,
        candidates=candidates,
        boundary=boundary,
        denoise_counts=[0] * len(candidates),
    )


def start_sequence(model: PagedModel, length: int, blocks: int) -> Part:
    """Prefill a prompt, and the part that denoises what follows it."""
    cached = length - (length - model.model.config.block_origin(length)) % BLOCK
    before = prompt_part(model, tokens_of(length, seed=length), cached)
    (result,) = model.runner().run([before])
    return masks_part(before, result.boundary, blocks, seed=length)


def expected_rows(checkpoint: Path, model: PagedModel, length: int, part: Part) -> Tensor:
    """transformers' logits for the part's candidates, mask id excluded, shift applied."""
    tokens = tokens_of(length, seed=length)[: part.start] + list(part.token_ids)
    block = ((torch.arange(len(tokens)) - part.block_origin) // BLOCK).clamp(min=-1)
    logits = HfReference(checkpoint).run(tokens, block[:, None] >= block[None, :]).logits
    logits[:, MASK_TOKEN_ID] = float("-inf")
    return logits[torch.tensor(part.candidates) - int(model.model.config.shift_logits)]


@pytest.mark.parametrize("length", [4, 10])
def test_candidates_are_those_of_the_whole_sequence(
    checkpoint: Path, model: PagedModel, length: int
) -> None:
    part = start_sequence(model, length, blocks=2)
    (result,) = model.runner().run([part])
    expected = expected_rows(checkpoint, model, length, part).softmax(dim=-1).max(dim=-1)
    assert result.tokens == expected.indices.tolist()
    torch.testing.assert_close(torch.tensor(result.confidences), expected.values, rtol=0, atol=1e-4)


def test_results_do_not_depend_on_batch_mates(model: PagedModel) -> None:
    parts = [start_sequence(model, n, b) for n, b in ((5, 1), (4, 3), (17, 2), (9, 1))]
    alone = [model.runner().run([part])[0] for part in parts]
    together = model.runner().run(parts)
    backwards = model.runner().run(parts[::-1])[::-1]
    assert alone == together == backwards


def test_prefill_and_decode_share_a_forward(model: PagedModel) -> None:
    decoding = start_sequence(model, 9, blocks=2)
    prompt = prompt_part(model, tokens_of(12, seed=5), 12)
    alone = model.runner().run([decoding])[0]
    first = model.runner().run([prompt])[0]
    k_alone = model.stored(2, list(prompt.pages), 12)
    model.memory[torch.tensor(prompt.pages)] = float("nan")
    mixed_prompt, mixed = model.runner().run([prompt, decoding])
    assert mixed == alone
    assert_same_boundary(mixed_prompt, first)
    for stored, before in zip(model.stored(2, list(prompt.pages), 12), k_alone, strict=True):
        assert torch.equal(stored, before)


def assert_same_boundary(one: PartResult, other: PartResult) -> None:
    if one.boundary is None or other.boundary is None:
        assert one.boundary is other.boundary
    else:
        assert torch.equal(one.boundary, other.boundary)


def test_boundary_stands_in_for_the_row_before(tmp_path: Path) -> None:
    """Dream: the same candidates whether position start - 1 is in the forward or its vector is."""
    model = PagedModel(write_tiny_checkpoint(tmp_path, "dream"), page_size=8, block_size=BLOCK)
    part = start_sequence(model, 10, blocks=3)
    assert part.boundary is not None
    clean = replace(part, token_ids=tokens_of(BLOCK) + list(part.token_ids[BLOCK:]))
    late = [p for p in clean.candidates if p >= 10 + BLOCK]
    stored = replace(
        clean,
        num_stored=BLOCK,
        keep_boundary=True,
        candidates=late,
        denoise_counts=[0] * len(late),
        boundary=None,
    )
    (whole,) = model.runner().run([stored])
    assert whole.boundary is not None
    rest = replace(
        stored,
        token_ids=clean.token_ids[BLOCK:],
        start=10 + BLOCK,
        num_stored=0,
        keep_boundary=False,
        boundary=whole.boundary,
    )
    (after,) = model.runner().run([rest])
    assert after.tokens == whole.tokens
    assert after.confidences == pytest.approx(whole.confidences, abs=1e-5)
    (wrong,) = model.runner().run([replace(rest, boundary=torch.zeros_like(whole.boundary))])
    assert wrong.confidences[0] != pytest.approx(whole.confidences[0], abs=1e-3)
    assert wrong.confidences[1:] == after.confidences[1:]


def test_only_shifting_models_return_a_boundary(model: PagedModel) -> None:
    (result,) = model.runner().run([prompt_part(model, tokens_of(8), 8)])
    assert (result.boundary is not None) == (model.model.config.architecture == "dream")
    if result.boundary is not None:
        assert result.boundary.shape == (model.model.config.hidden_size,)


def test_missing_boundary_and_stray_candidates_are_named(tmp_path: Path) -> None:
    model = PagedModel(write_tiny_checkpoint(tmp_path, "dream"), page_size=8, block_size=BLOCK)
    part = start_sequence(model, 6, blocks=1)
    with pytest.raises(ValueError, match=r"position 6 is a candidate.*boundary.*position 5"):
        model.runner().run([replace(part, boundary=None)])
    with pytest.raises(ValueError, match=r"must lie in the part's positions 6\.\.9"):
        model.runner().run([replace(part, candidates=[10], denoise_counts=[0])])
    with pytest.raises(ValueError, match="1 denoise counts for 2 candidates"):
        model.runner().run([replace(part, denoise_counts=[0])])
    with pytest.raises(ValueError, match="0 denoise counts for 2 candidates"):
        model.runner().run([replace(part, denoise_counts=())])


class LinearSpy:
    """Counts the products with each weight and the fewest rows of any."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []  # (rows, address of the weight)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.calls.append((len(x), weight.data_ptr()))
        return functional.linear(x, weight, bias)

    def rows_of(self, weight: Tensor) -> list[int]:
        return [rows for rows, address in self.calls if address == weight.data_ptr()]


@pytest.fixture
def linears(monkeypatch: pytest.MonkeyPatch) -> LinearSpy:
    spy = LinearSpy()

    class Functional:
        linear = spy
        silu = staticmethod(functional.silu)

    monkeypatch.setattr(rowwise, "functional", Functional)
    return spy


def test_one_head_product_for_all_candidates_and_none_for_prompts(
    model: PagedModel, linears: LinearSpy
) -> None:
    parts = [start_sequence(model, n, 2) for n in (5, 8)]
    assert linears.rows_of(model.model.weights.head) == []
    linears.calls.clear()
    model.runner().run([*parts, prompt_part(model, tokens_of(8), 8)])
    assert linears.rows_of(model.model.weights.head) == [8]


def test_the_last_layer_is_cut_to_what_is_wanted(model: PagedModel, linears: LinearSpy) -> None:
    down = model.model.weights.layers[-1].down
    part = start_sequence(model, 8, 3)
    expected = [4] if model.model.config.shift_logits else []  # one boundary row, padded
    assert linears.rows_of(down) == expected
    linears.calls.clear()
    model.runner().run([part])
    assert linears.rows_of(down) == [len(part.candidates)]


@pytest.mark.parametrize("has_experts", [False, True])
def test_no_product_has_fewer_than_four_rows(
    tmp_path: Path, linears: LinearSpy, has_experts: bool
) -> None:
    """Nor that of an expert, which gets a row or two of many."""
    if has_experts:
        path = write_expert_checkpoint(tmp_path, "llada2_moe", block_size=1)
    else:
        path = write_tiny_checkpoint(tmp_path, "dream", block_size=1)
    model = PagedModel(path, page_size=8, block_size=1)
    (prompt,) = [prompt_part(model, [5], 1)]
    (result,) = model.runner().run([prompt])
    one = Part(
        token_ids=[MASK_TOKEN_ID],
        start=1,
        pages=prompt.pages,
        num_stored=0,
        block_origin=1,
        candidates=[1],
        boundary=result.boundary,
        denoise_counts=[0],
    )
    model.runner().run([one])
    assert min(rows for rows, _ in linears.calls) == 4


def test_sampling_settings_reach_their_rows(model: PagedModel) -> None:
    """Two sequences that differ in settings only; seeds use all 64 bits."""
    part = start_sequence(model, 8, 4)
    count = len(part.candidates)

    def drawn(
        seed: int, *, index: int = 0, top_k: int = 0, top_p: float = 1.0, **changes: int
    ) -> PartResult:
        sampling = Sampling(
            temperature=3.0, seed=seed, answer_index=index, top_k=top_k, top_p=top_p
        )
        return model.runner().run([replace(part, sampling=sampling, **changes)])[0]  # type: ignore[arg-type]

    base = drawn(seed=7)
    assert base == drawn(seed=7)
    assert base.tokens != drawn(seed=7 + (1 << 63)).tokens
    assert base.tokens != drawn(seed=7, index=1).tokens
    drawing = Sampling(temperature=3.0, seed=7)
    later = replace(part, sampling=drawing, denoise_counts=range(1, count + 1))
    assert base.tokens != model.runner().run([later])[0].tokens
    assert set(drawn(seed=7, top_k=1).confidences) == {1.0}
    assert set(drawn(seed=7, top_p=1e-6).confidences) == {1.0}
    margins = drawn(seed=7, score=ScoreCode.MARGIN)
    assert margins.tokens == base.tokens and margins.scores != base.scores
    mixed = model.runner().run([part, later])
    assert mixed[0] == model.runner().run([part])[0]


def test_what_leads_logits_copies_some_of_them_at_a_time(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward that is tried at the start, to see what room there is, copies none at all."""
    rows_of: list[int] = []

    def spy(logits: Tensor, *rest: Any, **kept: Any) -> Candidates:
        rows_of.append(len(logits))
        return sample_confidence(logits, *rest, **kept)

    monkeypatch.setattr(runner, "sample_confidence", spy)
    ids, wanted = tokens_of(8) + [MASK_TOKEN_ID] * 600, range(8, 608)
    part = Part(
        token_ids=ids,
        start=0,
        pages=(),
        num_stored=0,
        block_origin=len(ids),
        candidates=wanted,
        denoise_counts=[0] * 600,
        sampling=Sampling(temperature=1.0, seed=3),
        guidance=1.5,
    )
    free = [MASK_TOKEN_ID] * len(ids)
    led, _ = model.runner().run([part, replace(part, token_ids=free, guidance=0.0)])
    assert rows_of == [256, 256, 88]
    few = replace(part, candidates=wanted[300:305], denoise_counts=[0] * 5)
    again, _ = model.runner().run([few, replace(few, token_ids=free, guidance=0.0)])
    assert again.tokens == led.tokens[300:305]


@pytest.mark.parametrize(
    "draw",
    [None, LladaDraw(temperature=1.0, seed=3, answer_index=0, never=(MASK_TOKEN_ID,), last=())],
)
def test_rows_are_drawn_few_at_a_time_on_a_cpu_each_time_a_sign_of_life(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch, draw: LladaDraw | None
) -> None:
    """One of a large vocabulary takes as long as dozens of layers do for it."""
    part = start_sequence(model, 9, blocks=20)
    part = replace(part, sampling=Sampling(temperature=1.0, top_p=0.9, seed=3), draw=draw)
    few = replace(part, candidates=part.candidates[:8], denoise_counts=[0] * 8)
    (at_once,) = model.runner().run([part])
    monkeypatch.setattr(runner, "MOST_LOGITS", 1 << 10)
    layers: list[int] = []
    watched = runner.ModelRunner(
        model.model, model.kv, page_size=8, block_size=BLOCK, on_layer=layers.append
    )
    assert watched.run([part]) == [at_once]
    assert len(layers) >= model.model.config.num_layers + 3, "40 rows, 16 at a time"
    layers.clear()
    watched.run([few] * 5)
    assert len(layers) >= model.model.config.num_layers + 3, "as many of several sequences"


def test_nothing_to_run(model: PagedModel) -> None:
    assert model.runner().run([]) == []


def test_layers_of_the_pool_must_be_the_models(model: PagedModel) -> None:
    model.kv = model.kv[:-1]
    with pytest.raises(ValueError, match="of the model's 3 layers, got 2"):
        model.runner()


def test_stored_rows_do_not_leave_their_pages(model: PagedModel) -> None:
    part = start_sequence(model, 8, 2)
    before = model.memory.clone()
    stored = replace(part, num_stored=BLOCK)
    model.runner().run([stored])
    changed = (model.memory != before) & ~(model.memory.isnan() & before.isnan())
    pages = sorted(changed.flatten(1).any(dim=1).nonzero().flatten().tolist())
    assert pages == [part.pages[1]]
    offsets = changed[part.pages[1]].any(dim=-1).flatten(0, -2).any(dim=0)
    assert _true_at(offsets) == [0, 1, 2, 3]


def _true_at(flags: Tensor) -> Sequence[int]:
    return [int(i) for i in flags.nonzero().flatten()]
