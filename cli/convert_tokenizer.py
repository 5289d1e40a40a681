"""`effuse convert-tokenizer`: writes `tokenizer.json` for a checkpoint that was released without.

The router reads that file alone and never imports `transformers`; this command does, once. Code
that a checkpoint brings is never run: a release with its own tokenizer class names a known one.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from effuse.cli.arguments import command, directory

_SAMPLE = "Tom has 3 boxes.\n\tHe adds 12, doesn't he? \u00e9\u4e2d\U0001f600"


class ConversionError(Exception):
    """The checkpoint's tokenizer cannot be written as tokenizer.json."""


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit status."""
    parser = command("convert-tokenizer", "Write tokenizer.json into a checkpoint directory.")
    parser.add_argument("checkpoint", type=directory, metavar="DIR", help="checkpoint directory")
    parser.add_argument(
        "--tokenizer-class", metavar="NAME", help="class to read it with, as in Qwen2Tokenizer"
    )
    found = parser.parse_args(argv)
    try:
        print(f"wrote {convert(found.checkpoint, found.tokenizer_class)}")
    except ConversionError as error:
        print(f"effuse convert-tokenizer: {error}", file=sys.stderr)
        return 1
    return 0


def convert(checkpoint: Path, class_name: str | None) -> Path:
    """Write the file; its path. Raises ConversionError; an existing file is never replaced."""
    import transformers  # a worker's dependency, and slow to import

    path = checkpoint / "tokenizer.json"
    if path.exists():
        raise ConversionError(f"{path} exists already")
    known = class_name or "AutoTokenizer"
    reader = getattr(transformers, known, None)
    if reader is None:
        raise ConversionError(f"expected a tokenizer class of transformers, got {known!r}")
    try:
        read = reader.from_pretrained(
            checkpoint, use_fast=True, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionError(
            f"{checkpoint} cannot be read with {known}: {error}; "
            "--tokenizer-class names another class"
        ) from error
    if not read.is_fast:
        raise ConversionError(f"{type(read).__name__} cannot be written as tokenizer.json")
    backend = read.backend_tokenizer
    if backend.decode(backend.encode(_SAMPLE, add_special_tokens=False).ids) != _SAMPLE:
        raise ConversionError(
            "a sample that was encoded and decoded is not the same text; the file would be wrong"
        )
    backend.save(str(path))
    return path
