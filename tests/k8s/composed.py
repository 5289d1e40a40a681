"""The objects of an overlay, as `kubectl kustomize` makes them, and what its processes are told."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from installed import installed

from effuse.config.access import Access
from effuse.config.flags import parse
from effuse.router.config import RouterConfig
from effuse.worker.config import BothConfig, DecodeConfig, PrefillConfig

K8S = Path(__file__).parent.parent.parent / "k8s"
MODEL = "GSAI-ML/LLaDA-8B-Instruct"  # of the component `model`
OF_GROUPS = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "effuse-decode-0.effuse-decode"}
"""Variables of pods of a LeaderWorkerSet, which its controller sets."""
WORKERS = ("prefill", "decode", "worker")
Document = dict[str, Any]
Documents = dict[tuple[str, str], Document]  # by kind and name, less the fleet's prefix


def overlays() -> list[str]:
    """Names of all overlays."""
    return sorted(path.name for path in (K8S / "overlays").iterdir())


@cache
def _rendered(directory: Path) -> str:
    return subprocess.run(
        [installed("kubectl"), "kustomize", directory],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip


def kustomized(directory: Path) -> list[Document]:
    """What kustomize makes of a folder. Raises CalledProcessError if it refuses."""
    return list(yaml.safe_load_all(_rendered(directory)))


def made(kustomization: Document) -> list[Document]:
    """What kustomize makes of this; its paths are those of the folder of manifests."""
    with tempfile.TemporaryDirectory() as folder:
        for field in ("resources", "components"):
            paths = (K8S / one for one in kustomization.get(field, ()))
            kustomization[field] = [os.path.relpath(path, folder) for path in paths]
        Path(folder, "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return kustomized(Path(folder))


def overlay(name: str, *components: str) -> Documents:
    """Every document of an overlay, which takes these components, too."""
    documents = kustomized(K8S / "overlays" / name)
    if components:
        paths = [f"components/{one}" for one in components]
        documents = made({"resources": [f"overlays/{name}"], "components": paths})
    return {
        (one["kind"], one["metadata"]["name"].removeprefix("effuse-")): one for one in documents
    }


def with_components(name: str, *components: str, **fields: Any) -> list[Document]:
    """What an overlay makes if it takes these components, too, each before its `fleet`.

    It takes these `fields`, too.
    """
    found = yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text())
    for field in ("resources", "components"):
        found[field] = [one.removeprefix("../../") for one in found[field]]
    place = found["components"].index("components/fleet")
    found["components"][place:place] = [f"components/{one}" for one in components]
    return made(found | fields)


def deployments(name: str, *components: str) -> dict[str, Document]:
    """Its Deployments by their names, and its groups of pods in the same form."""
    found = overlay(name, *components).items()
    return {
        name: document if kind == "Deployment" else _as_deployment(document)
        for (kind, name), document in found
        if kind in ("Deployment", "LeaderWorkerSet")
    }


def _as_deployment(group: Document) -> Document:
    spec = {"replicas": group["spec"]["replicas"], "template": template_of(group)}
    return {**group, "spec": spec}


def template_of(document: Document) -> Document:
    """The template of its pods; in a group, of all but the first."""
    return templates_of(document)[-1]


def templates_of(document: Document) -> list[Document]:
    """The templates of its pods; a group may have one for its first pod, which is then first."""
    group = document["spec"].get("leaderWorkerTemplate")
    if group is None:
        return [document["spec"]["template"]]
    return [group[name] for name in ("leaderTemplate", "workerTemplate") if name in group]


def role_of(container: Document) -> str:
    """The role of a container, by its image and its command."""
    name = re.fullmatch(r"localhost/effuse-(\w+):[\d.]+", container["image"])
    assert name is not None
    command = container.get("command", [f"effuse-{name[1]}"])[0]
    return str(command.removeprefix("effuse-"))


def config_of(container: Document, files: Path) -> Access:
    """The configuration that a container's flags give; mounted files are found below `files`."""
    kinds: dict[str, type[Access]] = {
        "router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig,
        "worker": BothConfig,
    }  # fmt: skip
    words = [expanded(one, container) for one in container["args"]]
    for mount in container["volumeMounts"]:
        words = [one.replace(f"={mount['mountPath']}", f"={files}") for one in words]
    return parse(kinds[role_of(container)], words, prog="container", about="")


def expanded(word: str, container: Document) -> str:
    """An argument with the values of the container's variables, as far as they are known."""
    known = {"FLEET": "effuse", "MODEL": MODEL, "POD_NAME": "pod-7", "POD_IP": "192.0.2.7"}
    known |= OF_GROUPS
    names = {one["name"] for one in container.get("env", ())} | OF_GROUPS.keys()
    used = set(re.findall(r"\$\((\w+)\)", word))
    assert used <= names & known.keys(), word
    return re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word)
