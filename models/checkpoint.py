"""Tensors in a checkpoint's safetensors files, single or sharded; every tensor is accounted for.

`tensors.py` has their names and shapes. Headers are read without torch.
`weights.py` merges products for speed; nothing is ever unpickled.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from safetensors import SafetensorError, safe_open

from effuse.config.extras import pointer_problem
from effuse.models.config import ModelConfig
from effuse.models.config_keys import CheckpointError, ConfigKeys, read_json_object
from effuse.models.tensors import SafeSlice, Shape, TensorCut

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# names used by safetensors
_STORED_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_STORED_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
MOST_MAPPED: Final = 512 << 20
DTYPE_NAMES: Final = tuple(_STORED_NAMES.values())
"""Dtypes in which weights may be stored and computed."""

# Buffers that old releases store. Every family's code computes them from the configuration, and
# transformers drops them, so their values have no effect here either.
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


class _SafeFile(Protocol):
    """The used part of an open safetensors file; the library has no types for it."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> SafeSlice: ...
    def get_tensor(self, name: str) -> Tensor: ...


class TensorFile:
    """An open safetensors file. What was read of it counts as memory of this process until it is
    closed, so it is opened again after `MOST_MAPPED` bytes.
    """

    def __init__(self, path: Path, device: torch.device | None) -> None:
        """Raises CheckpointError. Without a device only headers are read, without torch."""
        self.path = path
        self._device = device
        self._file = _open(path, device)
        self._mapped = 0

    def names(self) -> list[str]:
        return self._file.keys()

    def shape(self, name: str) -> Shape:
        """Shape of a tensor without reading it."""
        return tuple(self._file.get_slice(name).get_shape())

    def stored_as(self, name: str) -> str:
        """Dtype of a tensor by safetensors' name."""
        return self._file.get_slice(name).get_dtype()

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor; 0 of an unsupported dtype."""
        return math.prod(self.shape(name)) * _STORED_BYTES.get(self.stored_as(name), 0)

    def take(self, name: str, cut: TensorCut | None) -> Tensor:
        """Reads one tensor, or a cut of it."""
        self._mapped += self.num_bytes(name)
        if self._mapped > MOST_MAPPED:
            self._file, self._mapped = _open(self.path, self._device), self.num_bytes(name)
        if cut is None:
            return self._file.get_tensor(name)
        import torch

        return torch.cat(cut.of(self._file.get_slice(name)), dim=cut.dim)


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """Open safetensors files; each of their tensors is known by name, and read when it is used."""

    locations: Mapping[str, TensorFile]

    def shape(self, name: str) -> Shape:
        """Shape of a tensor without reading it."""
        return self.locations[name].shape(name)

    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(file.num_bytes(name) for name, file in self.locations.items())

    def take(self, name: str, cut: TensorCut | None = None) -> Tensor:
        """Read one tensor, or a cut of it, on the device that the files were opened for, in its
        stored dtype."""
        self.check_dtype(name)
        return self.locations[name].take(name, cut)

    def check_dtype(self, name: str) -> None:
        """Raise CheckpointError if a tensor is stored in an unsupported dtype."""
        file = self.locations[name]
        stored = file.stored_as(name)
        if stored not in _STORED_NAMES:
            raise CheckpointError(
                f"{file.path}: tensor {name} has dtype {stored}; "
                f"expected one of {', '.join(_STORED_NAMES)}"
            )


def open_tensors(paths: list[Path], device: torch.device | None) -> TensorFiles:
    """Open files together, to be read on `device`, or only their headers without torch. A tensor in
    two of them is an error; buffers of rotary numbers are left out.
    """
    locations: dict[str, TensorFile] = {}
    for path in paths:
        file = TensorFile(path, device)
        for name in file.names():
            if _COMPUTED.search(name):
                continue
            if name in locations:
                raise CheckpointError(
                    f"tensor {name} is in both {locations[name].path.name} and {path.name}"
                )
            locations[name] = file
    return TensorFiles(locations)


def _open(path: Path, device: torch.device | None) -> _SafeFile:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        if device is None:
            opened = safe_open(path, framework="np")
        else:
            opened = safe_open(path, framework="pt", device=str(device))
    except SafetensorError as error:
        problem = pointer_problem(path) or f"not a safetensors file: {error}"
        raise CheckpointError(f"{path}: {problem}") from None
    except OSError as error:  # such as a name that is too long
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    return cast("_SafeFile", opened)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the single one, or the shards in its index."""
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    if not (directory / INDEX_FILE).exists():
        raise CheckpointError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    return [directory / name for name in sorted(set(weight_map(directory).values()))]


