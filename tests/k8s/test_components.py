"""A component changes every process of the fleet that it concerns, or there is no such fleet; and
the README makes the Secrets that it mounts. The request of `make k8s-try` moves KV.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml
from k8s.charted import pods, references
from k8s.composed import K8S, config_of, deployments, overlay, with_components

from effuse.client.answer import Stats
from effuse.router.tokenizer import bundled_directory, read_backend

pytestmark = pytest.mark.chart
ATTEMPT = runpy.run_path(str(K8S / "attempt.py"))


@pytest.mark.parametrize(
    "component", ["config", "fleet-secret", "monitoring", "redis-password", "tls"]
)
def test_workers_in_one_pod_are_not_left_out_of_what_the_router_gets(component: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        deployments("gpu-nvlink-1p1d", component)
    assert "changes workers in pods of their own" in refused.value.stderr


def test_workers_over_nodes_have_the_flags_of_a_file(files: Path) -> None:
    made = with_components("gpu-hosts-1p1d", "config")
    names = {(one["kind"], one["metadata"]["name"]) for one in made}
    for role in ("prefill", "decode"):
        group, pod = pods(made)[role]
        assert len(references(group)) == 3 and references(group) <= names
        (container,) = pod["containers"]
        assert "--config=/config/workers.toml" in container["args"]
        assert config_of(container, files)


def _mounted_files(overlay: str) -> dict[str, set[str]]:
    """For each Secret of an overlay the files that its processes read."""
    found: dict[str, set[str]] = {}
    for deployment in deployments(overlay).values():
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        paths = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        for volume in pod["volumes"]:
            if "secret" in volume:
                read = re.findall(rf"{paths[volume['name']]}/([\w.]+)", str(container["args"]))
                found.setdefault(volume["secret"]["secretName"], set()).update(read)
    return found


def _make_secrets(overlay: str, directory: Path) -> str:
    """Runs the README's commands for an overlay's Secrets; returns the arguments of kubectl."""
    kubectl, told = directory / "kubectl", directory / "told"
    kubectl.write_text(f"#!/bin/sh\necho $* >>{told}\n")
    kubectl.chmod(0o700)
    cluster = ATTEMPT["Cluster"](str(kubectl), "night")
    ATTEMPT["make_secrets"](cluster, yaml.safe_dump_all(deployments(overlay).values()), directory)
    return told.read_text()


@pytest.mark.parametrize("overlay", ["tls-1p1d", "password-1p1d", "keys-1p1d", "gpu-hosts-1p1d"])
def test_the_readme_makes_the_secrets_that_an_overlay_mounts(overlay: str, tmp_path: Path) -> None:
    told = _make_secrets(overlay, tmp_path)
    made = re.findall(r"^--namespace night create secret generic (\S+) (.*)", told, re.MULTILINE)
    assert made
    files = {name: set(re.findall(r"--from-\w+=([\w.]+)=", words)) for name, words in made}
    assert files == _mounted_files(overlay)
    assert told.count("--namespace night apply -f -") == len(made)  # even if it is there already


def test_certificates_of_the_readme_are_renewed_by_the_same_authorities(tmp_path: Path) -> None:
    _make_secrets("tls-1p1d", tmp_path)
    first = (tmp_path / "router.crt").read_bytes()
    _make_secrets("tls-1p1d", tmp_path)
    assert (tmp_path / "router.crt").read_bytes() != first
    for who, name in (
        ("fleet", "hostname effuse-fleet"),
        ("router", "hostname localhost"),
        ("router", "ip 127.0.0.1"),
    ):
        command = f"openssl verify -CAfile {who}-ca.crt -verify_{name} {who}.crt"
        subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)


def test_each_problem_that_is_tried_fills_a_page() -> None:
    directory = bundled_directory()
    block = json.loads((directory / "config.json").read_text())["block_size"]
    tokenizer = read_backend(directory)
    for seed in range(50):
        assert len(tokenizer.encode(ATTEMPT["long_problem"](seed).prompt).ids) >= block


def test_workers_with_both_roles_hand_nothing_over() -> None:
    handed_over = ATTEMPT["handed_over"]
    split = Stats(kv_bytes=1 << 20, connector="nixl", prefill_worker="p-0", decode_worker="d-0")
    assert handed_over(split) == "1,048,576 KV bytes over nixl from p-0 to d-0"
    assert handed_over(Stats(decode_worker="w-0")) == "no KV handed over, all by w-0"


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_download_has_its_name_once_it_is_whole(tmp_path: Path, *, has_tokenizer: bool) -> None:
    """With programs in the place of `hf` and `effuse`, the first of which fails once."""
    job = overlay("gpu-tp2-pool")["Job", "download"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    *shell, script = container["command"]
    made = "touch $last/tokenizer.json" if has_tokenizer else "true"
    programs = {
        "hf": 'for one; do [ "$one" = --local-dir ] && take=1 && continue; '
        '[ -n "${take:-}" ] && last=$one && take=; done; '
        f'echo "$@" >>{tmp_path}/told; mkdir -p $last; touch $last/a.safetensors; '
        f'[ -e {tmp_path}/failed ] || {{ touch {tmp_path}/failed; exit 1; }}; {made}',
        "effuse": 'echo effuse "$@" >>' + f"{tmp_path}/told; touch $2/tokenizer.json",
    }  # fmt: skip
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\nset -eu\n{text}\n")
        (tmp_path / name).chmod(0o700)
    script = script.replace("/models/", f"{tmp_path}/models/")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": "Org/M-1", "REVISION": "v2"}
    ends = [subprocess.run([*shell, script], env=env, check=False).returncode for _ in range(3)]
    assert ends == [1, 0, 0]
    model = tmp_path / "models" / "Org" / "M-1"
    assert {path.name for path in model.iterdir()} == {"a.safetensors", "tokenizer.json"}
    told = (tmp_path / "told").read_text().splitlines()
    assert [one.startswith("effuse") for one in told] == [
        False,
        False,
        *[True] * (not has_tokenizer),
    ]
    assert "download Org/M-1 --revision v2" in told[0] and "*.safetensors" in told[0]
    assert not re.search(r"\.(py|bin|pt)\b", told[0])
