"""A release has one version in all places, and its check finds each that differs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import release_check as check

ROOT = Path(__file__).parent.parent


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_version_is_the_same_everywhere() -> None:
    assert check.faults(ROOT, check.project_version(ROOT)) == []


def test_a_version_that_is_only_in_one_place_is_named(copy: Path) -> None:
    (copy / "k8s/chart").mkdir(exist_ok=True)
    (copy / "k8s/chart/Chart.yaml").write_text('version: 9.9.9\nappVersion: "9.9.8"\n')
    found = check.faults(copy, "9.9.9")
    assert "CHANGELOG.md: the first heading is not '## 9.9.9 (YYYY-MM-DD)'" in found
    named = {one.split(":")[0] for one in found if ": has " in one}
    assert "k8s/chart/Chart.yaml: has 9.9.8, not 9.9.9" in found
    assert {"k8s/base/router.yaml", "k8s/Dockerfile.worker", "k8s/README.md"} <= named


@pytest.mark.parametrize("day", ["not released yet", "today", "2026-99-99"])
def test_a_release_without_a_day_is_refused(copy: Path, day: str) -> None:
    log, version = copy / "CHANGELOG.md", check.project_version(copy)
    log.write_text(f"# Changes\n\n## {version} ({day})\n\n- x\n")
    assert len(check.faults(copy, version)) == 1


def test_changes_are_few(copy: Path) -> None:
    log, version = copy / "CHANGELOG.md", check.project_version(copy)
    for lines, faults in ((100, 0), (200, 1)):
        log.write_text(
            f"# Changes\n\n## {version} (2026-11-26)\n" + "- x\n" * lines + "\n## 0.1.0\n"
        )
        assert len(check.faults(copy, version)) == faults
