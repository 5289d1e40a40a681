"""Files of units: whole, private, bounded, and refused if they are damaged."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from io import BufferedReader
from pathlib import Path

import pytest
from kvtransfer.tier_scene import open_on_full_disk

from effuse.kvtransfer import unit_files
from effuse.kvtransfer.stores import UnitFacts
from effuse.kvtransfer.unit_files import UnitFiles

KEYS = [bytes([number]) * 32 for number in range(4)]
FACTS = UnitFacts(b"d" * 16, b"row")


def write(files: UnitFiles, key: bytes, before: bytes = b"", data: bytes = b"x" * 100) -> None:
    views = [memoryview(bytearray(data[:60])), memoryview(bytearray(data[60:]))]
    size = files.keep(key, before, lambda: FACTS, views).result(10)
    files.kept(key, before, size)


def read(files: UnitFiles, key: bytes, size: int = 100) -> tuple[UnitFacts, bytes]:
    data = bytearray(size)
    facts = files.load(key, [memoryview(data)[:30], memoryview(data)[30:]]).result(10)
    return facts, bytes(data)


def settle(files: UnitFiles) -> None:
    """Waits until everything before is written and removed."""
    files._writer.submit(int).result(10)


def test_a_unit_comes_back_with_its_facts(tmp_path: Path) -> None:
    files = UnitFiles(tmp_path / "a" / "b", 1000)
    write(files, KEYS[0])
    write(files, KEYS[1], KEYS[0], b"y" * 100)
    assert read(files, KEYS[1]) == (FACTS, b"y" * 100)
    assert files.before(KEYS[1]) == KEYS[0] == dict(files.befores())[KEYS[1]]
    assert files.num_bytes == sum(path.stat().st_size for path in files._directory.iterdir())


def test_only_this_user_reads_them(tmp_path: Path) -> None:
    files = UnitFiles(tmp_path / "kv", 1000)
    write(files, KEYS[0])
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    (path,) = (tmp_path / "kv").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_least_recently_used_ones_make_room(tmp_path: Path) -> None:
    files = UnitFiles(tmp_path, 400)
    write(files, KEYS[0])
    write(files, KEYS[1])
    files.touch(KEYS[0])
    write(files, KEYS[2])
    assert [key in files for key in KEYS] == [True, False, True, False]
    settle(files)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_later_process_finds_them_in_the_order_of_their_use(tmp_path: Path) -> None:
    files = UnitFiles(tmp_path, 1000)
    for key in KEYS[:3]:
        write(files, key)
    for number, path in enumerate(sorted(tmp_path.iterdir())):
        os.utime(path, (number, number))
    read(files, KEYS[0])
    (tmp_path / "note.txt").write_text("not ours")
    (tmp_path / "0a.0b.12.partial").write_text("")
    os.utime(tmp_path / "0a.0b.12.partial", (time.time() - 7200,) * 2)
    (tmp_path / "0c.0d.12.partial").write_text("another process writes it now")
    later = UnitFiles(tmp_path, 400)
    assert [key in later for key in KEYS] == [True, False, True, False]
    settle(later)
    left = sorted(path.name for path in tmp_path.iterdir() if len(path.name) < 60)
    assert left == ["0c.0d.12.partial", "note.txt"]
    assert read(UnitFiles(tmp_path, 400), KEYS[2])[0] == FACTS


def test_what_others_put_there_is_no_unit_and_stays(tmp_path: Path) -> None:
    unit = f"{KEYS[0].hex()}.{KEYS[1].hex()}"
    for name in ("aa.bb", "aa.", unit.replace("01", "AB"), unit + "ff", unit.replace("00", " 0")):
        (tmp_path / name).write_bytes(b"x" * 100)
    (tmp_path / unit).mkdir()
    os.mkfifo(tmp_path / f"{KEYS[2].hex()}.")
    (tmp_path / f"{KEYS[3].hex()}.").symlink_to(tmp_path / "aa.bb")
    before = sorted(tmp_path.iterdir())
    files = UnitFiles(tmp_path, 1)
    settle(files)
    assert len(files) == files.num_bytes == 0
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("at", [0, 8, 24, 40, 48, 57])
def test_a_damaged_head_is_refused(tmp_path: Path, at: int) -> None:
    """Of magic, seal, digest, both sizes and the boundary row."""
    files = UnitFiles(tmp_path, 1000)
    write(files, KEYS[0])
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError):
        read(files, KEYS[0])


def test_cut_swapped_and_missing_files_are_refused(tmp_path: Path) -> None:
    files = UnitFiles(tmp_path, 1000)
    for key in KEYS[:3]:
        write(files, key)
    paths = sorted(tmp_path.iterdir())
    whole = paths[0].read_bytes()
    for size in (0, 20, 56, len(whole) - 1):
        paths[0].write_bytes(whole[:size])
        with pytest.raises(ValueError, match="shorter"):
            read(files, KEYS[0])
    paths[1].write_bytes(whole)
    with pytest.raises(ValueError, match="digest is wrong"):
        read(files, KEYS[1])
    with pytest.raises(ValueError, match="expected 99 bytes of KV, got 100"):
        read(files, KEYS[2], 99)
    paths[2].unlink()
    with pytest.raises(FileNotFoundError):
        read(files, KEYS[2])


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = UnitFiles(tmp_path, 1000)
    monkeypatch.setattr(unit_files, "_private", open_on_full_disk)
    with pytest.raises(OSError, match="No space left"):
        write(files, KEYS[0])
    assert KEYS[0] not in files and not list(tmp_path.iterdir())


def test_two_writes_of_one_unit_at_the_same_time_do_not_mix(tmp_path: Path) -> None:
    files = UnitFiles(tmp_path, 10 << 20)
    views = [[memoryview(bytearray([number]) * (1 << 20))] for number in range(2)]
    for _ in range(20):
        both = [files.keep(KEYS[0], b"", lambda: FACTS, one) for one in views]
        sizes = [one.result(10) for one in both]
        files.kept(KEYS[0], b"", sizes[1])
        assert len(set(read(files, KEYS[0], 1 << 20)[1])) == 1
        files.forget(KEYS[0])
    settle(files)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        UnitFiles(tmp_path / "file" / "kv", 1000)


def test_a_file_that_is_removed_while_it_is_read_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = UnitFiles(tmp_path, 1000)
    write(files, KEYS[0])
    (path,) = tmp_path.iterdir()

    def remove(file: BufferedReader, view: memoryview) -> None:
        path.unlink(missing_ok=True)
        original(file, view)

    original = unit_files._fill
    monkeypatch.setattr(unit_files, "_fill", remove)
    assert read(files, KEYS[0]) == (FACTS, b"x" * 100)
    assert not list(tmp_path.iterdir())


def test_files_of_a_disk_that_can_only_be_read_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    files = UnitFiles(tmp_path, 1000)
    write(files, KEYS[0])
    for name in ("utime", "open"):
        monkeypatch.setattr(os, name, refuse)
    assert read(files, KEYS[0]) == (FACTS, b"x" * 100)


def test_two_processes_write_the_same_unit_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers often have equal process ids. Nor is a file counted twice."""
    first, second = UnitFiles(tmp_path, 1000), UnitFiles(tmp_path, 1000)

    def write_second(path: str, flags: int) -> int:
        monkeypatch.setattr(unit_files, "_private", original)
        opened = original(path, flags)
        write(second, KEYS[0])
        return opened

    original = unit_files._private
    monkeypatch.setattr(unit_files, "_private", write_second)
    write(first, KEYS[0])
    write(first, KEYS[0])
    assert read(first, KEYS[0]) == (FACTS, b"x" * 100)
    assert first.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_a_process_ends_although_a_disk_does_not_answer(tmp_path: Path) -> None:
    """A pipe that nobody writes blocks whoever opens it."""
    os.mkfifo(tmp_path / f"{KEYS[1].hex()}.")
    code = f"""
import time
from pathlib import Path
from effuse.kvtransfer.unit_files import UnitFiles
files = UnitFiles(Path({str(tmp_path)!r}), 1000)
files.kept({KEYS[1]!r}, b"", 8)
reads = [files.load({KEYS[1]!r}, [memoryview(bytearray(8))]) for _ in range(3)]
while not (reads[0].running() and reads[1].running()):
    time.sleep(0.01)
files.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
