"""One digest over everything that decides what a model computes: configuration, weights, adapter.

Read from the files' bytes, so that two workers that loaded different files never agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import xxhash

from effuse.models.config_keys import CheckpointError

_CHUNK_BYTES = 1 << 22


def weights_digest(path: Path | str, adapter: Path | str | None = None) -> str:
    """xxh3-128 in hex over names and bytes of config.json and all safetensors files, and the same
    of the adapter directory. Reads every byte once: seconds for 16 GB in the page cache."""
    digest = xxhash.xxh3_128()
    for directory, config in _directories(path, adapter):
        if not (directory / config).is_file():
            raise CheckpointError(f"{directory / config}: no such file")
        for file in (directory / config, *sorted(directory.glob("*.safetensors"))):
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            for chunk in _chunks(file):
                digest.update(chunk)
    return str(digest.hexdigest())


def _directories(path: Path | str, adapter: Path | str | None) -> Iterator[tuple[Path, str]]:
    yield Path(path), "config.json"
    if adapter is not None:
        yield Path(adapter), "adapter_config.json"


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk
