"""The manifests as they stand: probes, limits, security, and images that can be built here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from k8s.charted import references
from k8s.composed import (
    K8S,
    OF_GROUPS,
    WORKERS,
    Document,
    config_of,
    deployments,
    overlay,
    overlays,
    role_of,
)

from effuse.cli.commands import value_of
from effuse.router.config import RouterConfig
from effuse.worker.config import WorkerConfig

pytestmark = pytest.mark.chart
GPU_OVERLAYS = ("gpu-1p1d", "gpu-tp2-1p1d", "gpu-nvlink-1p1d", "gpu-tp2-pool")
MODEL_BYTES = 15 << 30  # of 7B parameters


def test_every_image_has_a_dockerfile_that_runs_without_root() -> None:
    images = {
        container["image"].split("-")[1].split(":")[0]
        for name in overlays()
        for pod in _pods(name)
        for container in pod["containers"]
    }
    assert images == {"redis", "router", "worker"}
    for image in images:
        assert "USER 10001:10001" in (K8S / f"Dockerfile.{image}").read_text()


def test_the_routers_image_has_no_torch() -> None:
    text = (K8S / "Dockerfile.router").read_text()
    assert "pip install --no-cache-dir '/src[server]'" in text
    assert "worker" not in text


def test_a_number_of_pods_that_a_scaler_owns_is_in_no_manifest() -> None:
    """`kubectl apply` would reset it."""
    scaled = 0
    for name in overlays():
        for kind, scaler in overlay(name):
            if kind == "HorizontalPodAutoscaler":
                spec = overlay(name)[kind, scaler]["spec"]
                assert spec["scaleTargetRef"]["name"] == f"effuse-{scaler}"
                assert "replicas" not in deployments(name)[scaler]["spec"]
                scaled += 1
    assert scaled >= 4


def test_pods_of_a_role_are_spread() -> None:
    for deployment in deployments("ha").values():
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        spread = _pod_of(deployment)["topologySpreadConstraints"]
        assert [one["topologyKey"].rpartition("/")[2] for one in spread] == ["hostname", "zone"]
        for one in spread:
            assert one["labelSelector"]["matchLabels"].items() <= labels.items()
            assert "app.kubernetes.io/name" in one["matchLabelKeys"]


@pytest.mark.parametrize("name", [one for one in overlays() if one[-1] == "d"])
def test_an_overlays_name_is_its_topology(name: str) -> None:
    wanted = re.fullmatch(r"(?:[a-z]+\d*-)*(\d+)p(\d+)d", name)
    assert wanted is not None
    counts = {"prefill": 0, "decode": 0}
    for deployment in deployments(name).values():
        for container in _pod_of(deployment)["containers"]:
            if (role := role_of(container)) in counts:
                counts[role] += deployment["spec"].get("replicas", 1)
    assert counts == {"prefill": int(wanted[1]), "decode": int(wanted[2])}


@pytest.mark.parametrize("name", overlays())
def test_pods_outlive_the_drain_of_what_is_in_them(name: str) -> None:
    """Kubernetes kills processes after the grace period, which includes preStop."""
    checked = set()
    for pod in _pods(name):
        for container in pod["containers"]:
            if (role := role_of(container)) != "redis":
                config = RouterConfig if role == "router" else WorkerConfig
                told = value_of(container["args"], "--drain-s")
                ends = config(drain_s=float(told)) if told else config()
                stop = container.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
                longest_s = stop["sleep"]["seconds"] + ends.longest_end_s
                assert pod["terminationGracePeriodSeconds"] > longest_s, role
                checked.add(role)
    assert checked > {"router"}


def test_a_router_goes_on_until_its_endpoint_is_forgotten() -> None:
    """Once it drains it listens no more: the kernel would refuse later clients."""
    (container,) = _pod_of(deployments("1p1d")["router"])["containers"]
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] >= 5


def _pod_of(deployment: Document) -> Document:
    pod: Document = deployment["spec"]["template"]["spec"]
    return pod


def _pods(name: str, *components: str) -> list[Document]:
    return [_pod_of(deployment) for deployment in deployments(name, *components).values()]


def _workers(name: str) -> list[tuple[Document, Document, Document]]:
    """Deployment, pod and container of each worker of an overlay."""
    return [
        (deployment, _pod_of(deployment), container)
        for deployment in deployments(name).values()
        for container in _pod_of(deployment)["containers"]
        if role_of(container) in WORKERS
    ]


def _mounts(container: Document) -> dict[str, Document]:
    return {mount["name"]: mount for mount in container["volumeMounts"]}


def _volumes(pod: Document) -> dict[str, Document]:
    return {volume["name"]: volume for volume in pod["volumes"]}


def _bytes(quantity: str) -> int:
    number, unit = quantity[:-2], quantity[-2:]
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


@pytest.mark.parametrize("name", overlays())
def test_every_pod_is_restricted(name: str) -> None:
    for pod in _pods(name):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert {kind for one in pod["volumes"] for kind in one} <= {
            *("name", "emptyDir", "persistentVolumeClaim", "secret", "configMap")
        }
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize("name", overlays())
def test_every_container_of_an_overlay_is_probed_limited_and_has_its_own_tmp(name: str) -> None:
    for pod in _pods(name):
        temporary = [
            mount["name"]
            for container in pod["containers"]
            for mount in container["volumeMounts"]
            if mount["mountPath"] == "/tmp"
        ]
        assert len(set(temporary)) == len(pod["containers"])
        for container in pod["containers"]:
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]
            assert set(_mounts(container)) <= set(_volumes(pod))


@pytest.mark.parametrize("name", overlays())
def test_workers_are_reached_by_the_fleet_alone(name: str) -> None:
    labels = {
        deployment["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
        for deployment, _, _ in _workers(name)
    }
    policy = overlay(name)["NetworkPolicy", "workers"]["spec"]
    (source,) = policy["ingress"][0]["from"]
    assert labels <= _selected(policy["podSelector"])
    assert _selected(source["podSelector"]) == {"router", *_selected(policy["podSelector"])}


def _selected(selector: Document) -> set[str]:
    (expression,) = selector["matchExpressions"]
    assert (expression["key"], expression["operator"]) == ("app.kubernetes.io/name", "In")
    return set(expression["values"])


@pytest.mark.parametrize(
    ("name", "components"),
    [
        *((name, ()) for name in overlays()),
        ("1p1d", ("tls", "monitoring", "redis-password", "keys", "config")),
        ("pool", ("tls", "monitoring", "redis-password", "keys", "config", "model", "gpu")),
    ],
)
def test_every_process_takes_its_flags(name: str, components: tuple[str, ...], files: Path) -> None:
    """A config that is refused at the start, such as plain text without its flag, is never
    ready.
    """
    containers = [one for pod in _pods(name, *components) for one in pod["containers"]]
    configs = [config_of(one, files) for one in containers if role_of(one) != "redis"]
    assert len(configs) >= 2
    assert {one.host for one in configs} == {"0.0.0.0"}


def test_with_tls_nothing_is_called_in_plain_text_but_health(files: Path) -> None:
    allowed = {}
    for pod in _pods("tls-1p1d"):
        (container,) = pod["containers"]
        if (role := role_of(container)) == "redis":
            continue
        config = config_of(container, files)
        assert config.fleet_cert is not None
        assert config.metrics_host == "127.0.0.1"
        allowed[role] = config.allow_plaintext
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] == config.health_port
    assert allowed == dict.fromkeys(("router", "prefill", "decode"), "pages")
    ports = overlay("tls-1p1d")["Service", "router"]["spec"]["ports"]
    assert {port["name"]: port["appProtocol"] for port in ports} == {
        "grpc": "https",  # h2c has gateways speak plain text to it
        "http": "https",
    }


@pytest.mark.parametrize("name", GPU_OVERLAYS)
def test_every_worker_gets_a_gpu_and_room_for_a_model(name: str) -> None:
    for _, pod, container in _workers(name):
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        assert limits["nvidia.com/gpu"] >= 1
        assert _bytes(limits["memory"]) >= 2 * MODEL_BYTES
        assert _bytes(requests["memory"]) >= MODEL_BYTES
        assert "--device=cuda" in container["args"]  # never the CPU in its stead
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in (
            pod["tolerations"]
        )
        shared = _volumes(pod)["shm"]["emptyDir"]
        assert _mounts(container)["shm"]["mountPath"] == "/dev/shm"
        assert shared["medium"] == "Memory"
        assert 1 << 30 < _bytes(shared["sizeLimit"]) < _bytes(limits["memory"])
    for pod in _pods(name):
        gpus = [one["resources"]["limits"].get("nvidia.com/gpu") for one in pod["containers"]]
        assert any(gpus) == ("tolerations" in pod)  # the router and Redis need none


@pytest.mark.parametrize("name", GPU_OVERLAYS)
def test_the_model_is_read_only_for_all_who_need_it(name: str) -> None:
    claim = overlay(name)["PersistentVolumeClaim", "models"]
    assert _bytes(claim["spec"]["resources"]["requests"]["storage"]) > MODEL_BYTES
    for pod in _pods(name):
        for container in pod["containers"]:
            if role_of(container) == "redis":
                continue
            assert "--model=/models/$(MODEL)" in container["args"]
            served = "--served-model-name=$(MODEL)"
            assert (served in container["args"]) == (role_of(container) in WORKERS)
            assert _mounts(container)["models"]["mountPath"] == "/models"
            assert _mounts(container)["models"]["readOnly"] is True
            source = _volumes(pod)["models"]["persistentVolumeClaim"]
            assert source == {"claimName": claim["metadata"]["name"], "readOnly": True}


@pytest.mark.parametrize("name", GPU_OVERLAYS)
def test_loading_a_model_has_time(name: str) -> None:
    """Each waits longer than the one before: the worker, the probe, the rollout."""
    for deployment, _, container in _workers(name):
        (flag,) = [one for one in container["args"] if one.startswith("--startup-timeout-s=")]
        probe = container["startupProbe"]
        times = (
            int(flag.partition("=")[2]),
            probe["periodSeconds"] * probe["failureThreshold"],
            deployment["spec"]["progressDeadlineSeconds"],
        )
        assert times[0] >= 1800
        assert sorted(set(times)) == list(times)


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("1p1d", {"tcp", "self"}),
        ("gpu-1p1d", {"rc", "tcp", "self", "cuda_copy"}),
        ("gpu-tp2-1p1d", {"rc", "tcp", "self", "cuda_copy"}),
        ("gpu-tp2-pool", {"rc", "tcp", "self", "cuda_copy"}),
        ("gpu-nvlink-1p1d", {"tcp", "self", "cuda_copy", "cuda_ipc"}),
        ("gpu-hosts-1p1d", {"rc", "tcp", "self", "cuda_copy"}),
    ],
)
def test_pages_take_ways_that_are_there(name: str, ways: set[str]) -> None:
    for _, _, container in _workers(name):
        (value,) = [one["value"] for one in container["env"] if one["name"] == "UCX_TLS"]
        assert set(value.split(",")) == ways


@pytest.mark.parametrize("name", GPU_OVERLAYS)
def test_a_worker_has_a_gpu_for_each_of_its_ranks(name: str) -> None:
    ranks = []
    for _, _, container in _workers(name):
        ranks.append(int(value_of(container["args"], "--tensor-parallel-size") or 1))
        assert container["resources"]["limits"]["nvidia.com/gpu"] == ranks[-1]
    assert max(ranks) == (2 if "tp2" in name else 1)


def test_a_worker_over_nodes_is_a_group_of_pods_that_meet_at_the_first(files: Path) -> None:
    found = overlay("gpu-hosts-1p1d")
    names = {(kind, one["metadata"]["name"]) for (kind, _), one in found.items()}
    for role in ("prefill", "decode"):
        group = found["LeaderWorkerSet", role]
        assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
        assert set(group["spec"]) == {"leaderWorkerTemplate", "replicas", "startupPolicy"}
        assert group["spec"]["startupPolicy"] == "LeaderCreated"
        template = group["spec"]["leaderWorkerTemplate"]
        assert set(template) == {"restartPolicy", "size", "workerTemplate"}
        pod = template["workerTemplate"]["spec"]
        (container,) = pod["containers"]
        config = config_of(container, files)
        assert isinstance(config, WorkerConfig)
        assert (config.nnodes, config.node_rank) == (template["size"], 1)
        assert config.master_addr == OF_GROUPS["LWS_LEADER_ADDRESS"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == config.ranks_per_node
        assert config.fleet_secret is not None
        assert len(references(group)) == 2 and references(group) <= names
    router = config_of(_pod_of(deployments("gpu-hosts-1p1d")["router"])["containers"][0], files)
    assert router.fleet_secret == config.fleet_secret


def test_nvlinks_workers_share_one_pod_and_its_processes() -> None:
    assert set(deployments("gpu-nvlink-1p1d")) == {"redis", "router", "workers"}
    workers = _workers("gpu-nvlink-1p1d")
    assert [container["name"] for _, _, container in workers] == ["prefill", "decode"]
    for deployment, pod, _ in workers:
        assert pod["shareProcessNamespace"] is True
        assert deployment["spec"]["replicas"] == 1
    flags = [flag for _, _, container in workers for flag in container["args"]]
    for own in ("--port=", "--worker-id="):
        assert len({flag for flag in flags if flag.startswith(own)}) == 2, own
    for _, _, container in workers:
        (port,) = container["ports"]
        assert f"--port={port['containerPort']}" in container["args"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] == port["containerPort"]


def test_nvlinks_pod_is_as_restricted_as_the_bases() -> None:
    """It is written out, because the base's patch is for pods of one container."""
    _, pod, _ = _workers("gpu-nvlink-1p1d")[0]
    for role in ("prefill", "decode"):
        based = _pod_of(deployments("1p1d")[role])
        for field in (
            *("securityContext", "automountServiceAccountToken", "enableServiceLinks"),
            "terminationGracePeriodSeconds",
        ):
            assert pod[field] == based[field]
        (container,) = [one for one in pod["containers"] if one["name"] == role]
        for field in ("image", "securityContext", "livenessProbe", "readinessProbe"):
            expected = str(based["containers"][0][field])
            assert str(container[field]).replace("50053", "50052") == expected


def test_nvlinks_workers_are_told_what_those_of_gpu_pods_are() -> None:
    apart = {role_of(one): one for _, _, one in _workers("gpu-1p1d")}
    for _, _, container in _workers("gpu-nvlink-1p1d"):
        other = apart[role_of(container)]
        assert container["resources"] == other["resources"]
        assert container["startupProbe"].keys() == other["startupProbe"].keys()
        own = ("--port=", "--worker-id=")
        told = [flag for flag in container["args"] if not flag.startswith(own)]
        assert told == [flag for flag in other["args"] if not flag.startswith(own)]


def test_nvlinks_workers_may_reach_redis() -> None:
    template = deployments("gpu-nvlink-1p1d")["workers"]["spec"]["template"]
    policy = overlay("gpu-nvlink-1p1d")["NetworkPolicy", "redis"]["spec"]
    wanted = policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert wanted.items() <= template["metadata"]["labels"].items()


def test_workers_have_the_compiler_that_triton_needs_on_a_gpu() -> None:
    assert " gcc libc6-dev " in (K8S / "Dockerfile.worker-base").read_text()
