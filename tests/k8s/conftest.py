"""The files that pods mount, for every test of manifests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from k8s.composed import K8S, MODEL

FILES = ("tls.crt", "tls.key", "ca.crt", "credentials", "secret", "keys")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The files of every Secret and ConfigMap, and a model."""
    for name in (MODEL, "Org/M-1"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("router.toml", "workers.toml"):
        shutil.copy(K8S / "components" / "config" / name, tmp_path)
    for name in FILES:
        (tmp_path / name).write_text("0123456789abcdef")
    return tmp_path
