"""When `make k8s-scale` and `make k8s-try` fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from attempt import AttemptError, Cluster, Overlay
from scaling import Phase, check


def _phases(*workers: int, moved_s: float = 40.0) -> list[Phase]:
    """A load that doubles and halves in turns, and the workers at the end of each phase."""
    return [
        Phase(1.0 + turn % 2, 0, number, moved_s, moved_s) for turn, number in enumerate(workers)
    ]


def test_workers_that_follow_pass() -> None:
    check(_phases(1, 2, 1, 3, 1, 2, 1), [])


@pytest.mark.parametrize(
    ("phases", "failed", "named"),
    [
        (_phases(1, 1, 1), [], "did not follow"),
        (_phases(1, 2, 2), [], "did not follow"),
        (_phases(2, 1, 2), [], "did not follow"),
        (_phases(1, 2, 1, moved_s=61.0), [], "after 61 s"),
        (_phases(1, 2, 1), ["UNAVAILABLE"], "1 requests failed, the first with UNAVAILABLE"),
    ],
)
def test_anything_else_does_not(phases: list[Phase], failed: list[str], named: str) -> None:
    with pytest.raises(AttemptError, match=named):
        check(phases, failed)


KINDS = """\
services     svc     v1        true   Service
deployments  deploy  apps/v1   true   Deployment
"""


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("LeaderWorkerSet", "gpu-hosts-1p1d needs a cluster with the kind LeaderWorkerSet"),
        ("ServiceMonitor", None),
        ("Deployment", None),
    ],
)
def test_a_kind_that_the_cluster_lacks_is_left_out_or_named(
    kind: str, named: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl, objects = tmp_path / "kubectl", f"kind: Service\n---\nspec: {{}}\nkind: {kind}\n"
    kubectl.write_text(
        f"#!/bin/sh\ncase $3 in kustomize) echo '{objects}';; *) echo '{KINDS}'; esac"
    )
    kubectl.chmod(0o755)
    overlay = Overlay(Cluster(str(kubectl), "space"), Path("gpu-hosts-1p1d"))
    if named:
        with pytest.raises(AttemptError, match=named):
            overlay.manifests()
    else:
        is_there = kind == "Deployment"
        assert (f"kind: {kind}" in overlay.manifests()) == is_there
        assert ("none: ServiceMonitor" in capsys.readouterr().out) != is_there
