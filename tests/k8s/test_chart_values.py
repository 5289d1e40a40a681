"""Each value of the chart has its effect."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s.charted import (
    ALL,
    CHART,
    INSTANCE,
    NAME,
    PART,
    SPREAD,
    Values,
    charted,
    helm,
    pods,
    selectors,
)
from k8s.composed import Document, config_of

from effuse.worker.config import DecodeConfig

pytestmark = pytest.mark.chart


def _all_pods(values: Values = ALL) -> dict[str, tuple[Document, Document]]:
    """Deployment and pod of each role, with the default images' names."""
    return pods(charted(dict(values) | {"image": {}}))


def test_every_process_takes_its_flags_and_files(files: Path) -> None:
    found = _all_pods()
    assert set(found) == {"router", "prefill", "decode", "worker"}
    configs: dict[str, Any] = {}
    (flags,) = [one for one in charted(ALL) if one["metadata"]["name"] == "effuse-flags"]
    assert set(flags["data"]) == {"workers.toml", "decode.toml"}
    for name, text in flags["data"].items():
        (files / name).write_text(text)
    for role, (_, pod) in found.items():
        (container,) = pod["containers"]
        configs[role] = config_of(container, files)
        volumes = {one["name"] for one in pod["volumes"]}
        assert volumes == {one["name"] for one in container["volumeMounts"]}
    assert configs["prefill"].max_num_seqs == 7
    assert configs["prefill"].drain_s == 300  # the value, and not the file's: a probe relies on it
    decode = configs["decode"]
    assert isinstance(decode, DecodeConfig)
    assert (decode.max_window, decode.max_num_seqs) == (3, 64)  # its file instead of the common one
    for config in configs.values():
        assert (config.fleet, config.redis_url) == (
            "night",
            "rediss+sentinel://cache.example/main/0",
        )
        assert config.fleet_secret and config.fleet_cert and config.redis_credentials
        assert config.sentinel_credentials
        assert (config.metrics_port, config.model) == (9999, files / "Org/M-1")
    router = configs["router"]
    assert (router.max_queue, router.http_port) == (4, 8000)
    assert router.keys and router.tls_client_ca and router.redis_ca
    for worker in (configs["prefill"], decode, configs["worker"]):
        assert (worker.connector, worker.device) == ("zmq", "cuda")
        assert worker.served_model_name == "Org/M-1"


def test_a_pod_outlives_its_drain_and_waits_for_its_model(files: Path) -> None:
    (files / "decode.toml").touch()
    for role, (deployment, pod) in _all_pods().items():
        (container,) = pod["containers"]
        config: Any = config_of(container, files)
        stop_s = 5 if role == "router" else 0
        assert pod["terminationGracePeriodSeconds"] > stop_s + config.longest_end_s
        if role != "router":
            probe = container["startupProbe"]
            probed_s = probe["periodSeconds"] * probe["failureThreshold"]
            waited_s = deployment["spec"]["progressDeadlineSeconds"]
            assert config.startup_timeout_s < probed_s < waited_s


def test_pods_are_placed_as_asked() -> None:
    found = _all_pods()
    _, worker = found["decode"]
    assert worker["runtimeClassName"] == "nvidia"
    assert worker["nodeSelector"] == {"disk": "fast"}
    assert [one["key"] for one in worker["tolerations"]] == ["nvidia.com/gpu", "mine"]
    labels = {NAME: "decode", PART: "effuse", INSTANCE: "effuse"}
    assert worker["topologySpreadConstraints"] == [
        SPREAD | {"labelSelector": {"matchLabels": labels}}
    ]
    assert worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"name": "A", "value": "b"} in worker["containers"][0]["env"]
    deployment, router = found["router"]
    assert router["affinity"] == {"podAntiAffinity": {}}
    assert deployment["spec"]["template"]["metadata"]["labels"]["team"] == "one"
    assert not {"tolerations", "nodeSelector"} & set(router)
    assert router["serviceAccountName"] == "effuse"


def test_an_image_is_of_its_registry() -> None:
    for one in charted(ALL):
        if one["kind"] == "Deployment":
            pod, role = one["spec"]["template"]["spec"], one["metadata"]["labels"][NAME]
            image = "router" if role == "router" else "worker"
            assert pod["containers"][0]["image"] == f"registry.example/effuse-{image}:7"
            assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_no_redis_is_installed_beside_ones_own() -> None:
    assert "redis" in {one["metadata"]["name"].rpartition("-")[2] for one in charted()}
    assert "redis" not in {one["metadata"]["name"].rpartition("-")[2] for one in charted(ALL)}


