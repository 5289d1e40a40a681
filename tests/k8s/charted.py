"""The objects of the chart, and in which form they are compared with those of kustomize."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from installed import installed
from k8s.composed import K8S, Document, config_of, role_of, template_of, templates_of

CHART = K8S / "chart"
OLDEST = "1.30"  # Kubernetes that the chart is for
INSTANCE, NAME, PART = (f"app.kubernetes.io/{one}" for one in ("instance", "name", "part-of"))
HASH = re.compile(r"-[a-z0-9]{10}$")
Values = Mapping[str, Any]
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
ALL: Values = {
    "image": {"repository": "registry.example/effuse", "tag": "7", "pullSecrets": ["registry"]},
    "serviceAccount": {"create": True, "annotations": {"a": "b"}},
    "fleet": "night",
    "fleetSecret": "night-secret",
    "connector": "zmq",
    "model": {"claim": "weights", "create": True, "storageClass": "fast", "name": "Org/M-1",
              "download": {"enabled": True, "revision": "v2", "tokenSecret": "hub"}},
    "roles": ["prefill", "decode", "worker"],
    "worker": {"autoscaling": {"enabled": True, "maxReplicas": 99}},
    "workers": {
        "gpus": 1,
        "startupTimeoutS": 1000,
        "drainS": 300,
        "config": "max-num-seqs = 7\ndrain-s = 9\n",
        "tolerations": [{"key": "mine", "operator": "Exists"}],
        "topologySpreadConstraints": [SPREAD],
        "nodeSelector": {"disk": "fast"},
        "runtimeClassName": "nvidia",
    },
    "decode": {
        "config": "max-window = 3",
        "env": [{"name": "A", "value": "b"}],
        "volumes": [{"name": "cache", "emptyDir": {}}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    },
    "router": {
        "drainS": 200,
        "keysSecret": "clients",
        "extraArgs": ["--max-queue=4"],
        "affinity": {"podAntiAffinity": {}},
        "podLabels": {"team": "one"},
        "service": {"type": "LoadBalancer", "annotations": {"c": "d"}},
    },
    "redis": {
        "url": "rediss+sentinel://cache.example/main/0",
        "caSecret": "ca",
        "credentialsSecret": "db",
        "sentinelSecret": "watch",
    },
    "tls": {"enabled": True, "clientCertificates": True},
    "metrics": {"enabled": True, "port": 9999, "operator": True},
    "networkPolicy": {
        "egress": True,
        "egressTo": [{"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], "ports": [{"port": 26379}]}],
    },
}  # fmt: skip
"""Nearly every value, each other than by default."""
NUMBERS: Values = {
    "fullnameOverride": "true",
    "image": {"pullSecrets": ["1"]},
    "serviceAccount": {"create": True},
    "fleetSecret": "true",
    "model": {"claim": "123", "create": True, "storageClass": "2", "name": "7",
              "download": {"enabled": True, "tokenSecret": "3"}},
    "router": {"keysSecret": "4", "priorityClassName": "5"},
    "redis": {"maxMemory": "209715200", "credentialsSecret": "1234"},
    "tls": {"enabled": True, "fleetSecret": "6", "routerSecret": "8"},
    "workers": {"autoscaling": {"enabled": True}},
    "metrics": {"enabled": True, "operator": True},
}  # fmt: skip
"""Texts that YAML reads as something else without quotes."""


def helm(*words: str, values: Values | None = None) -> subprocess.CompletedProcess[str]:
    """Runs helm with these values; it may fail."""
    return subprocess.run(
        [installed("helm"), *words, "--values", "-"], input=json.dumps(values or {}),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def charted(values: Values | None = None, *words: str, release: str = "effuse") -> list[Document]:
    """The objects of a release with these values. Flags of helm may follow."""
    done = helm("template", release, str(CHART), *words, values=values)
    assert not done.returncode, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def pods(documents: Sequence[Document]) -> dict[str, tuple[Document, Document]]:
    """Each Deployment, or group of pods, and its pod, by role."""
    found = {}
    for one in documents:
        if one["kind"] in ("Deployment", "LeaderWorkerSet"):
            pod = template_of(one)["spec"]
            found[role_of(pod["containers"][0])] = (one, pod)
    return found


def selectors(value: Any) -> Iterator[Document]:
    """Every selector of pods of the release in an object, as labels with expressions."""
    if isinstance(value, list):
        for one in value:
            yield from selectors(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            if key in ("selector", "podSelector"):
                yield (
                    one
                    if {"matchLabels", "matchExpressions"} & one.keys()
                    else {"matchLabels": one}
                )
            else:
                yield from selectors(one)


def references(value: Any) -> set[tuple[str, str]]:
    """Kind and name of each ConfigMap and claim that an object refers to."""
    if isinstance(value, list):
        return set().union(*map(references, value))
    found: set[tuple[str, str]] = set()
    if isinstance(value, dict):
        for key, one in value.items():
            if key in ("configMap", "configMapKeyRef"):
                found.add(("ConfigMap", one["name"]))
            elif key == "persistentVolumeClaim":
                found.add(("PersistentVolumeClaim", one["claimName"]))
            else:
                found |= references(one)
    return found


def canonical(documents: Sequence[Document], files: Path) -> dict[tuple[str, str], Any]:
    """The objects by kind and name, such that only differences that mean something are left.

    Left out are labels of objects, the order of entries with names, and the order and the defaults
    of flags: configurations are compared. `files` holds what pods mount.
    """
    found = {}
    values = {
        one["metadata"]["name"]: one["data"] for one in documents if one["kind"] == "ConfigMap"
    }
    for one in json.loads(json.dumps(documents)):
        metadata = {key: value for key, value in one["metadata"].items() if key != "labels"}
        name = metadata["name"] = HASH.sub("", metadata["name"])
        if one["kind"] in ("Deployment", "Job", "LeaderWorkerSet"):
            for template in templates_of(one):
                _settle(template, values, files)
        if one["kind"] == "Service":
            one = one | {"spec": {"type": "ClusterIP"} | one["spec"]}
        found[one["kind"], name] = _plain(one | {"metadata": metadata})
    found.pop(("ConfigMap", "effuse-model"), None)
    return found


def _settle(template: Document, values: Mapping[str, Any], files: Path) -> None:
    """Gives a container its configuration in place of flags, and values in place of references."""
    annotations = template["metadata"].pop("annotations", {})
    template["metadata"]["annotations"] = {
        key: value for key, value in annotations.items() if key != "checksum/config"
    }
    pod = template["spec"]
    (container,) = pod["containers"]
    if "args" in container and role_of(container) != "redis":
        container["args"] = asdict(config_of(container, files))
    kept = []
    for one in container.get("env", ()):
        if (source := one.get("valueFrom", {}).get("configMapKeyRef")) is not None:
            one = {"name": one["name"], "value": values[source["name"]][source["key"]]}
        if "args" not in container or one["name"] not in ("FLEET", "MODEL"):
            kept.append(one)
    container.pop("env", None)
    container.update({"env": kept} if kept else {})
    for volume in pod["volumes"]:
        if "configMap" in volume:
            volume["configMap"]["name"] = HASH.sub("", volume["configMap"]["name"])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        value = {key: _plain(one) for key, one in value.items() if key != INSTANCE}
        for expression in value.pop("matchExpressions", ()):
            if expression["operator"] == "In":
                value.setdefault("matchLabels", {})[expression["key"]] = expression["values"]
        if NAME in value and not isinstance(value[NAME], list):
            value[NAME] = [value[NAME]]
        return value
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        named = {one["name"]: _plain(one) for one in value if "name" in one}
        return named if len(named) == len(value) else [_plain(one) for one in value]
    return value
