"""The result of an overlay, with the few features of kustomize that the manifests here use.

Resources, components, patches (operations from a file, a deletion, or a test that always fails) and
replicas; no labels.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from effuse.config.access import Access
from effuse.config.flags import parse
from effuse.router.config import RouterConfig
from effuse.worker.config import DecodeConfig, PrefillConfig

K8S = Path(__file__).parent.parent.parent / "k8s"
Document = dict[str, Any]
Documents = dict[tuple[str, str], Document]  # by kind and name


def overlays() -> list[str]:
    """Names of all overlays."""
    return sorted(path.name for path in (K8S / "overlays").iterdir())


def overlay(name: str, *components: str) -> Documents:
    """Every document of an overlay, which takes these components, too."""
    found: Documents = {}
    _build(K8S / "overlays" / name, found)
    for component in components:
        _build(K8S / "components" / component, found)
    return found


def deployments(name: str, *components: str) -> dict[str, Document]:
    """Its Deployments by their names."""
    found = overlay(name, *components).items()
    return {name: document for (kind, name), document in found if kind == "Deployment"}


def role_of(container: Document) -> str:
    """The role of a container, by its image."""
    name = re.fullmatch(r"localhost/effuse-(\w+):[\d.]+", container["image"])
    assert name is not None
    return name[1]


def config_of(container: Document, files: Path) -> Access:
    """The configuration that a container's flags give; mounted files are found below `files`."""
    kinds: dict[str, type[Access]] = {
        "router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig
    }  # fmt: skip
    words = [re.sub(r"\$\(\w+\)", "pod-7", one) for one in container["args"]]
    for mount in container["volumeMounts"]:
        words = [one.replace(f"={mount['mountPath']}", f"={files}") for one in words]
    return parse(kinds[role_of(container)], words, prog="container", about="")


def _build(directory: Path, found: Documents) -> None:
    """Adds a folder's documents and applies its patches."""
    asked = yaml.safe_load((directory / "kustomization.yaml").read_text())
    for resource in asked.get("resources", ()):
        path = directory / resource
        if path.is_dir():
            _build(path, found)
            continue
        for document in yaml.safe_load_all(path.read_text()):
            found[document["kind"], document["metadata"]["name"]] = document
    for component in asked.get("components", ()):
        _build(directory / component, found)
    for patch in asked.get("patches", ()):
        _patch(directory, patch, found)
    for replicas in asked.get("replicas", ()):
        found["Deployment", replicas["name"]]["spec"]["replicas"] = replicas["count"]


def _patch(directory: Path, patch: Document, found: Documents) -> None:
    target = patch["target"]
    wanted = [
        (kind, name)
        for kind, name in found
        if re.fullmatch(target["kind"], kind) and re.fullmatch(target.get("name", ".*"), name)
    ]
    inline = yaml.safe_load(patch.get("patch", ""))
    if isinstance(inline, list):
        (refusal,) = inline
        assert refusal["op"] == "test"
        assert not wanted, refusal["path"]
        return
    assert wanted, f"{directory}: nothing is meant by {target}"
    if inline is not None:
        assert inline["$patch"] == "delete"
        for key in wanted:
            del found[key]
        return
    for key in wanted:
        for operation in yaml.safe_load((directory / patch["path"]).read_text()):
            _operate(found[key], operation)


def _operate(document: Document, operation: Document) -> None:
    """One operation of a JSON patch; its target must exist, as kustomize also requires."""
    steps = operation["path"].removeprefix("/").split("/")
    *way, last = (step.replace("~1", "/") for step in steps)
    place: Any = document
    for step in way:
        place = place[int(step) if isinstance(place, list) else step]
    at = int(last) if isinstance(place, list) and last != "-" else last
    if operation["op"] == "test":
        assert place[at] == operation["value"], operation
    elif operation["op"] == "add" and at == "-":
        place.append(operation["value"])
    elif operation["op"] == "add" or at in place or isinstance(at, int):
        place[at] = operation["value"]
    else:
        raise AssertionError(f"there is no {operation['path']} to replace")
