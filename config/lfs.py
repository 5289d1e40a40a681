"""Files that Git LFS did not fetch: a clone without git-lfs has pointers of three lines instead."""

from pathlib import Path

_BEGINNING = b"version https://git-lfs.github.com/spec/"


def pointer_problem(path: Path) -> str | None:
    """The problem and its remedy if `path` is such a pointer, otherwise None."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return None
    if not is_pointer:
        return None
    return f"a Git LFS pointer instead of the file; run `git lfs pull` in {path.parent}"
