"""The Triton kernels in Triton's interpreter: the checks of the torch path, on the CPU."""

from __future__ import annotations

import pytest
from operators import child, interpreted

NAMES = [(group, name) for group, checks in interpreted.GROUPS.items() for name, _ in checks()]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[object, object]]:
    """By group, filled as the first test of a group runs it."""
    return {}


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_kernel_equals_reference(
    group: str, name: str, outcomes: dict[str, dict[object, object]]
) -> None:
    if group not in outcomes:
        lines = child.json_lines("operators.interpreted", group, TRITON_INTERPRET="1")
        outcomes[group] = {line["name"]: line["failure"] for line in lines}
    failure = outcomes[group][name]
    assert not failure, failure
