"""The manifests as they stand: probes, limits, security, and images that can be built here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from effuse.worker.config import WorkerConfig

K8S = Path(__file__).parent.parent.parent / "k8s"
ROLES = ("redis", "router", "prefill", "decode")
Document = dict[str, Any]


def _documents(role: str) -> list[Document]:
    return list(yaml.safe_load_all((K8S / "base" / f"{role}.yaml").read_text()))


def _deployment(role: str) -> Document:
    (found,) = [one for one in _documents(role) if one["kind"] == "Deployment"]
    return found


def _pod(role: str) -> Document:
    pod: Document = _deployment(role)["spec"]["template"]["spec"]
    return pod


def _container(role: str) -> Document:
    (container,) = _pod(role)["containers"]
    found: Document = container
    return found


@pytest.mark.parametrize("role", ROLES)
def test_every_container_is_probed_and_limited(role: str) -> None:
    container = _container(role)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert {"grpc", "tcpSocket"} & set(container[probe]), probe
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    assert "memory" in container["resources"]["limits"]
    assert _pod(role)["terminationGracePeriodSeconds"] > 0


@pytest.mark.parametrize("role", ROLES)
def test_the_root_is_read_only_so_tmp_is_a_volume(role: str) -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in _container(role)["volumeMounts"]}
    assert mounts["tmp"] == "/tmp"
    assert {volume["name"] for volume in _pod(role)["volumes"]} == set(mounts)


def test_every_deployment_gets_the_restricted_settings() -> None:
    kustomization = yaml.safe_load((K8S / "base/kustomization.yaml").read_text())
    assert {"path": "restricted.yaml", "target": {"kind": "Deployment"}} in kustomization["patches"]
    patch = {
        entry["path"].removeprefix("/spec/template/spec/"): entry["value"]
        for entry in yaml.safe_load((K8S / "base/restricted.yaml").read_text())
    }
    pod, container = patch["securityContext"], patch["containers/0/securityContext"]
    assert pod["runAsNonRoot"]
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert container["allowPrivilegeEscalation"] is False
    assert container["readOnlyRootFilesystem"] is True
    assert patch["automountServiceAccountToken"] is False


def test_the_base_takes_every_file() -> None:
    listed = yaml.safe_load((K8S / "base/kustomization.yaml").read_text())["resources"]
    kept = {"kustomization.yaml", "restricted.yaml"}
    assert {path.name for path in (K8S / "base").glob("*.yaml")} - kept == set(listed)


@pytest.mark.parametrize("role", ROLES)
def test_every_image_has_a_dockerfile_that_runs_without_root(role: str) -> None:
    name = re.fullmatch(r"localhost/effuse-(\w+):[\d.]+", _container(role)["image"])
    assert name is not None
    text = (K8S / f"Dockerfile.{name[1]}").read_text()
    assert "USER 10001:10001" in text


def test_the_routers_image_has_no_torch() -> None:
    text = (K8S / "Dockerfile.router").read_text()
    assert "pip install --no-cache-dir /src" in text
    assert "worker" not in text


def test_both_workers_stand_on_the_same_layer() -> None:
    bases = {
        re.findall(r"^ARG WORKER_BASE=(\S+)", (K8S / f"Dockerfile.{role}").read_text(), re.M)[0]
        for role in ("prefill", "decode")
    }
    assert bases == {"localhost/effuse-worker-base:0.1.0"}


@pytest.mark.parametrize("overlay", sorted(path.name for path in (K8S / "overlays").iterdir()))
def test_an_overlays_name_is_its_topology(overlay: str) -> None:
    wanted = re.fullmatch(r"(\d+)p(\d+)d", overlay)
    assert wanted is not None
    text = (K8S / "overlays" / overlay / "kustomization.yaml").read_text()
    counts = {one["name"]: one["count"] for one in yaml.safe_load(text)["replicas"]}
    assert counts == {"prefill": int(wanted[1]), "decode": int(wanted[2])}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_outlive_their_own_drain(role: str) -> None:
    assert _pod(role)["terminationGracePeriodSeconds"] > WorkerConfig().drain_s
