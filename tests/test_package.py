"""What is installed is what is tracked, and importing it is what is declared."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Import name to the distribution that brings it, where the two differ.
DISTRIBUTIONS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "prometheus_client": "prometheus-client",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
# Part of torch's or the interpreter's own installation, or ours.
LINKS = [path for path in (ROOT / "src/effuse").iterdir() if path.is_symlink()]
GIVEN = {"effuse"} | set(sys.stdlib_module_names)


NOT_IN_THE_WHEEL = {"benchmarks", "training"}
WIRE = {"compat", "v1"}  # packages of stubs, which lie below protos


def _tracked() -> list[str]:
    told = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [name for name in told.splitlines() if (ROOT / name).is_file()]


def _folders() -> dict[str, str]:
    """Folder in the checkout to its place in the wheel."""
    packages = PROJECT["tool"]["setuptools"]["packages"]
    names = [package.removeprefix("effuse.") for package in packages if package != "effuse"]
    places = {f"protos/effuse/{name}" if name in WIRE else name: f"effuse/{name}" for name in names}
    return {"src/effuse": "effuse"} | places


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel built from the tracked files and nothing else."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    for name in _tracked():
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    for link in LINKS:
        (source / link.relative_to(ROOT)).symlink_to(link.readlink())
    command = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation"]
    done = subprocess.run(
        [*command, "--outdir", str(out), str(source)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_tracked_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    expected = set()
    for folder, place in _folders().items():
        for name in _tracked():
            path = Path(name)
            inside = path.parent == Path(folder) or name.startswith("models/bundled/")
            if inside and path.is_relative_to(folder):
                expected.add(f"{place}/{path.relative_to(folder)}")
        if folder == "protos":  # the .proto files and stubs are packages of their own
            expected = {name for name in expected if not name.startswith("effuse/protos/effuse")}
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert expected == held


def test_every_folder_of_code_is_a_package() -> None:
    folders = {str(Path(name).parent) for name in _tracked() if name.endswith("/__init__.py")}
    source = {folder for folder in folders if not folder.startswith("tests")}
    assert source == set(_folders()) | NOT_IN_THE_WHEEL


def test_every_folder_of_code_has_its_link() -> None:
    """An editable install puts `src` on the path, where type checkers and editors follow them."""
    targets = {str(link.resolve().relative_to(ROOT)) for link in LINKS}
    assert targets == (set(_folders()) | NOT_IN_THE_WHEEL) - {"src/effuse"}
    assert all(not link.readlink().is_absolute() for link in LINKS)


def test_every_package_is_typed() -> None:
    assert not [folder for folder in _folders() if not (ROOT / folder / "py.typed").is_file()]


def test_every_import_is_declared() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    base = _names(PROJECT["project"]["dependencies"])
    light = {"router", "placement", "protos"}
    for folder in {*_folders(), *NOT_IN_THE_WHEEL}:
        allowed = base if folder in light else base | _names(extras["worker"])
        allowed = allowed | _names(extras["plot"]) if folder == "cli" else allowed
        allowed = allowed | {"opentelemetry"} if folder == "telemetry" else allowed
        allowed = allowed | _names(extras["dev"]) if folder == "benchmarks" else allowed
        allowed = allowed | _names(extras["plot"]) if folder == "cli" else allowed
        for name in _tracked():
            if Path(name).parent == Path(folder) and name.endswith(".py"):
                missing = _imports(ROOT / name) - allowed
                assert not missing, f"{name} imports {missing}"


def test_every_requirement_is_imported() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    names = [name for name in _tracked() if name.endswith(".py") and not name.startswith("tests/")]
    imported = {one for name in names for one in _imports(ROOT / name)}
    # google.rpc comes from a distribution of its own, though its root is protobuf's.
    imported |= {"googleapis-common-protos", "httptools"}  # uvicorn imports the latter by itself
    assert not _names(PROJECT["project"]["dependencies"] + extras["worker"]) - imported


def test_a_class_has_a_name_of_its_own() -> None:
    """One name for one thing, so that a word in a traceback leads to one place."""
    homes: dict[str, list[str]] = {}
    for name in _tracked():
        if name.endswith(".py") and str(Path(name).parent) in _folders() and "_pb2" not in name:
            for node in ast.parse((ROOT / name).read_text()).body:
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name, []).append(name)
    shared = {name: files for name, files in homes.items() if len(files) > 1}
    assert "DecodeSettings" in homes and not shared, shared


def test_the_checkout_is_not_on_the_import_path() -> None:
    assert str(ROOT) not in sys.path
    assert "" not in sys.path


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=;\[ ]", one)[0].lower() for one in requirements}


def _imports(path: Path) -> set[str]:
    """Distributions that a module imports."""
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.split(".")[0])
    return {DISTRIBUTIONS.get(root, root).lower() for root in roots - GIVEN}
