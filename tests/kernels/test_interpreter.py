"""The Triton kernels in Triton's interpreter: the checks of the torch path, on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from operators import child, interpreted

NAMES = [(group, name) for group, checks in interpreted.GROUPS.items() for name, _ in checks()]


@pytest.fixture(scope="module")
def programs() -> Iterator[child.Programs]:
    found = child.Programs("operators.interpreted", TRITON_INTERPRET="1")
    with contextlib.closing(found):
        yield found


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_kernel_equals_reference(group: str, name: str, programs: child.Programs) -> None:
    assert programs[group].line(name)["failure"] == ""
