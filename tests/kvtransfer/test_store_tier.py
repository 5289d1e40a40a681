"""Errors of a store: which of its units stay, and whether it is used again."""

from __future__ import annotations

import errno
import random
from concurrent.futures import Future
from pathlib import Path

import pytest
from kvtransfer.tier_scene import Scene, open_on_full_disk

from effuse.kvtransfer import unit_files
from effuse.kvtransfer.store_tier import Read, StoreTier
from effuse.kvtransfer.stores import UnitFacts
from effuse.kvtransfer.unit_files import UnitFiles

KEY = b"k" * 32


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


@pytest.fixture
def files(tmp_path: Path) -> UnitFiles:
    found = UnitFiles(tmp_path, 1000)
    size = found.keep(KEY, b"", lambda: UnitFacts(b"d" * 16), [memoryview(bytearray(8))]).result(10)
    found.kept(KEY, b"", size)
    return found


def end_read(files: UnitFiles, error: OSError | ValueError) -> StoreTier:
    """A read that ends with this error."""
    tier = StoreTier(files, lambda: 0.0)
    read = Read(KEY, tier, (0,), Future(), 0.0)
    read.result.set_exception(error)
    assert tier.end_read(read, 8) is None
    files._writer.submit(int).result(10)
    return tier


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "EIO", "ESTALE", "ENOMEM"])
def test_a_passing_error_of_a_read_leaves_its_unit(
    files: UnitFiles, tmp_path: Path, name: str
) -> None:
    tier = end_read(files, OSError(getattr(errno, name), name))
    assert list(tmp_path.iterdir()) and (KEY in files) == (name != "EIO")
    assert not tier.is_usable and tier.counts.failures == 1


@pytest.mark.parametrize(
    ("error", "failures"),
    [(FileNotFoundError("gone"), 0), (PermissionError(errno.EACCES, "another user's"), 1)],
)
def test_a_unit_that_cannot_be_opened_is_not_known_and_not_removed(
    files: UnitFiles, tmp_path: Path, error: OSError, failures: int
) -> None:
    tier = end_read(files, error)
    assert list(tmp_path.iterdir()) and KEY not in files
    assert tier.is_usable and tier.counts.failures == failures


def test_a_cut_unit_is_removed(files: UnitFiles, tmp_path: Path) -> None:
    tier = end_read(files, ValueError("the file is shorter"))
    assert not list(tmp_path.iterdir()) and KEY not in files
    assert tier.is_usable and tier.counts.corrupt == 1
