"""Prompt lengths of a data set, in tokens, without the model's tokenizer.

A `.jsonl` file has a text in the field `prompt` of each line; it counts as one token for each 3.6
characters, rounded up, as in large English vocabularies. A `.json` file is a list of lengths in
tokens.
"""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path

CHARACTERS_PER_TOKEN = 3.6
RULE = f"characters / {CHARACTERS_PER_TOKEN}, rounded up"


def read_lengths(path: Path) -> list[int]:
    """Lengths in the file's order. Raises ValueError for a file without lengths."""
    if path.suffix == ".jsonl":
        texts = [json.loads(line)["prompt"] for line in path.read_text().splitlines() if line]
        lengths = [max(1, ceil(len(text) / CHARACTERS_PER_TOKEN)) for text in texts]
    else:
        lengths = json.loads(path.read_text())
    if not lengths or not all(isinstance(length, int) and length > 0 for length in lengths):
        raise ValueError(f"{path}: expected prompt lengths above 0, or lines with a prompt")
    return lengths
