"""Short prompts on padded rows: K, V and boundary are those of the usual way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, Architecture, TinySizes, write_tiny_checkpoint
from models.test_stages import places
from operators import child
from padded_prompts import PaddedPrompts

from effuse.config.decoding import Sampling
from effuse.kernels.values import ScoreCode
from effuse.kvtransfer.layout import KVLayout, PageMemory
from effuse.models.config import ModelConfig
from effuse.models.prompt_graphs import MOST_ROWS, MOST_SEQUENCES, PromptGraphs
from effuse.models.runner import ModelRunner, Part, PartResult
from effuse.models.transformer import Transformer
from effuse.models.weights import load_model

PAGE, BLOCK, NUM_PAGES = 8, 4, 48
SIZES = TinySizes(hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=192)
LENGTHS = ((1,), (22,), (64,), (20, 3, 41), (5,) * MOST_SEQUENCES)


def make(
    model: Transformer, *, padded: bool, uses_graphs: bool = False
) -> tuple[ModelRunner, torch.Tensor]:
    config = model.config
    sizes = len(model.shard.layers), config.num_kv_heads, config.head_dim, PAGE
    layout = KVLayout("unified", *sizes, str(model.dtype).removeprefix("torch."))
    pool = PageMemory(layout, NUM_PAGES, model.device)
    memory, kv = pool.tensor.fill_(-7.0), pool.layer_views()
    graphs = None
    if padded:
        kind = PromptGraphs if uses_graphs else PaddedPrompts
        graphs = kind(model, kv, page_size=PAGE, block_size=BLOCK, max_context=NUM_PAGES * PAGE)
    return ModelRunner(model, kv, page_size=PAGE, block_size=BLOCK, graphs=graphs), memory


def prompts(model: Transformer, lengths: Sequence[int]) -> list[Part]:
    free = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1)).tolist()
    return [
        Part(
            token_ids=[3 + (7 * index + 5 * i) % 200 for i in range(length)],
            start=0,
            pages=[free.pop() for _ in range(-(-length // PAGE))],
            num_stored=length,
            block_origin=model.config.block_origin(length),
            keep_boundary=index != 1,
        )
        for index, length in enumerate(lengths)
    ]


def cut(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Of longer prompts the first half, up to the end of a block, and the rest; shorter ones are
    only in the second forward, so that not all of its parts begin with cached tokens.
    """
    first, rest = [], []
    for part in parts:
        length = len(part.token_ids)
        half = length // 2 // BLOCK * BLOCK if length > 3 * BLOCK else 0
        if half:
            begin = replace(
                part, token_ids=part.token_ids[:half], num_stored=half, keep_boundary=False
            )
            first.append(begin)
        tail = part.token_ids[half:]
        rest.append(replace(part, token_ids=tail, start=half, num_stored=length - half))
    return first, rest


