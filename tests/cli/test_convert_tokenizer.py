"""A checkpoint with vocabulary files only gets a tokenizer.json that the router reads alike."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from effuse.cli.convert_tokenizer import ConversionError, convert, main
from effuse.router.tokenizer import Tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A byte-level vocabulary with one merge, as Qwen2 releases have it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate([*letters, "he", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    return tmp_path


def test_the_router_reads_what_was_written(checkpoint: Path) -> None:
    path = convert(checkpoint, None)
    vocabulary = json.loads((checkpoint / "vocab.json").read_text())
    tokenizer = Tokenizer.load(path.parent)
    ids = asyncio.run(tokenizer.encode("he h"))
    assert ids == [vocabulary["he"], vocabulary["\u0120"], vocabulary["h"]]
    assert tokenizer.decode(ids) == "he h"
    tokenizer.close()


def test_a_class_can_be_named(checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.X", None]}}
        )
    )
    assert convert(checkpoint, "Qwen2Tokenizer").is_file()


def test_an_existing_file_is_left_alone(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "tokenizer.json").write_text("{}")
    assert main([str(checkpoint)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert (checkpoint / "tokenizer.json").read_text() == "{}"


def test_code_of_a_checkpoint_is_never_run(checkpoint: Path) -> None:
    (checkpoint / "own.py").write_text("raise SystemExit('ran')")
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "own"}))
    (checkpoint / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["own.X", None]}})
    )
    with pytest.raises(ConversionError, match="--tokenizer-class names another class"):
        convert(checkpoint, None)


def test_an_unknown_class_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConversionError, match="got 'NoSuchTokenizer'"):
        convert(checkpoint, "NoSuchTokenizer")
