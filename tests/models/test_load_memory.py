"""Host memory while a rank loads its share: little more than the share, though it maps all files.

For another size: PYTHONPATH=src:tests python -P -m models.test_load_memory DIRECTORY RANK RANKS
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from effuse.models import checkpoint
from effuse.models.config import ModelConfig
from effuse.models.group import RankPlace
from effuse.models.tensors import tensor_shapes, tensors_of
from effuse.models.weights import load_model

PUBLISHED = Path(__file__).parent / "published_configs.json"
MIB = 1 << 20
MAPPED, SLACK = 64 * MIB, 64 * MIB  # allowed to be mapped at a time; for heaps and libraries


@dataclass(frozen=True, slots=True)
class Loaded:
    """Bytes of one load."""

    held: int  # weights of the rank
    largest: int  # one tensor, whole
    peak: int  # of the process beyond its size before

    @property
    def limit(self) -> int:
        """What the load may take."""
        return self.held + self.largest + MAPPED + SLACK


def write_sparse(directory: Path, config: dict[str, object]) -> Path:
    """A checkpoint in bfloat16 whose weights are zeros that take no room on a disk."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    header, end = dict[str, object](), 0
    for name, shape in tensor_shapes(ModelConfig.from_dir(directory)).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    words = json.dumps(header).encode()
    with (directory / checkpoint.SINGLE_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(words)) + words)
        file.truncate(8 + len(words) + end)
    return directory


def load_here(directory: Path, rank: int, size: int) -> Loaded:
    """Loads a share in this process, which should be fresh."""
    place = RankPlace(rank, size)
    config = ModelConfig.from_dir(directory)
    tensors = tensors_of(config, place.shard(config))
    with contextlib.suppress(OSError):  # the peak so far is that of imports, which is small
        Path("/proc/self/clear_refs").write_text("5")  # resets it
    before = _status("VmRSS")
    model = load_model(directory, dtype=torch.bfloat16, place=place)
    assert model.config == config
    return Loaded(
        held=2 * sum(math.prod(one.held) for one in tensors.values()),
        largest=2 * max(math.prod(shape) for shape in tensor_shapes(config).values()),
        peak=_status("VmHWM") - before,
    )


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {name}")


def published(name: str, **changes: object) -> dict[str, object]:
    """A published config.json, changed."""
    for one in json.loads(PUBLISHED.read_text()):
        if one["name"] == name:
            return {**one["config"], **changes}
    raise AssertionError(f"no published config of {name}")


@pytest.mark.parametrize("most_mapped", [MAPPED, 1 << 40], ids=["bounded", "unbounded"])
def test_a_rank_needs_little_more_than_its_share(tmp_path: Path, most_mapped: int) -> None:
    """Without a bound the whole mapped file counts: so the limit can be missed."""
    small = published("SDAR-1.7B-Chat", num_hidden_layers=6, vocab_size=32768, hidden_size=1024)
    path = write_sparse(tmp_path / "model", small | {"mask_token_id": 9, "eos_token_id": 8})
    command = [sys.executable, "-P", "-m", "models.test_load_memory", str(path), "1", "2"]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [*command, str(most_mapped)], env=environment, stdout=subprocess.PIPE, check=True
    )
    loaded = Loaded(**json.loads(done.stdout))
    assert loaded.held > 3 * MAPPED // 2
    assert (loaded.peak <= loaded.limit) == (most_mapped == MAPPED), loaded


def main() -> None:
    """Loads a share and prints what it took."""
    directory, rank, size, *most_mapped = sys.argv[1:]
    if most_mapped:
        checkpoint.MOST_MAPPED = int(most_mapped[0])  # type: ignore[misc]
    loaded = load_here(Path(directory), int(rank), int(size))
    print(json.dumps({name: getattr(loaded, name) for name in Loaded.__slots__}))


if __name__ == "__main__":
    main()
