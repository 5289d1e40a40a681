"""The pages of reference are those that the code gives, and name everything that there is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from every_metric import router_metrics, scraped_name, worker_metrics

import effuse
from effuse.cli.__main__ import COMMANDS, find
from effuse.compat import kserve_pb2, vllm_engine_pb2
from effuse.config.flags import Dataclass, add_flags, make_parser
from effuse.protos import errors
from effuse.router.config import RouterConfig
from effuse.v1 import generation_pb2, model_pb2, monitor_pb2, proof_pb2, worker_pb2
from effuse.worker.config import DecodeConfig, PrefillConfig

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "reference"
PROTOS = (
    *(generation_pb2, model_pb2, monitor_pb2, proof_pb2, worker_pb2),
    *(kserve_pb2, vllm_engine_pb2),
)


def _page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def _check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", str(ROOT / "docs/reference.py"), "--check", str(folder)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_no_page_is_stale() -> None:
    done = _check(FOLDER)
    assert done.returncode == 0, done.stderr


def test_a_stale_a_missing_and_a_surplus_page_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "reference"
    shutil.copytree(FOLDER, folder)
    stale = _page("processes").replace("| 50051 |", "| 50052 |")
    assert stale != _page("processes")
    (folder / "processes.md").write_text(stale, encoding="utf-8")
    (folder / "errors.md").unlink()
    (folder / "gone.md").write_text("# Gone\n")
    done = _check(folder)
    assert done.returncode == 1
    assert "errors.md, gone.md, processes.md; run `make reference`" in done.stderr


@pytest.mark.parametrize("config", [RouterConfig, PrefillConfig, DecodeConfig])
def test_every_flag_of_a_process_is_there(config: type[Dataclass]) -> None:
    parser = make_parser("process", "")
    add_flags(parser, config)
    flags = {one.option_strings[0] for one in parser._actions} - {"-h"}
    assert len(flags) > 30
    assert flags <= set(re.findall(r"^\| `(--[\w-]+)` \|", _page("processes"), re.MULTILINE))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_a_command_is_there(name: str) -> None:
    section = _page("commands").split(f"## effuse {name}\n")[1].split("\n## ")[0]
    shown = set(re.findall(r"^\| `(--[\w-]+)", section, re.MULTILINE))
    if name == "up":  # which takes those of processes too
        shown |= set(re.findall(r"^\| `(--[\w-]+)`", _page("processes"), re.MULTILINE))
    actions = [one for one in find(name).make_parser()._actions if one.dest != "help"]
    assert {one.option_strings[0] for one in actions if one.option_strings} <= shown
    assert section.count("\n| ") >= 1 + len([one for one in actions if not one.option_strings])


def test_a_default_and_a_type_are_those_of_the_field() -> None:
    page = _page("processes")
    assert "| `--page-size` | whole number | 16 | tokens in a KV page |" in page
    assert "| `--device` | `auto`, `cpu`, `cuda` | auto | device of the engine |" in page
    assert "| `--enforce-eager` | switch | off | never capture CUDA graphs" in page
    assert "| `--dataset FILE` | required | " in _page("commands")


def test_every_metric_is_there_with_its_labels() -> None:
    rows = set(re.findall(r"^\| `(effuse_\w+)` \| \w+ \| (.*?) \|", _page("metrics"), re.MULTILINE))
    families = [*router_metrics().families(), *worker_metrics().families()]
    names = {scraped_name(one) for one in families if one.name.startswith("effuse_")}
    assert names == {name for name, _ in rows}
    assert ("effuse_requests_total", "`model_name`, `status`") in rows  # a counter without samples
    assert ("effuse_kv_pages", "`state`") in rows  # a gauge that is read


def test_every_error_is_there_with_its_statuses() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\w+) \|", _page("errors"), re.MULTILINE)
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    known = [one for one in kinds if issubclass(one, errors.EffuseError)]
    assert rows == [(one.__name__, one.reason, one.code.name) for one in known]
    for row in (
        "INVALID_REQUEST` | INVALID_ARGUMENT | 400 invalid_request_error | no",
        "OVERLOADED` | RESOURCE_EXHAUSTED | 429 rate_limit_error | yes",
        "TRANSFER_FAILED` | UNAVAILABLE | 503 service_unavailable_error | yes",
    ):
        assert row in _page("errors")


@pytest.mark.parametrize("proto", PROTOS, ids=lambda one: one.__name__)
def test_every_call_and_message_is_there(proto: object) -> None:
    """By the descriptors, which come from protoc and not from the text that the page shows."""
    descriptor = proto.DESCRIPTOR  # type: ignore[attr-defined]
    stem = Path(descriptor.name).stem.replace("_", "-")
    page = _page(f"proto-{stem}")
    for service in descriptor.services_by_name.values():
        table = page.split(f"## {service.full_name}\n")[1].split("\n## ")[0]
        calls = re.findall(
            r"^\| `(\w+)` \| (stream )?`(\w+)` \| (stream )?`(\w+)` \| \S", table, re.M
        )
        assert [(name, one, many) for name, _, one, _, many in calls] == [
            (one.name, one.input_type.name, one.output_type.name) for one in service.methods
        ]
    assert all(f"message {name} {{" in page for name in descriptor.message_types_by_name)


@pytest.mark.parametrize("name", effuse.__all__)
def test_every_public_name_is_there_with_its_calls(name: str) -> None:
    section = _page("python").split(f"## effuse.{name}\n")[1].split("\n## ")[0]
    public = [one for one in vars(getattr(effuse, name)) if not one.startswith("_")]
    assert all(re.search(rf"\b{one}\b", section) for one in public)
    assert "Initialize self" not in section


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(one.relative_to(ROOT)) for one in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(named)
    made = "docs/internals/"  # while the site is built
    assert not [one for one in named if not (one.startswith(made) or (ROOT / one).is_file())]
