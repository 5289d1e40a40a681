"""The Helm chart: the same fleet as kustomize's, and bad values refused."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from installed import installed
from k8s.charted import (
    ALL,
    CHART,
    NAME,
    NUMBERS,
    OLDEST,
    Values,
    canonical,
    charted,
    helm,
)
from k8s.composed import K8S, Document, kustomized, overlays, with_components

pytestmark = pytest.mark.chart

GPU_VALUES = ("--values", str(CHART / "gpu.yaml"))
CONFIG = {
    role: {"config": (K8S / "components" / "config" / f"{role}.toml").read_text()}
    for role in ("router", "workers")
}
SCALED: Values = {
    "metrics": {"enabled": True},
    **{name: {**one, "autoscaling": {"enabled": True}} for name, one in CONFIG.items()},
}
SAME: dict[str, tuple[Values, tuple[str, ...]]] = {
    "1p1d": ({}, ()),
    "2p3d": ({"prefill": {"replicas": 2}, "decode": {"replicas": 3}}, ()),
    "gpu-1p1d": ({"model": {"create": True}}, GPU_VALUES),
    "gpu-hosts-1p1d": (
        {"model": {"create": True}, "workers": {"gpus": 2, "hosts": 2},
         "fleetSecret": "effuse-fleet-secret"},
        GPU_VALUES,
    ),
    "gpu-tp2-1p1d": ({"model": {"create": True}, "decode": {"gpus": 2}}, GPU_VALUES),
    "gpu-tp2-pool": (
        {**SCALED, "roles": ["worker"],
         "worker": {"gpus": 2, "autoscaling": {"scaleDownAfterS": 600}},
         "model": {"create": True, "download": {"enabled": True}}},
        GPU_VALUES,
    ),
    "ha": (
        {"router": {**CONFIG["router"], "replicas": 2}, "decode": {"replicas": 2},
         "workers": CONFIG["workers"], "networkPolicy": {"egress": True}},
        (),
    ),
    "keys-1p1d": ({"router": {"keysSecret": "effuse-keys"}}, ()),
    "monitored-1p1d": ({"metrics": {"enabled": True}}, ()),
    "operator-1p1d": ({"metrics": {"enabled": True, "operator": True}}, ()),
    "password-1p1d": ({"redis": {"credentialsSecret": "effuse-redis"}}, ()),
    "pool": ({"roles": ["worker"], "worker": {"replicas": 2}}, ()),
    "scaled-1p1d": (SCALED, ()),
    "scaled-pool": ({**SCALED, "roles": ["worker"]}, ()),
    "tls-1p1d": ({"tls": {"enabled": True}}, ()),
}  # fmt: skip
"""Values that give what an overlay gives."""
Change = Callable[[Document], object]


@pytest.mark.parametrize("overlay", SAME)
def test_values_give_what_an_overlay_gives(overlay: str, files: Path) -> None:
    values, words = SAME[overlay]
    expected = canonical(kustomized(K8S / "overlays" / overlay), files)
    assert canonical(charted(values, *words), files) == expected


def test_workers_over_nodes_have_the_same_files_and_metrics(files: Path) -> None:
    values, words = SAME["gpu-hosts-1p1d"]
    values = {
        **values, "metrics": {"enabled": True}, "router": CONFIG["router"],
        "workers": {**values["workers"], **CONFIG["workers"]},
    }  # fmt: skip
    expected = canonical(with_components("gpu-hosts-1p1d", "config", "monitoring"), files)
    assert canonical(charted(values, *words), files) == expected


def test_each_overlay_has_its_values() -> None:
    """All but the one with both workers in one pod, which the chart leaves out."""
    assert set(overlays()) == {*SAME, "gpu-nvlink-1p1d"}


def _container(document: Document) -> Document:
    found: Document = document["spec"]["template"]["spec"]["containers"][0]
    return found


def _policy(document: Document) -> Document:
    found: Document = document["spec"]["ingress"][0]["from"][0]["podSelector"]
    return found


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("Deployment", "router", lambda one: _container(one)["args"].append("--max-queue=7")),
        ("Deployment", "decode", lambda one: _container(one)["args"].remove("--connector=nixl")),
        ("Deployment", "redis", lambda one: _container(one)["args"].append("--appendonly")),
        ("Deployment", "prefill", lambda one: _container(one).pop("readinessProbe")),
        ("Deployment", "router", lambda one: _container(one)["ports"].pop()),
        ("Deployment", "redis", lambda one: _container(one)["securityContext"].popitem()),
        ("Deployment", "decode", lambda one: _container(one)["env"].pop()),
        ("Service", "router", lambda one: one["spec"]["ports"].pop()),
        ("Service", "routers", lambda one: one["spec"]["selector"].update({NAME: "decode"})),
        ("NetworkPolicy", "workers", lambda one: _policy(one)["matchExpressions"].pop()),
        ("NetworkPolicy", "redis", lambda one: _policy(one).pop("matchLabels")),
        ("PodDisruptionBudget", "decode", lambda one: one["spec"].update(maxUnavailable=2)),
    ],
)
def test_a_difference_is_seen(kind: str, name: str, change: Change, files: Path) -> None:
    documents = kustomized(K8S / "overlays" / "1p1d")
    before = canonical(copy.deepcopy(documents), files)
    (changed,) = [
        one
        for one in documents
        if (one["kind"], one["metadata"]["name"]) == (kind, f"effuse-{name}")
    ]
    change(changed)
    assert canonical(documents, files) != before


NUMBERED: Values = {**NUMBERS, "serviceAccount": {"name": "123"}}
OWN_REDIS = {"credentialsSecret": "1", "caSecret": "2", "sentinelSecret": "3"}


@pytest.mark.parametrize(
    ("values", "release"),
    [
        *((values, "effuse") for values, _ in SAME.values()),
        (ALL, "effuse"),
        (NUMBERS, "7"),
        ({**NUMBERED, "redis": {**ALL["redis"], **OWN_REDIS}}, "true"),
        ({**NUMBERED, "workers": {"gpus": 2, "hosts": 2}}, "9"),
    ],
)
def test_helm_and_kubernetes_accept_it(values: Values, release: str, tmp_path: Path) -> None:
    is_of_gpus = "create" in values.get("model", {}) and values["model"].get("claim") is None
    words = GPU_VALUES if is_of_gpus else ()
    linted = helm("lint", "--strict", str(CHART), *words, values=values)
    assert not linted.returncode, linted.stdout + linted.stderr
    made = tmp_path / "made.yaml"
    documents = charted(values, *words, "--kube-version", OLDEST, release=release)
    made.write_text(yaml.safe_dump_all(documents))
    validate = installed("kubernetes-validate") / "bin" / "kubernetes-validate"
    flags = ("--strict", "--quiet", "--kubernetes-version", OLDEST)
    done = subprocess.run(
        [validate, *flags, made], capture_output=True, text=True, timeout=60, check=False
    )
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("role", "parallel"), [
    *(("decode", "data"), ("prefill", "prefill-context")),
    *(("decode", "pipeline"), ("prefill", "pipeline")),
])  # fmt: skip
def test_the_gpus_of_a_worker_may_be_replicas_or_stages_or_cut_prompts(
    role: str, parallel: str
) -> None:
    made = charted({role: {"gpus": 4, "parallel": parallel}}, *GPU_VALUES)
    (args,) = [
        one["spec"]["template"]["spec"]["containers"][0]["args"]
        for one in made
        if one["kind"] == "Deployment" and one["metadata"]["name"].endswith(role)
    ]
    assert f"--{parallel}-parallel-size=4" in args
    assert not [one for one in args if "tensor" in one]


def test_an_older_kubernetes_is_refused() -> None:
    done = helm("template", "effuse", str(CHART), "--kube-version", "1.29")
    assert done.returncode
    assert ">=1.30" in done.stderr


NO_ROOM: Values = {"maxUnavailable": 0, "maxSurge": 0}


def _metrics(port: int = 9464) -> dict[str, Any]:
    return {"metrics": {"enabled": True, "port": port}}


def _scaled(**bounds: int) -> dict[str, Any]:
    return {**_metrics(), "decode": {"autoscaling": {"enabled": True, **bounds}}}


def _unmetered(values: Values) -> dict[str, Any]:
    return {**_metrics(), "decode": values}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"prefill": {"replicas": -1}}, "/prefill/replicas"),
        ({"decode": {"replicas": "two"}}, "/decode/replicas"),
        ({"workers": {"replicas": 2}}, "/workers/replicas"),
        ({"prefill": {"gpus": 0.5}}, "/prefill/gpus"),
        ({"prefill": {"replica": 1}}, "'replica'"),
        ({"router": {"gpus": 1}}, "/router/gpus"),
        ({"router": {"hosts": 2}}, "/router/hosts"),
        ({"worker": {"hosts": 0}}, "/worker/hosts"),
        ({"worker": {"extraArgs": ["--nnodes=2"]}}, "/worker/extraArgs/0"),
        ({"prefill": {"parallel": "data"}}, "/prefill/parallel"),
        ({"decode": {"parallel": "prefill-context"}}, "/decode/parallel"),
        ({"decode": {"parallel": "expert"}}, "/decode/parallel"),
        ({"redis": {"replicas": 2}}, "/redis/replicas"),
        ({"conector": "zmq"}, "'conector'"),
        ({"connector": "tcp"}, "/connector"),
        ({"fleet": "two words"}, "/fleet"),
        ({"image": {"tag": 1.0}}, "/image/tag"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
        ({"image": {"pullSecrets": [""]}}, "/image/pullSecrets/0"),
        ({"redis": {"url": "http://cache:6379"}}, "/redis/url"),
        ({"redis": {"url": "redis://user:word@cache:6379/0"}}, "/redis/url"),
        ({"redis": {"url": "redis://cache:6379/0?password=word"}}, "/redis/url"),
        ({"redis": {"url": "redis+sentinel://user@s/m"}}, "/redis/url"),
        ({"redis": {"caSecret": "ca"}}, "redis.caSecret"),
        ({"redis": {"sentinelSecret": "s"}}, "redis.sentinelSecret"),
        ({"redis": {"url": "redis://cache", "caSecret": "ca"}}, "redis.caSecret"),
        ({"tls": {"clientCertificates": True}}, "tls.clientCertificates"),
        ({"tls": {"fleetSecret": ""}}, "/tls/fleetSecret"),
        ({"model": {"create": True}}, "model.claim"),
        ({"model": {"name": "two words"}}, "/model/name"),
        ({"model": {"claim": "weights"}}, "model.name"),
        ({"model": {"download": {"enabled": True}}}, "model.claim"),
        ({"workers": {"autoscaling": {"enabled": True}}}, "metrics.enabled"),
        ({"router": {"autoscaling": {"scaler": True}}}, "/router/autoscaling"),
        ({"roles": ["prefill"]}, "/roles"),
        ({"worker": {"parallel": "data"}}, "/worker/parallel"),
        ({"model": {"size": "large"}}, "/model/size"),
        ({"metrics": {"port": 80}}, "/metrics/port"),
        ({"router": {"service": {"type": "Ingress"}}}, "/router/service/type"),
        ({"router": {"extraArgs": ["--port=1"]}}, "/router/extraArgs/0"),
        ({"workers": {"extraArgs": ["--drain-s", "900"]}}, "/workers/extraArgs/0"),
        ({"decode": {"extraArgs": ["max-num-seqs=1"]}}, "/decode/extraArgs/0"),
        ({"workers": {"extraArgs": ["--connector=zmq"]}}, "/workers/extraArgs/0"),
        ({"decode": {"extraArgs": ["--max-window=2", "--device=cpu"]}}, "/decode/extraArgs/1"),
        ({"router": {"extraArgs": ["--keys", "/mine"]}}, "/router/extraArgs/0"),
        ({"decode": {"podAnnotations": {"a": True}}}, "/decode/podAnnotations/a"),
        ({"router": {"podLabels": {NAME: "mine"}}}, f"/router/podLabels/{NAME.replace('/', '~1')}"),
        ({"decode": {"resources": {"limit": {}}}}, "'limit'"),
        ({"workers": {"drainS": "30s"}}, "/workers/drainS"),
        ({"networkPolicy": False}, "/networkPolicy"),
        ({"networkPolicy": {"egressTo": [{"to": []}]}}, "networkPolicy.egress: expected"),
        ({"networkPolicy": {"egress": True, "egressTo": [{}]}}, "/networkPolicy/egressTo/0"),
        ({"networkPolicy": {"egress": True, "egressTo": [{"from": []}]}}, "'from'"),
        ({"fullnameOverride": "7b"}, "/fullnameOverride"),
        ({"workers": {"drainS": 0}}, "/workers/drainS"),
        ({"router": {"drainS": 0}}, "/router/drainS"),
        (_metrics(8000), "metrics.port: expected another port than 8000"),
        (_metrics(50051), "metrics.port"),
        (_metrics(50052), "metrics.port"),
        (_metrics(50059) | {"tls": {"enabled": True}}, "metrics.port"),
        (_scaled(minReplicas=20), "decode.autoscaling.minReplicas: expected at most 16"),
        (_scaled(minReplicas=3, maxReplicas=2), "decode.autoscaling.minReplicas"),
        ({"router": {"rollingUpdate": NO_ROOM}}, "router.rollingUpdate: expected"),
        (
            {
                "workers": {"rollingUpdate": {"maxSurge": "0%"}},
                "decode": {"rollingUpdate": {"maxUnavailable": 0}},
            },
            "decode.rollingUpdate",
        ),
        (_unmetered({"extraArgs": ["--no-metrics"]}), "decode.extraArgs: expected no --no-metrics"),
        (_unmetered({"config": "a = 1\nmetrics = false"}), "decode.config: expected no metrics"),
    ],
)
def test_a_bad_value_is_refused_by_name(values: Values, named: str) -> None:
    done = helm("template", "effuse", str(CHART), values=values)
    assert done.returncode
    assert named in done.stderr


@pytest.mark.parametrize(
    "values",
    [
        {**_metrics(8000), "router": {"http": {"enabled": False}}},
        _metrics(50059),
        {"metrics": {"port": 8000}},
        _scaled(minReplicas=16),
        {"decode": {"autoscaling": {"minReplicas": 20}}},
        {"router": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": "10%"}}},
        {"decode": {"extraArgs": ["--no-metrics"], "config": "metrics = false"}},
        {**_metrics(), "decode": {"config": "metrics = true"}},
    ],
)
def test_a_value_that_does_no_harm_is_accepted(values: Values) -> None:
    assert charted(values)


def test_more_flags_have_none_that_a_template_sets() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    refused = re.compile(schema["definitions"]["own-flag"]["pattern"])
    template = (CHART / "templates" / "_containers.tpl").read_text()
    flags = set(re.findall(r'- (?:\{\{ printf ")?(--[a-z-]+)=', template))
    assert {"--connector", "--device", "--keys", "--served-model-name"} < flags
    assert {one for one in flags if not refused.match(one)} == set()
    assert refused.match("--device=cpu") and not refused.match("--device-memory=1")


def test_a_release_whose_services_would_have_no_valid_names_is_refused() -> None:
    done = helm("template", "7b", str(CHART))
    assert "fullnameOverride" in done.stderr
    assert charted({"fullnameOverride": "seven"}, release="7b")


def _named(part: Document, definitions: Document) -> dict[str, Any]:
    """What a part of the schema has for each key; False, if it refuses the key."""
    named: dict[str, Any] = {}
    for one in part.get("allOf", ()):
        for key, value in _named(definitions[Path(one["$ref"]).name], definitions).items():
            named[key] = value and named.get(key, True)
    own: dict[str, Any] = part.get("properties", {})
    return named | own


def test_every_value_is_in_the_schema_and_documented() -> None:
    """A value that only the schema has is one that no operator finds."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values) | {"global"} == set(schema["properties"])
    for name, part in schema["properties"].items():
        if named := _named(part, schema["definitions"]):
            assert set(values[name]) == {key for key, value in named.items() if value}, name


def test_the_charts_version_is_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    package = tomllib.loads((K8S.parent / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == package["version"]
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"
