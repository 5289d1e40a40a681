"""Two fleets in a namespace: the README's overlay for another one, on every overlay."""

from __future__ import annotations

import re

import pytest
import yaml
from k8s.charted import INSTANCE, references, selectors
from k8s.composed import K8S, Document, kustomized, made, overlays, template_of, with_components

pytestmark = pytest.mark.chart


def _renaming() -> Document:
    """What the README's overlay for a second fleet does with its resources."""
    (text,) = re.findall(
        r"^```yaml\n(.*?namePrefix: blue-.*?)^```", (K8S / "README.md").read_text(), re.M | re.S
    )
    found: Document = yaml.safe_load(text)
    del found["resources"]
    return found


def _blue(name: str) -> list[Document]:
    """An overlay as the README names its objects for a second fleet."""
    return made(_renaming() | {"resources": [f"overlays/{name}"]})


def _pod_labels(documents: list[Document]) -> list[Document]:
    return [
        template_of(one)["metadata"]["labels"]
        for one in documents
        if one["kind"] in ("Deployment", "Job", "LeaderWorkerSet")
    ]


def _matches(selector: Document, labels: Document) -> bool:
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    for one in selector.get("matchExpressions", ()):
        is_in = labels.get(one["key"]) in one["values"]
        if is_in != (one["operator"] == "In"):
            return False
    return True


@pytest.mark.parametrize("name", overlays())
def test_no_selector_matches_the_other_fleets_pods(name: str) -> None:
    fleets = [kustomized(K8S / "overlays" / name), _blue(name)]
    for fleet, other in (fleets, reversed(fleets)):
        found = [one for one in selectors(fleet) if "fleet" not in str(one)]
        matched = [
            labels for one in found for labels in _pod_labels(fleet) if _matches(one, labels)
        ]
        assert len(found) >= 9 and len(matched) >= len(_pod_labels(fleet))
        for one in found:
            assert not any(_matches(one, labels) for labels in _pod_labels(other)), one


@pytest.mark.parametrize("name", overlays())
def test_nothing_of_the_other_fleet_has_its_name(name: str) -> None:
    first, second = kustomized(K8S / "overlays" / name), _blue(name)
    names = [{(one["kind"], one["metadata"]["name"]) for one in fleet} for fleet in (first, second)]
    assert len(names[0]) == len(names[1]) and not names[0] & names[1]
    assert references(second) <= names[1]
    assert f"{INSTANCE}: effuse" not in yaml.safe_dump_all(second)
    fleet = "blue-effuse"
    (redis,) = [one for kind, one in names[1] if kind == "Service" and one.endswith("-redis")]
    assert redis == f"{fleet}-redis"  # which processes find by their label
    assert all(labels[INSTANCE] == fleet for labels in _pod_labels(second))
    scalers = [one for one in second if one["kind"] == "HorizontalPodAutoscaler"]
    for one in scalers:
        assert ("Deployment", one["spec"]["scaleTargetRef"]["name"]) in names[1]
        (metric,) = one["spec"]["metrics"]
        assert metric["external"]["metric"]["selector"]["matchLabels"]["fleet"] == fleet
    for one in second:
        if one["kind"] == "ServiceMonitor":
            assert one["spec"]["selector"]["matchLabels"][INSTANCE] == fleet


def test_every_pod_of_a_monitored_worker_over_nodes_is_of_its_own_fleet() -> None:
    documents = with_components("gpu-hosts-1p1d", "config", "monitoring", **_renaming())
    assert references(documents) <= {(one["kind"], one["metadata"]["name"]) for one in documents}
    assert f"{INSTANCE}: effuse" not in yaml.safe_dump_all(documents)
