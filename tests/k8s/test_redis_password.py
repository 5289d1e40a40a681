"""The password of Redis on Kubernetes: Redis and the fleet find the file that the README makes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from k8s.composed import K8S, deployments

from effuse.placement.access import RIGHTS

pytestmark = pytest.mark.chart


def test_redis_and_the_fleet_find_the_files_that_the_readme_makes() -> None:
    found = {}
    for name, deployment in deployments("password-1p1d").items():
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        (volume,) = [one for one in pod["volumes"] if "secret" in one]
        (item,) = volume["secret"]["items"]
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        path, words = f"{mounts[volume['name']]}/{item['path']}", container["args"]
        if name == "redis":
            assert words[words.index("--aclfile") + 1] == path
        else:
            assert f"--redis-credentials={path}" in words
        found[name] = Path(path).name
    assert found == {
        "redis": "users.acl", **dict.fromkeys(("router", "prefill", "decode"), "credentials")
    }  # fmt: skip
    told = (K8S / "README.md").read_text()
    made = told.partition("kubectl create secret generic effuse-redis")[2].partition("```")[0]
    assert set(re.findall(r"--from-literal=([a-z.]+)=", made)) == set(found.values())
    security = (K8S.parent / "docs" / "security.md").read_text()
    assert f"~effuse:* {RIGHTS}\n" in told and f":* {RIGHTS}`" in security
