"""Errors of a store: which of its units stay, and whether it is used again."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from kvtransfer.tier_scene import Scene, open_on_full_disk

from effuse.kvtransfer import unit_files


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_new_units_replace_the_oldest_on_a_disk_smaller_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def open_if_there_is_room(path: str, flags: int) -> int:
        if sum(one.suffix != ".partial" for one in tmp_path.iterdir()) < num_files:
            return original(path, flags)
        if number == errno.ENOSPC:
            return open_on_full_disk(path, flags)
        raise OSError(number, "Disk quota exceeded")

    num_files, original = 8, unit_files._private
    monkeypatch.setattr(unit_files, "_private", open_if_there_is_room)
    scene = Scene(random.Random(1), directory=tmp_path, num_slots=6, most_polls=0)
    texts = [random.Random(seed).choices(range(9), k=8) for seed in range(3 * num_files)]
    for text in texts:
        scene.run(text)
    assert scene.files is not None
    scene.files._writer.submit(int).result(10)
    found = {path.name.split(".")[0] for path in tmp_path.iterdir()}
    keys = [[key.hex() for key in scene.cache.begin("", text, 8).keys] for text in texts]
    assert len(found) == num_files == len(scene.files)
    assert found <= {key for one in keys[-num_files:] for key in one}
