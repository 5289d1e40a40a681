"""`effuse convert-tokenizer`: writes `tokenizer.json` for a checkpoint that was released without
it.

The router only reads that file and never imports `transformers`; this command does, once. It never
runs code from a checkpoint: a release with its own tokenizer class must name a known one.
"""

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from effuse.cli.arguments import command, directory
from effuse.config.flags import CommandError

_SAMPLE = "Tom has 3 boxes.\n\tHe adds 12, doesn't he? \u00e9\u4e2d\U0001f600"


_SAME: Final = {"DreamTokenizer": "Qwen2Tokenizer"}
"""Classes in checkpoints' code, with transformers' classes that read the same files."""


def main(argv: Sequence[str]) -> int:
    found = make_parser().parse_args(argv)
    print(f"wrote {convert(found.checkpoint, found.tokenizer_class)}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = command("convert-tokenizer", "Write tokenizer.json into a checkpoint directory.")
    parser.add_argument("checkpoint", type=directory, metavar="DIR", help="checkpoint directory")
    parser.add_argument(
        "--tokenizer-class",
        metavar="NAME",
        help="class that reads it, such as Qwen2Tokenizer (default: the one that the checkpoint "
        "names)",
    )
    return parser


def convert(checkpoint: Path, class_name: str | None) -> Path:
    """Write the file; returns its path. Raises CommandError; never replaces an existing file."""
    path = checkpoint / "tokenizer.json"
    if path.exists():
        raise CommandError(f"{path} exists already")
    stated = _stated_class(checkpoint)
    backend = _read(_find_reader(class_name or _SAME.get(stated, "AutoTokenizer")), checkpoint)
    try:
        _write(backend, path)
    except Exception as error:
        raise CommandError(f"{path} cannot be written: {error}") from error
    return path


def _stated_class(checkpoint: Path) -> str:
    """The class that the checkpoint names; empty if it names none that can be read."""
    try:
        stated = json.loads((checkpoint / "tokenizer_config.json").read_text())["tokenizer_class"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return stated if isinstance(stated, str) else ""


def _find_reader(name: str) -> Any:
    try:
        import transformers  # a worker's dependency, and slow to import
    except ImportError as error:
        raise CommandError(
            f"transformers is needed; it is installed with the extra `worker`: {error}"
        ) from error
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns about unknown models
    reader = getattr(transformers, name, None)
    tokenizers = (transformers.PreTrainedTokenizerBase, transformers.AutoTokenizer)
    if not (isinstance(reader, type) and issubclass(reader, tokenizers)):
        raise CommandError(f"expected a tokenizer class of transformers, got {name!r}")
    return reader


def _read(reader: Any, checkpoint: Path) -> Any:
    """The tokenizer that transformers reads from the checkpoint's files, which may be broken."""
    try:
        with warnings.catch_warnings(action="ignore"):
            read = reader.from_pretrained(
                checkpoint, use_fast=True, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if "trust_remote_code" in why:
            stated = _stated_class(checkpoint)
            why = f"its class {stated!r} is code from the checkpoint, which effuse never runs"
        raise CommandError(
            f"{reader.__name__} cannot read {checkpoint}: {why}; --tokenizer-class names a class "
            "of transformers that reads such files, such as Qwen2Tokenizer"
        ) from error
    if not getattr(read, "is_fast", False):
        raise CommandError(f"transformers cannot write {type(read).__name__} as tokenizer.json")
    return read.backend_tokenizer


def _write(backend: Any, path: Path) -> None:
    """Writes the complete file or nothing. Raises the exceptions of tokenizers."""
    if backend.decode(backend.encode(_SAMPLE, add_special_tokens=False).ids) != _SAMPLE:
        raise ValueError("a sample text changes when it is encoded and decoded")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tokenizer-") as beside:
        written = Path(beside) / path.name
        backend.save(str(written))
        written.rename(path)
