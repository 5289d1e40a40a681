"""In which order a rolling update replaces pods, and how soon one that hangs is replaced."""

from __future__ import annotations

import pytest
from k8s.composed import deployments, overlays

pytestmark = pytest.mark.chart


@pytest.mark.parametrize("name", [one for one in overlays() if "gpu" not in one])
def test_the_next_one_is_ready_before_the_only_one_that_can_answer_goes(name: str) -> None:
    found = deployments(name)
    for role in {"router", "decode", "worker"} & set(found):
        strategy = found[role]["spec"]["strategy"]["rollingUpdate"]
        assert strategy == {"maxUnavailable": 0, "maxSurge": 1}


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("gpu-1p1d", ["prefill", "decode"]),
        ("gpu-tp2-1p1d", ["prefill", "decode"]),
        ("gpu-nvlink-1p1d", ["workers"]),
        ("gpu-tp2-pool", ["worker"]),
    ],
)
def test_an_update_waits_for_no_gpu_that_is_not_there(name: str, workers: list[str]) -> None:
    for worker in workers:
        strategy = deployments(name)[worker]["spec"]["strategy"]["rollingUpdate"]
        assert strategy == {"maxUnavailable": 1, "maxSurge": 0}


@pytest.mark.parametrize("name", overlays())
def test_a_front_that_answers_nobody_is_not_waited_for_as_for_one_that_drains(name: str) -> None:
    """It does not receive SIGTERM: the pod's whole grace period would pass before it is killed."""
    for deployment in deployments(name).values():
        pod = deployment["spec"]["template"]["spec"]
        for container in pod["containers"]:
            probe = container["livenessProbe"]
            waited_s = probe.get(
                "terminationGracePeriodSeconds", pod["terminationGracePeriodSeconds"]
            )
            assert waited_s <= 10, container["name"]