def test_without_http_nothing_names_its_port() -> None:
    text = yaml.safe_dump_all(charted({"router": {"http": {"enabled": False}}}))
    assert not re.search(r"8000|\bhttp\b", text)


@pytest.mark.parametrize("switch", ["networkPolicy", "podDisruptionBudget"])
def test_policies_and_budgets_can_be_left_out(switch: str) -> None:
    kind = switch[0].upper() + switch[1:]
    assert kind in {one["kind"] for one in charted()}
    assert kind not in {one["kind"] for one in charted({switch: {"enabled": False}})}


def test_pods_may_also_call_what_egress_rules_of_ones_own_name() -> None:
    own = ALL["networkPolicy"]["egressTo"]
    usual, more = (
        one["spec"]["egress"]
        for values in ({"networkPolicy": {"egress": True}}, ALL)
        for one in charted(values)
        if one["metadata"]["name"] == "effuse-egress"
    )
    assert len(usual) == 2 and more == usual + own


def test_a_policy_that_would_part_the_fleet_from_its_redis_is_refused() -> None:
    own: Values = {"redis": {"url": "redis://cache.example:6379/0"}}
    done = helm("template", "effuse", str(CHART), values={**own, "networkPolicy": {"egress": True}})
    assert "networkPolicy.egressTo: expected a rule for redis.url" in done.stderr
    assert charted({**own, "networkPolicy": {"egress": True, "enabled": False}})
    assert charted({**own, "networkPolicy": ALL["networkPolicy"]})


def test_a_scaler_owns_the_number_that_it_scales() -> None:
    for scaled, expected in (
        ("decode", {"redis", "router", "prefill"}),
        ("workers", {"redis", "router"}),
        ("router", {"redis", "prefill", "decode"}),
    ):
        values: Values = {
            scaled: {"autoscaling": {"enabled": True}}, "metrics": {"enabled": True}
        }  # fmt: skip
        found = _all_pods(values)
        assert {role for role, (one, _) in found.items() if "replicas" in one["spec"]} == expected
        scalers = [one for one in charted(values) if one["kind"] == "HorizontalPodAutoscaler"]
        targets = {one["spec"]["scaleTargetRef"]["name"] for one in scalers}
        assert targets == {f"effuse-{one}" for one in {*found} - expected - {"router"}}


def test_a_scaler_of_ones_own_has_none_beside_it() -> None:
    own = {"autoscaling": {"enabled": True, "scaler": False}}
    made = charted({"workers": own})
    assert not [one for one in made if one["kind"] == "HorizontalPodAutoscaler"]
    assert "replicas" not in pods(made)["decode"][0]["spec"]


HOSTS: Values = {"workers": {"gpus": 4, "hosts": 2}, "fleetSecret": "secret"}


@pytest.mark.parametrize("role", ["prefill", "decode", "worker"])
def test_a_worker_over_hosts_works_with_everything_else(role: str, files: Path) -> None:
    roles = ["worker"] if role == "worker" else ["prefill", "decode"]
    beside: Values = {
        "roles": roles, "tls": {"enabled": True}, "metrics": {"enabled": True},
        "redis": {"credentialsSecret": "db"},
        role: {"replicas": 3, "rollingUpdate": {"maxSurge": 1}},
    }  # fmt: skip
    made = charted({**HOSTS, **beside})
    group, pod = pods(made)[role]
    assert (group["kind"], group["spec"]["replicas"]) == ("LeaderWorkerSet", 3)
    assert group["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxSurge": 1}
    (container,) = pod["containers"]
    config: Any = config_of(container, files)
    assert (config.nnodes, config.tensor_parallel_size, config.ranks_per_node) == (2, 4, 2)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert config.fleet_cert and config.redis_credentials and config.fleet_secret
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == config.health_port
    assert pod["terminationGracePeriodSeconds"] > config.longest_end_s
    template = group["spec"]["leaderWorkerTemplate"]
    labels = template["workerTemplate"]["metadata"]["labels"]
    assert template["leaderTemplate"]["metadata"]["labels"] == labels
    (budget,) = [
        one["spec"]["selector"]["matchLabels"]
        for one in made
        if one["kind"] == "PodDisruptionBudget" and one["metadata"]["name"] == f"effuse-{role}"
    ]
    assert budget.items() <= labels.items()


