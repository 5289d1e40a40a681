"""The page for operators names every metric, every flag and every status that there is."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from effuse.decode_worker.config import DecodeConfig
from effuse.placement.records import Link, Load, Quarantine
from effuse.prefill_worker.config import PrefillConfig
from effuse.protos import errors
from effuse.router.config import RouterConfig
from effuse.worker.metrics import WorkerMetrics, render

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "operations.md").read_text()


def _shown(name: str) -> bool:
    return re.search(rf"`{re.escape(name)}[`{{]", PAGE) is not None


def test_every_metric_of_a_worker_is_told() -> None:
    metrics = WorkerMetrics()
    metrics.finished["stop"] += 1
    held = [Quarantine("host:1", 4, 1.0)]
    text = render(metrics, Load(), 0, 0, [Link("d", "1", "cma", 1.0)], held)
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert len(names) > 12
    assert not [name for name in names if not _shown(name)]


def test_every_metric_of_a_router_is_told() -> None:
    source = "".join(path.read_text() for path in (ROOT / "router").glob("*.py"))
    gauges = re.findall(r'gauge\(\s*"(\w+)"', source)
    others = re.findall(r'"(effuse_[a-z_]+)"', source)
    assert len(gauges) >= 5 and len(others) >= 5
    names = {f"effuse_{name}" for name in gauges} | set(others)
    assert not [name for name in names if not _shown(name) and not _shown(f"{name}_total")]


def test_every_flag_is_told() -> None:
    fields = [
        field for one in (DecodeConfig, PrefillConfig, RouterConfig) for field in _fields(one)
    ]
    assert not [name for name in fields if not _shown(f"--{name.replace('_', '-')}")]


def _fields(config: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def test_every_status_is_told() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    codes = {
        one.code.name
        for one in kinds
        if issubclass(one, errors.EffuseError) and one is not errors.CallerError
    }
    assert len(codes) > 8
    assert not [code for code in codes if f"| {code} |" not in PAGE]


def test_every_reason_is_told_with_its_status() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    reasons = {
        (one.reason, one.code.name)
        for one in kinds
        if issubclass(one, errors.EffuseError)
        and one not in (errors.EffuseError, errors.CallerError)
    }
    assert reasons == set(re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \|", PAGE, re.MULTILINE))


def test_every_log_line_it_explains_is_written_somewhere() -> None:
    """Its fixed parts, between `..`, stand among the texts of one file."""
    table = PAGE.split("## What logs say")[1].split("\n## ")[0]
    lines = [line for cell in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
             for line in re.findall(r"`(.+?)`", cell)]  # fmt: skip
    assert len(lines) > 10
    texts = ["\n".join(_texts(path)) for path in (ROOT / "src/effuse").glob("*/*.py")]
    parts = {line: [part.strip() for part in line.split("..") if part.strip()] for line in lines}
    assert not [
        line for line, fixed in parts.items() if not any(all(p in t for p in fixed) for t in texts)
    ]


def _texts(path: Path) -> Iterator[str]:
    """The strings of a module, docstrings left out."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree)
                  if isinstance(node, documented) and node.body
                  and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield str(node.value)
