"""The Triton kernels in Triton's interpreter: the checks of the torch path, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future

import pytest
from operators import child, interpreted

NAMES = [(group, name) for group, checks in interpreted.GROUPS.items() for name, _ in checks()]
Outcomes = Mapping[str, Future[child.Lines]]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Outcomes]:
    """By group, of those that are asked for."""
    groups = {
        str(item.callspec.params["group"]): None
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    }
    with child.running("operators.interpreted", groups, TRITON_INTERPRET="1") as found:
        yield found


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_kernel_equals_reference(group: str, name: str, outcomes: Outcomes) -> None:
    failures = [line["failure"] for line in outcomes[group].result() if line["name"] == name]
    assert failures == [""], failures
