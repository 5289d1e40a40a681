"""The oracle's forward against transformers, and the oracle's allowed imports."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, MASK_TOKEN_ID, Architecture, write_tiny_checkpoint
from hf_reference import HfReference

from oracle.decode import decode, decode_with
from oracle.forward import RawModel, load_raw, logits, visible
from oracle.settings import Occurrences, Settings

TESTS = Path(__file__).parents[1]


def test_visible_blocks_by_hand() -> None:
    """Prompt of two, blocks of two: the prompt is bidirectional, blocks see backwards."""
    rows = ["110000", "110000", "111100", "111100", "111111", "111111"]
    expected = torch.tensor([[cell == "1" for cell in row] for row in rows])
    assert torch.equal(visible(6, 2, 2), expected)
    assert visible(5, 0, 4).sum().item() == 4 * 4 + 5
    assert visible(5, 9, 1).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_transformers(tmp_path: Path, architecture: Architecture) -> None:
    path = write_tiny_checkpoint(tmp_path, architecture, seed=2, head_scale=1.0, gain=0.5)
    model = load_raw(path)
    tokens = [*range(40, 53), *[MASK_TOKEN_ID] * 8]
    mask = visible(len(tokens), model.block_origin(13), 4)
    expected = HfReference(path).run(tokens, mask).logits
    torch.testing.assert_close(logits(model, tokens, mask), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_shards_and_tied_heads(tmp_path: Path, tied: bool) -> None:
    one = load_raw(write_tiny_checkpoint(tmp_path / "one", "sdar", tied=tied))
    two = load_raw(write_tiny_checkpoint(tmp_path / "two", "sdar", tied=tied, shards=2))
    assert (one.head is one.embedding) == tied
    tokens = [5, 6, 7, 8, 9]
    assert torch.equal(logits(one, tokens, visible(5, 0, 4)), logits(two, tokens, visible(5, 0, 4)))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    lengths = (1, 3, 6, 8, 13, 17, 22)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_checkpoints_make_every_case_occur(tmp_path: Path, architecture: Architecture) -> None:
    """Each prompt once to its end, once stopped at the token that came tenth."""
    model, total = load_raw(write_tiny_checkpoint(tmp_path, architecture)), Occurrences()
    settings = Settings(max_tokens=30, block_size=8, stop_token_ids=())
    for prompt in prompts():
        whole = decode_with(model, prompt, settings)
        assert MASK_TOKEN_ID not in whole.token_ids and len(whole.token_ids) == 30
        stop = whole.token_ids[9]
        stopped = decode_with(model, prompt, replace(settings, stop_token_ids=(stop,)))
        assert stopped.finish == "stop" and stop not in stopped.token_ids
        total.add(whole.occurred)
        total.add(stopped.occurred)
    assert total.semi_active_writes and total.steps_settling_several and total.fallback_writes
    assert total.blocks_waiting and total.cut_last_blocks
    assert total.stops_before_later_blocks
    if architecture == "sdar":
        assert total.ragged_tails and total.prompts_shorter_than_block


def test_dream_reads_the_row_before(tmp_path: Path) -> None:
    """The first candidate is transformers' result at the prompt's last position."""
    path = write_tiny_checkpoint(tmp_path, "dream")
    prompt = prompts()[4]
    result = decode(path, prompt, Settings(max_tokens=4, block_size=4))
    tokens = prompt + [MASK_TOKEN_ID] * 4
    rows = HfReference(path).run(tokens, visible(17, 13, 4)).logits
    rows[:, MASK_TOKEN_ID] = float("-inf")
    found = [result.steps[0].candidates[p].token for p in range(13, 17)]
    assert found == rows[12:16].argmax(dim=-1).tolist()
    assert found != rows[13:17].argmax(dim=-1).tolist()


def test_an_answer_does_not_change_with_what_comes_later(tmp_path: Path) -> None:
    """One block at a time, a longer limit only adds text."""
    model = load_raw(write_tiny_checkpoint(tmp_path, "sdar"))
    knobs = {"algorithm": "block_diffusion", "stop_token_ids": ()}

    def text(max_tokens: int) -> tuple[int, ...]:
        settings = Settings(max_tokens=max_tokens, **knobs)  # type: ignore[arg-type]
        return decode_with(model, prompts()[2], settings).token_ids

    assert text(24)[:10] == text(10)


def test_vanilla_sees_the_whole_canvas(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, "llada")
    prompt = prompts()[3]
    settings = Settings(algorithm="vanilla", max_tokens=6, tokens_per_step=4, stop_token_ids=())
    result = decode(path, prompt, settings)
    tokens = prompt + [MASK_TOKEN_ID] * 6
    rows = HfReference(path).run(tokens, torch.ones(14, 14, dtype=torch.bool)).logits
    rows[:, MASK_TOKEN_ID] = float("-inf")
    best = rows[8:].softmax(dim=-1).max(dim=-1)
    chosen = best.values.topk(4).indices
    expected = {8 + i: int(best.indices[i]) for i in chosen.tolist()}
    assert result.steps[0].writes == expected
    assert (result.forwards, len(result.token_ids)) == (2, 6)


def test_prompts_that_are_no_prompts(tmp_path: Path) -> None:
    model: RawModel = load_raw(write_tiny_checkpoint(tmp_path, "sdar"))
    for prompt in ([], [3, MASK_TOKEN_ID]):
        with pytest.raises(ValueError, match="at least one token and never the mask"):
            decode_with(model, prompt, Settings())


def imported_roots(file: Path) -> set[str]:
    roots: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").split(".")[0] if node.level == 0 else "relative")
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            roots.add("dynamic")
    return roots


def test_the_oracle_shares_no_code_with_the_engine() -> None:
    files = [f for f in (TESTS / "oracle").glob("*.py") if not f.name.startswith("test_")]
    assert len(files) >= 5
    allowed = {"__future__", "collections", "dataclasses", "enum", "json", "math", "pathlib"}
    allowed |= {"typing", "numpy", "torch", "safetensors", "oracle"}
    for file in files:
        assert imported_roots(file) <= allowed, file.name
    assert "effuse" not in imported_roots(TESTS / "checkpoints.py")