def boundaries(results: Sequence[PartResult]) -> list[torch.Tensor]:
    return [result.boundary for result in results if result.boundary is not None]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padded_rows_give_the_same_bits_on_the_cpu(
    tmp_path: Path, architecture: Architecture
) -> None:
    torch.set_num_threads(1)
    model = load_model(write_tiny_checkpoint(tmp_path, architecture, seed=3), block_size=BLOCK)
    (usual, expected), (runner, memory) = make(model, padded=False), make(model, padded=True)
    for lengths in LENGTHS:
        parts = prompts(model, lengths)
        one, other = usual.run(parts), runner.run(parts)
        assert torch.equal(memory, expected)
        kept = len(lengths) - (len(lengths) > 1) if architecture == "dream" else 0
        assert len(boundaries(other)) == kept
        for mine, theirs in zip(boundaries(other), boundaries(one), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("architecture", ["sdar", "fast_dllm_v2"])
def test_so_do_prompts_that_begin_with_cached_tokens(
    tmp_path: Path, architecture: Architecture
) -> None:
    torch.set_num_threads(1)
    model = load_model(write_tiny_checkpoint(tmp_path, architecture, seed=3), block_size=BLOCK)
    (usual, expected), (runner, memory) = make(model, padded=False), make(model, padded=True)
    for lengths in ((22,), (64,), (20, 3, 41), (130,), (17, 18, 19, 20)):
        for parts in cut(prompts(model, lengths)):
            one, other = usual.run(parts), runner.run(parts)
            assert torch.equal(memory, expected)
            for mine, theirs in zip(boundaries(other), boundaries(one), strict=True):
                assert torch.equal(mine, theirs)


def test_what_does_not_fit_goes_the_usual_way(tmp_path: Path) -> None:
    model = load_model(write_tiny_checkpoint(tmp_path, "dream", seed=3), block_size=BLOCK)
    graphs = PromptGraphs(model, [], page_size=PAGE, block_size=BLOCK)

    def part(length: int, start: int = 0, candidates: Sequence[int] = ()) -> Part:
        return Part(
            token_ids=[1] * length,
            start=start,
            pages=[],
            num_stored=0,
            block_origin=0,
            candidates=candidates,
        )

    assert graphs.takes([part(MOST_ROWS)])
    assert graphs.takes([part(1)] * MOST_SEQUENCES)
    assert not graphs.takes([part(1)] * (MOST_SEQUENCES + 1))
    assert not graphs.takes([part(MOST_ROWS), part(1)])
    assert not graphs.takes([part(8), part(8, start=4)])
    caching = PromptGraphs(model, [], page_size=PAGE, block_size=BLOCK, max_context=4)
    assert caching.takes([part(8), part(8, start=4)])
    assert not caching.takes([part(8, start=5)])
    assert not graphs.takes([part(8, candidates=[3])])
    assert not graphs.takes([])


@pytest.mark.parametrize("architecture", ["dream", "sdar"])
def test_the_kernels_give_the_same_rows_whatever_padding_holds(architecture: str) -> None:
    """As a graph runs them, in Triton's interpreter; attention leaves NaN in the padding."""
    lines = child.json_lines("operators.prompt_rows", architecture, TRITON_INTERPRET="1")
    assert len(lines) == 3
    for line in lines:
        assert line["farthest"] == pytest.approx(0, abs=1e-5)
        assert line["untouched"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_graphs_give_what_launches_give(
    tmp_path: Path, architecture: Architecture, dtype: torch.dtype
) -> None:
    """K and V bitwise where the bucket is full; elsewhere products of other sizes are near.

    The boundary's rows are as many as there is room for in a graph, so they are never the same.
    """
    path = write_tiny_checkpoint(tmp_path, architecture, gain=0.5, sizes=SIZES)
    model = load_model(path, device="cuda", dtype=dtype, block_size=BLOCK)
    usual, expected = make(model, padded=False)
    runner, memory = make(model, padded=True, uses_graphs=True)
    bound = 1e-4 if dtype == torch.float32 else 0.05
    for lengths in (*LENGTHS, *LENGTHS):
        parts = prompts(model, lengths)
        memory.fill_(-7), expected.fill_(-7)
        one, other = usual.run(parts), runner.run(parts)
        bound_here = 0 if sum(lengths) % 64 == 0 else bound
        torch.testing.assert_close(memory, expected, rtol=0, atol=bound_here)
        for mine, theirs in zip(boundaries(other), boundaries(one), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=20 * bound)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["sdar", "fast_dllm_v2"])
def test_graphs_go_on_from_cached_tokens_as_launches_do(
    tmp_path: Path, architecture: Architecture, dtype: torch.dtype
) -> None:
    """A graph splits attention for more cached tokens than there are, so bits differ."""
    path = write_tiny_checkpoint(tmp_path, architecture, gain=0.5, sizes=SIZES)
    model = load_model(path, device="cuda", dtype=dtype, block_size=BLOCK)
    usual, expected = make(model, padded=False)
    runner, memory = make(model, padded=True, uses_graphs=True)
    bound = 1e-4 if dtype == torch.float32 else 0.05
    for lengths in ((22,), (64,), (20, 3, 41), (130,), (17, 18, 19, 20), (22,)):
        memory.fill_(-7), expected.fill_(-7)
        for parts in cut(prompts(model, lengths)):
            one, other = usual.run(parts), runner.run(parts)
            torch.testing.assert_close(memory, expected, rtol=0, atol=bound)
            for mine, theirs in zip(boundaries(other), boundaries(one), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=20 * bound)


def steps_after(parts: Sequence[Part], mask: int, hidden_size: int) -> list[Part]:
    """Denoise steps of sequences with different settings, some of which begin with a candidate
    of a vector."""
    wanted = (0, 2, 3), (0, 2, 3), (1,)
    settings = Sampling(temperature=0.7, top_p=0.8, top_k=9, seed=4), Sampling(), Sampling(top_k=1)
    codes = ScoreCode.CONFIDENCE, ScoreCode.MARGIN, ScoreCode.NEG_ENTROPY
    return [
        replace(
            part,
            token_ids=[mask, 6, mask, mask],
            start=len(part.token_ids),
            num_stored=0,
            block_origin=0,
            candidates=[len(part.token_ids) + at for at in wanted[number]],
            denoise_counts=[1 + at for at in wanted[number]],
            boundary=torch.linspace(-1, 1, hidden_size),
            keep_boundary=False,
            sampling=settings[number],
            score=codes[number],
        )
        for number, part in enumerate(parts)
    ]


def of_stages(
    path: Path, device: str, dtype: torch.dtype, *, padded: bool
) -> tuple[list[list[PartResult]], set[int]]:
    """The last stage's results of prompts and steps, and the sizes of graphs that drew."""
    for place in places(ModelConfig.from_dir(path), 2):
        model = load_model(path, device=device, dtype=dtype, block_size=BLOCK, place=place)
        runner, _ = make(model, padded=padded, uses_graphs=device == "cuda")
        given = prompts(model, (20, 8, 40))
        steps = steps_after(given, model.config.mask_token_id, model.config.hidden_size)
        asked = [replace(steps[0], num_logprobs=2), *steps[1:]]
        full = [*steps * 9, steps[2]]  # 64 candidates
        waves = given, full, steps * 10, steps, steps[1:], [*given[:1], steps[1]], asked, steps[2:]
        found = [runner.run(parts) for parts in waves]
        assert model.has_head or found == [[]] * len(waves)
    graphs = runner._graphs
    return found, set() if graphs is None else {k for k in graphs._graphs if isinstance(k, int)}


@pytest.mark.parametrize("architecture", ["sdar", "dream"])
def test_stages_draw_on_padded_rows_what_is_drawn_one_by_one(
    tmp_path: Path, architecture: Architecture
) -> None:
    """Settings, rows and vectors of a larger forward before are no longer there."""
    torch.set_num_threads(1)
    path = write_tiny_checkpoint(tmp_path, architecture, gain=0.5, sizes=SIZES)
    (usual, _), (other, sizes) = (
        of_stages(path, "cpu", torch.float32, padded=padded) for padded in (False, True)
    )
    assert sizes == {64, 128}
    for mine, theirs in zip(chain(*other), chain(*usual), strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.confidences == pytest.approx(theirs.confidences, abs=1e-5)
        assert mine.scores == pytest.approx(theirs.scores, abs=1e-4)
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        assert (mine.boundary is None) == (theirs.boundary is None)
        if mine.boundary is not None and theirs.boundary is not None:
            torch.testing.assert_close(mine.boundary, theirs.boundary, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["sdar", "dream"])
def test_stages_of_a_pipeline_also_denoise_by_graphs(
    tmp_path: Path, architecture: Architecture, dtype: torch.dtype
) -> None:
    path = write_tiny_checkpoint(tmp_path, architecture, gain=0.5, sizes=SIZES)
    (usual, _), (other, sizes) = (
        of_stages(path, "cuda", dtype, padded=padded) for padded in (False, True)
    )
    assert sizes == {64, 128}
    for mine, theirs in zip(chain(*other), chain(*usual), strict=True):
        assert mine.confidences == pytest.approx(theirs.confidences, abs=0.05)
        assert dtype != torch.float32 or mine.tokens == theirs.tokens