def stored_dtype(directory: Path) -> str:
    """The dtype of most of a checkpoint's elements: float32, bfloat16, float16, or another one by
    safetensors' name. Reads no tensor. Raises CheckpointError.
    """
    counts: Counter[str] = Counter()
    for name, file in open_tensors(weight_files(directory), None).locations.items():
        counts[file.stored_as(name)] += math.prod(file.shape(name))
    most = max(counts, key=lambda dtype: counts[dtype], default="F32")
    return _STORED_NAMES.get(most, most)


def dtype_name(name: str, directory: Path) -> str:
    """`name`, one of DTYPE_NAMES; for `auto` the dtype in the checkpoint's config.json, or
    otherwise that of most of its weights. Raises CheckpointError for any other name.
    """
    if name == "auto":
        keys = ConfigKeys.read(directory / "config.json")
        stated = [keys.values[key] for key in ("dtype", "torch_dtype") if keys.values.get(key)]
        name = str(stated[0]) if stated else stored_dtype(directory)
    if name not in DTYPE_NAMES:
        raise CheckpointError(
            f"dtype {name!r} is not supported; accepted: auto, {', '.join(DTYPE_NAMES)}"
        )
    return name


def weight_map(directory: Path) -> dict[str, str]:
    """The shard of each tensor, from a sharded checkpoint's index."""
    path = directory / INDEX_FILE
    entries = read_json_object(path).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise CheckpointError(f"{path}: weight_map: expected an object that names shards")
    for name, shard in entries.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{path}: {name}: {shard!r} is not the name of a file in its directory"
            )
    return entries


def _check_tensors(directory: Path, files: TensorFiles, expected: Mapping[str, Shape]) -> None:
    for name, shape in expected.items():
        if name not in files.locations:
            raise CheckpointError(f"{directory}: tensor {name} of shape {list(shape)} is missing")
        found = files.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{directory}: tensor {name} has shape {list(found)}, expected {list(shape)}"
            )
    for name in sorted(files.locations.keys() - expected.keys()):
        raise CheckpointError(
            f"{directory}: tensor {name} of shape {list(files.shape(name))} is not part of "
            "this architecture"
        )


def checked_tensors(
    directory: Path, config: ModelConfig, files: TensorFiles, expected: Mapping[str, Shape]
) -> TensorFiles:
    """The tensors of `expected`, all of which are there. Without a tied head, which some releases
    store as well: only its values show whether it equals the embedding.

    Raises CheckpointError that names a missing, extra or wrongly shaped tensor, a tied head in
    another dtype than the embedding, or a tensor that is not in its shard of the index.
    """
    _check_index(directory, files)
    names = config.family.layout
    head, embedding = f"{names.head}.weight", f"{names.embedding}.weight"
    if not config.tie_embeddings or head not in files.locations:
        _check_tensors(directory, files, expected)
        return files
    _check_tensors(directory, files, {**expected, head: expected[embedding]})
    found, wanted = (files.locations[name].stored_as(name) for name in (head, embedding))
    if found != wanted:
        raise CheckpointError(
            f"{directory}: tensor {head} has dtype {found}, expected {wanted} like {embedding}, "
            "because the configuration ties them"
        )
    return TensorFiles({name: at for name, at in files.locations.items() if name != head})


def _check_index(directory: Path, files: TensorFiles) -> None:
    if (directory / SINGLE_FILE).exists():
        return
    for name, shard in weight_map(directory).items():
        found = files.locations.get(name)
        if _COMPUTED.search(name):
            continue
        if found is None or found.path.name != shard:
            where = "no shard" if found is None else found.path.name
            raise CheckpointError(
                f"{directory / INDEX_FILE}: tensor {name}: expected in {shard}, found in {where}"
            )
