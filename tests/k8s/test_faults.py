"""What `make k8s-faults` counts, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attempt import AttemptError, Cluster
from faults import Fault, Line, check, meet, pods

GOOD = Line("effuse-router:50051", 0.5, None, None)
FAILED = Line("effuse-router:50051", 9.0, None, "PeerLost: no router answers")


def _pod(name: str, **metadata: str) -> dict[str, object]:
    return {"metadata": {"name": name, "uid": f"uid-{name}", **metadata}}


def _kubectl(folder: Path, *listings: list[dict[str, object]]) -> Cluster:
    """A kubectl that lists these pods, one list after the other, and then always the last."""
    for number, listed in enumerate(listings):
        (folder / f"pods.{number}").write_text(json.dumps({"items": listed}))
    kubectl = folder / "kubectl"
    kubectl.write_text(
        f"""#!/bin/sh
cd {folder}
case "$*" in
  *"get pods"*)
    ls pods.* | head -n 1 | xargs cat
    [ $(ls pods.* | wc -l) = 1 ] || rm "$(ls pods.* | head -n 1)" ;;
  *"get deployments"*) echo deployment.apps/effuse-decode ;;
  *) echo "$*" >>done ;;
esac
"""
    )
    kubectl.chmod(0o755)
    return Cluster(str(kubectl), "space")


def test_a_pod_that_is_ending_is_gone(tmp_path: Path) -> None:
    ending = _pod("old", deletionTimestamp="2026-11-29T12:00:00Z")
    assert pods(_kubectl(tmp_path, [ending, _pod("new")]), "decode") == {"uid-new": "new"}


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("decode:delete", "delete pod old --wait=false"),
        ("decode:kill", "delete pod old --wait=false --force --grace-period=0"),
        ("decode:evict", "create --raw /api/v1/namespaces/space/pods/old/eviction -f -"),
        ("decode:scale", "scale deployment/effuse-decode --replicas=2"),
        ("all:restart", "rollout restart deployment.apps/effuse-decode"),
    ],
)
def test_a_fault_waits_until_pods_have_changed(text: str, asked: str, tmp_path: Path) -> None:
    old, new = [_pod("old")], [_pod("new")]
    proof = Fault.read(text).strike(_kubectl(tmp_path, old, old, new))
    assert f"{text}: of 1 pods 1 gone, 1 new" in proof
    assert asked in (tmp_path / "done").read_text()


@pytest.mark.parametrize("text", ["decode", "decode:melt", "all:kill", "decode:restart", "x:kill"])
def test_other_faults_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected ROLE:HOW"):
        Fault.read(text)


def test_faults_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listings = [[_pod(str(number))] for number in range(9)]
    cluster = _kubectl(tmp_path, *listings)
    faults = [Fault("decode", "delete"), Fault("decode", "kill")]
    assert meet(cluster, [GOOD, FAILED, GOOD], faults, 1) == [GOOD, FAILED, GOOD]
    out = capsys.readouterr().out
    assert "failed after 9.0 s: PeerLost" in out
    assert "decode:delete: of 1 pods 1 gone" in out


def test_a_run_without_a_fault_fails(tmp_path: Path) -> None:
    with pytest.raises(AttemptError, match="no fault happened"):
        meet(_kubectl(tmp_path, []), [GOOD], [Fault("decode", "delete")], 2)


@pytest.mark.parametrize(
    ("done", "named"),
    [([GOOD, FAILED], "1 of 2 failed"), ([GOOD], "0 of 1 failed, of 2 to be sent")],
)
def test_failed_and_missing_requests_fail(done: list[Line], named: str) -> None:
    with pytest.raises(AttemptError, match=named):
        check(done, 2)


def test_wrong_answers_are_counted_and_are_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    check([GOOD, Line("effuse-routers:50051", 1.5, "the same again", None)], 2)
    assert "2 requests, 0 failed, 1 answers wrong" in capsys.readouterr().out
