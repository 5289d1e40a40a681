"""A checkpoint that only has vocabulary files gets a tokenizer.json with the same results."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from effuse.cli.__main__ import main
from effuse.cli.convert_tokenizer import convert
from effuse.config.flags import CommandError
from effuse.router.tokenizer import Tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A byte-level vocabulary with one merge, as in Qwen2's releases."""
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


def test_a_class_of_a_release_that_is_anothers_copy_need_not_be_named(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "own.py").write_text("raise SystemExit('ran')")
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "Dream"}))
    (checkpoint / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "DreamTokenizer",
                "auto_map": {"AutoTokenizer": ["own.DreamTokenizer", None]},
            }
        )
    )
    assert main(["convert-tokenizer", str(checkpoint)]) == 0
    assert capsys.readouterr().err == ""


def test_an_existing_file_is_left_alone(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "tokenizer.json").write_text("{}")
    assert main(["convert-tokenizer", str(checkpoint)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert (checkpoint / "tokenizer.json").read_text() == "{}"


def test_code_of_a_checkpoint_is_never_run(checkpoint: Path) -> None:
    (checkpoint / "own.py").write_text("raise SystemExit('ran')")
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "own"}))
    (checkpoint / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["own.X", None]}})
    )
    told = (
        "its class 'X' is code from the checkpoint, which effuse never runs; --tokenizer-class "
        "names a"
    )
    with pytest.raises(CommandError, match=told):
        convert(checkpoint, None)


def test_an_unknown_class_is_refused(checkpoint: Path) -> None:
    with pytest.raises(CommandError, match="got 'NoSuchTokenizer'"):
        convert(checkpoint, "NoSuchTokenizer")


@pytest.mark.parametrize("name", ["logging", "__doc__", "PretrainedConfig"])
def test_what_is_no_tokenizer_class_is_refused(checkpoint: Path, name: str) -> None:
    with pytest.raises(CommandError, match="expected a tokenizer class of transformers"):
        convert(checkpoint, name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vocab.json", b"{"),
        ("vocab.json", b"[1, 2]"),
        ("vocab.json", b'{"a": "b"}'),
        ("vocab.json", b"\xff\xfe"),
        ("merges.txt", b"\xff"),
        ("merges.txt", b"one\ntwo three four five\n"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"tokenizer_class": 7}'),
        (
            "tokenizer_config.json",
            b'{"tokenizer_class": "Qwen2Tokenizer", "extra": {"a": []}, '
            b'"added_tokens_decoder": {"x": 1}}',
        ),
        ("config.json", b"nothing"),
    ],
)
def test_broken_files_end_in_one_line(
    name: str, content: bytes, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the library makes of them: an error of ours, and no file, or a file that is read."""
    (checkpoint / name).write_bytes(content)
    status = main(["convert-tokenizer", str(checkpoint)])
    told = capsys.readouterr().err
    if status == 0:
        Tokenizer.load(checkpoint).close()
        return
    assert status == 1
    assert (
        told.splitlines()[-1].startswith("effuse convert-tokenizer: ") and "Traceback" not in told
    )
    assert not [path for path in checkpoint.iterdir() if "tokenizer.json" in path.name]


def test_a_directory_that_takes_no_file(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("effuse.cli.convert_tokenizer.tempfile.TemporaryDirectory", full)
    assert main(["convert-tokenizer", str(checkpoint)]) == 1
    assert "No space left on device" in capsys.readouterr().err
