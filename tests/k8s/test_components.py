"""A component changes every process of the fleet that takes it, or there is no such fleet."""

from __future__ import annotations

import pytest
from k8s.composed import deployments


@pytest.mark.parametrize("component", ["monitoring", "redis-password", "tls"])
def test_workers_in_one_pod_are_not_left_out_of_what_the_router_gets(component: str) -> None:
    with pytest.raises(AssertionError, match="changes workers in pods of their own"):
        deployments("gpu-nvlink-1p1d", component)
