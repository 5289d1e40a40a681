"""The Triton kernels in Triton's interpreter: the checks of the torch path, on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from operators import child, interpreted

NAMES = [(group, name) for group, checks in interpreted.GROUPS.items() for name, _ in checks()]


@pytest.fixture(scope="module")
def program() -> Iterator[child.Program]:
    """One process for all groups: to start one takes as long as many checks."""
    found = child.Program("operators.interpreted", "all", TRITON_INTERPRET="1")
    with contextlib.closing(found):
        yield found


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_kernel_equals_reference(group: str, name: str, program: child.Program) -> None:
    assert program.line(f"{group} {name}")["failure"] == ""
