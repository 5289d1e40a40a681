"""Parity with transformers' implementations under explicit masks: logits, K and V within 1e-5."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, MASK_TOKEN_ID, Architecture, write_tiny_checkpoint
from hf_reference import Expected, HfReference
from paged_model import PagedModel

from effuse.kernels.attention_flex import FlexAttention

TOLERANCE = 1e-5
BLOCK = 4


def visible(length: int, origin: int, block_size: int) -> torch.Tensor:
    block = torch.div(torch.arange(length) - origin, block_size, rounding_mode="floor").clamp(
        min=-1
    )
    return block[:, None] >= block[None, :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture: Architecture = request.param
    path = tmp_path_factory.mktemp("tiny") / architecture
    return write_tiny_checkpoint(
        path, architecture, seed=3, head_scale=1.0, gain=0.5, block_size=BLOCK
    )


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> HfReference:
    return HfReference(checkpoint)


def assert_kv(model: PagedModel, pages: list[int], count: int, expected: Expected) -> None:
    for layer in range(model.model.config.num_layers):
        k, v = model.stored(layer, pages, count)
        torch.testing.assert_close(k, expected.keys[layer][:count], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(v, expected.values[layer][:count], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 21])
def test_prompt_logits_and_kv(
    checkpoint: Path, reference: HfReference, length: int, page_size: int
) -> None:
    model = PagedModel(checkpoint, page_size=page_size, block_size=BLOCK)
    origin = model.model.config.block_origin(length)
    prompt, pages = prompt_of(length), model.pages(length)
    expected = reference.run(prompt, visible(length, origin, BLOCK))
    hidden = model.forward(prompt, 0, pages, length, origin)
    logits = model.model.logits(hidden)
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=TOLERANCE)
    assert_kv(model, pages, length, expected)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("by_kind", [False, True], ids=["flat", "by_kinds_of_layers"])
def test_the_forward_obeys_a_rotary_base_that_is_nested(
    checkpoint: Path, tmp_path: Path, place: str, by_kind: bool
) -> None:
    """As transformers' forward does with the same base."""
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 37.0}))
    expected = HfReference(tmp_path).run(prompt_of(9), visible(9, 9, BLOCK))
    del config["rope_theta"]
    stated: dict[str, object] = {"rope_type": "default", "rope_theta": 37.0}
    config[place] = {"full_attention": stated} if by_kind else stated
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = PagedModel(tmp_path, page_size=4, block_size=BLOCK)
    logits = model.model.logits(model.forward(prompt_of(9), 0, model.pages(9), 9, 9))
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=TOLERANCE)


def test_prompt_logits_and_kv_by_flex_attention(checkpoint: Path, reference: HfReference) -> None:
    model = PagedModel(checkpoint, page_size=8, block_size=BLOCK, attend=FlexAttention())
    origin = model.model.config.block_origin(21)
    prompt, pages = prompt_of(21), model.pages(21)
    expected = reference.run(prompt, visible(21, origin, BLOCK))
    logits = model.model.logits(model.forward(prompt, 0, pages, 21, origin))
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=TOLERANCE)
    assert_kv(model, pages, 21, expected)


@pytest.mark.parametrize("length", [5, 16, 22])
def test_prefill_that_wants_no_row_still_stores_every_layer(
    checkpoint: Path, reference: HfReference, length: int
) -> None:
    model = PagedModel(checkpoint, page_size=8, block_size=BLOCK)
    origin = model.model.config.block_origin(length)
    prompt, pages = prompt_of(length), model.pages(length)
    hidden = model.forward(prompt, 0, pages, length, origin, last_rows=torch.empty(0).long())
    assert hidden.shape == (0, model.model.config.hidden_size)
    assert_kv(model, pages, length, reference.run(prompt, visible(length, origin, BLOCK)))


@pytest.mark.parametrize("chunks", [[4, 8, 8], [12, 4, 4], [4, 4, 4, 4, 4]])
def test_chunked_prefill_at_block_boundaries(tmp_path: Path, chunks: list[int]) -> None:
    path = write_tiny_checkpoint(
        tmp_path, "sdar", seed=5, head_scale=1.0, gain=0.5, block_size=BLOCK
    )
    model = PagedModel(path, page_size=8, block_size=BLOCK)
    length = sum(chunks)
    prompt, pages = prompt_of(length), model.pages(length)
    expected = HfReference(path).run(prompt, visible(length, 0, BLOCK))
    start, rows = 0, []
    for size in chunks:
        rows.append(model.forward(prompt[start : start + size], start, pages, size, 0))
        start += size
    logits = model.model.logits(torch.cat(rows))
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=TOLERANCE)
    assert_kv(model, pages, length, expected)


@pytest.mark.parametrize("length", [2, 4, 9, 16])
def test_decode_over_a_paged_cache(checkpoint: Path, reference: HfReference, length: int) -> None:
    """Prompt cached; one clean block stored while two noisy ones ride along; then these again."""
    model = PagedModel(checkpoint, page_size=4, block_size=BLOCK)
    origin = model.model.config.block_origin(length)
    cached = length - (length - origin) % BLOCK
    noisy = [MASK_TOKEN_ID, 31, MASK_TOKEN_ID, MASK_TOKEN_ID] + [MASK_TOKEN_ID] * BLOCK
    tokens = prompt_of(length) + prompt_of(cached + BLOCK - length, seed=1) + noisy
    expected = reference.run(tokens, visible(len(tokens), origin, BLOCK))
    pages = model.pages(len(tokens))
    if cached:
        model.forward(tokens[:cached], 0, pages, cached, origin, torch.empty(0).long())
    for start, stored in ((cached, BLOCK), (cached + BLOCK, 0)):
        hidden = model.forward(tokens[start:], start, pages, stored, origin)
        torch.testing.assert_close(
            model.model.logits(hidden), expected.logits[start:], rtol=0, atol=TOLERANCE
        )
    assert_kv(model, pages, cached + BLOCK, expected)
    k, _ = model.stored(0, pages, len(tokens))
    assert k[cached + BLOCK :].isnan().all(), "rows that are not to be stored were stored"


def test_wanted_rows_are_rows_of_the_whole(checkpoint: Path) -> None:
    model = PagedModel(checkpoint, page_size=4, block_size=BLOCK)
    prompt, pages = prompt_of(11), model.pages(11)
    origin = model.model.config.block_origin(11)
    everything = model.forward(prompt, 0, pages, 0, origin)
    wanted = torch.tensor([10, 3, 3])
    some = model.forward(prompt, 0, pages, 0, origin, last_rows=wanted)
    torch.testing.assert_close(some, everything[wanted], rtol=0, atol=0)


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "sdar", head_scale=1.0, gain=0.5, tied=True)
    model = PagedModel(path, page_size=4, block_size=BLOCK)
    assert model.model.weights.head is model.model.weights.embedding
    prompt = prompt_of(6)
    logits = model.model.logits(model.forward(prompt, 0, model.pages(6), 6, 0))
    expected = HfReference(path).run(prompt, visible(6, 0, BLOCK)).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
