"""The page for operators names every metric, every flag and every status that there is."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from every_metric import router_metrics, scraped_name, worker_metrics

from effuse.protos import errors
from effuse.router.config import RouterConfig
from effuse.telemetry.metrics import ProcessMetrics
from effuse.worker.config import DecodeConfig, PrefillConfig

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "operations.md").read_text()


def _shown(name: str) -> bool:
    return re.search(rf"`{re.escape(name)}[`{{]", PAGE) is not None


@pytest.mark.parametrize("metrics", [worker_metrics(), router_metrics()])
def test_every_metric_is_told(metrics: ProcessMetrics) -> None:
    names = {scraped_name(one) for one in metrics.families() if one.name.startswith("effuse_")}
    assert len(names) > 20
    assert not [name for name in names if not _shown(name)]


def test_every_metric_that_is_told_is_there() -> None:
    """In the tables, whose rows begin with their names."""
    cells = "".join(re.findall(r"^\| (`effuse.+?) \|", PAGE, re.MULTILINE))
    told = set(re.findall(r"`(effuse_[a-z0-9_]+)", cells))
    families = [*worker_metrics().families(), *router_metrics().families()]
    assert told - {scraped_name(one) for one in families} == set()


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