def test_only_the_first_pod_of_a_group_has_metrics() -> None:
    assert "leaderTemplate" not in str(charted(HOSTS))
    group, _ = pods(charted({**HOSTS, "metrics": {"enabled": True}}))["decode"]
    template = group["spec"]["leaderWorkerTemplate"]
    first, others = template["leaderTemplate"], template["workerTemplate"]
    (container,) = first["spec"]["containers"]
    assert container["ports"].pop()["name"] == "metrics"
    assert first["metadata"].pop("annotations")["prometheus.io/scrape"] == "true"
    assert first == others


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"gpus": 0}, "decode.gpus: expected a multiple"),
        ({"gpus": 3}, "decode.gpus: expected a multiple"),
        ({"autoscaling": {"enabled": True, "scaler": False}}, "decode.autoscaling.enabled"),
        (
            {"extraArgs": ["--kv-pool=mooncake://store:1"]},
            "decode.extraArgs: expected no --kv-pool",
        ),
        ({"extraArgs": ["--batch-invariant"]}, "decode.extraArgs: expected no --batch"),
        ({"config": "a = 1\nkv-offloading-dir = '/kv'\n"}, "decode.config: expected no kv-off"),
        ({"config": "batch-invariant = true"}, "decode.config: expected no batch-invariant"),
    ],
)
def test_hosts_refuse_the_values_that_they_cannot_have(values: Values, named: str) -> None:
    done = helm("template", "effuse", str(CHART), values={**HOSTS, "decode": values})
    assert named in done.stderr and "decode.hosts is 2" in done.stderr


def test_hosts_need_a_secret_and_a_name_that_fits_in_labels() -> None:
    for values, named in (({"fleetSecret": ""}, "fleetSecret"),
                          ({"fullnameOverride": "a" * 41}, "fullnameOverride")):  # fmt: skip
        done = helm("template", "effuse", str(CHART), values={**HOSTS, **values})
        assert f"{named}: expected" in done.stderr and "prefill.hosts is 2" in done.stderr
    accepted = {"config": "batch-invariant = false", "extraArgs": ["--kv-offloading-size=1"]}
    assert charted({**HOSTS, "decode": accepted, "fullnameOverride": "a" * 40})


def test_a_changed_file_restarts_its_pods() -> None:
    annotations = [
        pods(charted({"router": {"config": text}}))["router"][0]["spec"]["template"]["metadata"]
        for text in ("max-queue = 1", "max-queue = 2")
    ]
    assert annotations[0] != annotations[1]


def test_two_releases_in_a_namespace_have_nothing_in_common() -> None:
    values: Values = {"metrics": {"enabled": True}, "serviceAccount": {"create": True}}
    installed_twice = {name: charted(values, release=name) for name in ("effuse", "blue")}
    names = {
        release: {(one["kind"], one["metadata"]["name"]) for one in documents}
        for release, documents in installed_twice.items()
    }
    assert not names["effuse"] & names["blue"]
    for release, documents in installed_twice.items():
        found = [one for one in selectors(documents) if "prometheus" not in str(one)]
        assert len(found) > 12
        for one in found:
            assert one["matchLabels"][INSTANCE] == release
        for deployment, pod in pods(documents).values():
            assert deployment["spec"]["template"]["metadata"]["labels"][INSTANCE] == release
            prefix = "effuse" if release == "effuse" else "blue-effuse"
            flags = {
                one for one in pod["containers"][0]["args"] if "redis-url" in one or "fleet" in one
            }
            assert flags <= {f"--redis-url=redis://{prefix}-redis:6379/0", f"--fleet={prefix}"}


def test_the_notes_name_what_was_installed(tmp_path: Path) -> None:
    """Helm renders notes only with a cluster, so a copy of the chart has them in a ConfigMap."""
    chart = tmp_path / "effuse"
    shutil.copytree(CHART, chart)
    templates = chart / "templates"
    notes = f'{{{{ define "notes" }}}}{(templates / "NOTES.txt").read_text()}{{{{ end }}}}'
    shown = 'kind: Notes\ntext: {{ include "notes" . | quote }}\n'
    (templates / "notes.yaml").write_text(notes + shown)
    done = helm("template", "blue", str(chart), "--namespace", "night", values=ALL)
    (found,) = [one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] == "Notes"]
    text = found["text"]
    assert "--namespace night port-forward service/blue-effuse-router 50051 8000" in text
    assert "the fleet night serves Org/M-1" in text
    assert "--token-file" in text and "https://localhost:8000" in text
