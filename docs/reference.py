"""Writes docs/reference/, the pages generated from code: `reference.py [--check] [FOLDER]`.

Flags come from the parsers, metrics from the registries, errors from their classes, services from
the .proto files, and the Python API from signatures and docstrings. With `--check` it writes
nothing and names the stale pages. It imports tests/every_metric.py, so tests/ is on the path.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Final

from every_metric import router_metrics, scraped_name, worker_metrics
from prometheus_client.metrics_core import Metric

import effuse
from effuse.cli.__main__ import COMMANDS, find
from effuse.client.answer import Logprob, Stats
from effuse.client.chat import Message
from effuse.client.streams import AsyncStream, Stream
from effuse.config.flags import HelpWithDefaults, add_flags, make_parser
from effuse.offline.llm import EngineOptions, GroupOptions
from effuse.protos import errors
from effuse.router.config import RouterConfig
from effuse.router.openai_answers import error_body, status_of
from effuse.telemetry.metrics import PREFIX, ProcessMetrics
from effuse.worker.config import BothConfig, DecodeConfig, PrefillConfig, WorkerConfig

ROOT: Final = Path(__file__).parent.parent
FOLDER: Final = ROOT / "docs/reference"
TYPES: Final = {"N": "whole number", "X": "number", "PATH": "path", "NAME": "text"}
"""Types of fields, by the names that the parsers of processes give to their values."""
PROCESSES: Final = (
    "from `router/config.py`, `worker/config.py` and `config/access.py`. `effuse up` takes most of "
    "these flags too and passes them on. A flag without its dashes is a key in the TOML file that "
    "`--config FILE` names: `page-size = 16`. A typed flag has precedence. A switch takes `true` "
    "or `false` in the file, and `--no-` before its name turns it off."
)
COMMAND_LINE: Final = (
    "from the parsers in `cli/`. `effuse up` also takes the [flags of the processes](processes.md) "
    "that it starts."
)
METRICS: Final = (
    "from `router/metrics.py`, `router/router.py` and `worker/shell.py`. [Running "
    "effuse](../operations.md) lists those to watch. A histogram `x` has the samples `x_bucket`, "
    "`x_sum` and `x_count`. On Linux each process also has the `process_` metrics of "
    "prometheus_client."
)
ERRORS: Final = (
    "from `protos/errors.py` and `router/openai_answers.py`. Every gRPC status carries a "
    "`google.rpc.ErrorInfo`: `reason`, the domain `effuse`, and `retryable` in its metadata. One "
    "error may differ from the usual `retryable` of its class. The column HTTP has the status of "
    "OpenAI's HTTP API and the `type` in its body; `code` there is the reason in small letters. "
    "[Running effuse](../operations.md) describes remedies."
)
GIVEN: Final = (Message, Stream, AsyncStream, Stats, Logprob, EngineOptions, GroupOptions)
"""Types that the public classes take and return."""
PROTOS: Final = {
    "effuse/v1/generation": "Generation: prompts and answers",
    "effuse/v1/model": "Models, workers and tokenizers",
    "effuse/v1/monitor": "Running requests",
    "effuse/v1/worker": "Inside a fleet: workers",
    "effuse/v1/proof": "Inside a fleet: the proof of the secret",
    "effuse/compat/vllm_engine": "vLLM's engine protocol",
    "effuse/compat/kserve": "KServe's inference protocol",
}
RPC: Final = re.compile(
    r"((?: *//.*\n)*) *rpc (\w+)\((stream )?([\w.]+)\) returns \((stream )?([\w.]+)\)"
)


def main(argv: Sequence[str]) -> int:
    """Writes the pages, or checks them. Returns 1 if a page is stale, missing, or without code."""
    parser = argparse.ArgumentParser(description="Writes the pages of docs/reference.")
    parser.add_argument("--check", action="store_true", help="write nothing, name stale pages")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="folder of the pages")
    asked = parser.parse_args(argv)
    written = pages()
    if not asked.check:
        asked.folder.mkdir(exist_ok=True)
        for name, text in written.items():
            (asked.folder / name).write_text(text, encoding="utf-8")
        return 0
    there = {path.name: path.read_text(encoding="utf-8") for path in asked.folder.glob("*.md")}
    stale = [one for one in sorted(written | there) if written.get(one) != there.get(one)]
    if stale:
        print(f"stale in {asked.folder}: {', '.join(stale)}; run `make reference`", file=sys.stderr)
    return int(bool(stale))


def pages() -> dict[str, str]:
    """Every page by its file's name, as Markdown."""
    written = {
        "processes.md": _processes(),
        "commands.md": _commands(),
        "metrics.md": _metrics(),
        "errors.md": _errors(),
        "python.md": _python(),
    }
    for name, title in PROTOS.items():
        written[f"proto-{Path(name).name.replace('_', '-')}.md"] = _proto(name, title)
    return written


# ---- flags -----------------------------------------------------------------------------------


def _processes() -> str:
    worker, prefill, decode = map(_names, (WorkerConfig, PrefillConfig, DecodeConfig))
    sections = (
        ("Router: `effuse-router`", RouterConfig, _names(RouterConfig)),
        (
            "Every worker: `effuse-prefill`, `effuse-decode` and `effuse-worker`",
            WorkerConfig,
            worker,
        ),
        ("Work on prompts: `effuse-prefill` and `effuse-worker`", PrefillConfig, prefill - worker),
        ("Work on answers: `effuse-decode` and `effuse-worker`", DecodeConfig, decode - worker),
        ("Only `effuse-worker`", BothConfig, _names(BothConfig) - prefill - decode),
    )
    parts = [_head("Flags of the processes", PROCESSES)]
    for title, config, names in sections:
        parser = make_parser("process", "")
        add_flags(parser, config, only=names)
        rows = ((f"`{_flag(one)}`", _type(one), *_help(one)) for one in _actions(parser))
        parts += [f"## {title}\n", _table(("flag", "type", "default", "meaning"), rows)]
    return "\n".join(parts)


def _commands() -> str:
    parts = [_head("Commands", COMMAND_LINE)]
    for name, (_, about) in COMMANDS.items():
        parts += [f"## effuse {name}\n", f"{about[0].upper()}{about[1:]}.\n"]
        groups = [
            group
            for group in find(name).make_parser()._action_groups
            # which are on the page of the processes
            if not (group.title or "").startswith("flags of")
        ]
        actions = [one for group in groups for one in _actions(group)]
        rows = ((f"`{_spelled(one)}`", *_help(one)) for one in actions)
        parts.append(_table(("argument", "default", "meaning"), rows))
    return "\n".join(parts)


def _names(config: type[Any]) -> set[str]:
    return {one.name for one in fields(config)}


def _actions(group: argparse._ActionsContainer) -> list[argparse.Action]:
    listed = getattr(group, "_group_actions", group._actions)
    return [one for one in listed if not isinstance(one, argparse._HelpAction)]


def _flag(action: argparse.Action) -> str:
    return action.option_strings[0]


def _spelled(action: argparse.Action) -> str:
    """The argument and its value, in the form of usage lines."""
    value = "|".join(map(str, action.choices or ())) or action.metavar or action.dest.upper()
    if action.nargs == 0:
        return _flag(action)
    return f"{_flag(action)} {value}" if action.option_strings else str(value)


def _type(action: argparse.Action) -> str:
    if action.choices:
        return ", ".join(f"`{one}`" for one in action.choices)
    return "switch" if action.nargs == 0 else TYPES[str(action.metavar)]


def _help(action: argparse.Action) -> tuple[str, str]:
    """The default and the meaning of a flag, which are together in its help."""
    text = HelpWithDefaults("")._get_help_string(action).replace("%%", "%")
    meaning, mark, default = text.removesuffix(")").rpartition(" (default: ")
    if mark:
        return default, meaning
    required = text.removesuffix(" (required)")
    return ("required" if required != text else "", required)


# ---- metrics and errors ----------------------------------------------------------------------


def _metrics() -> str:
    parts = [_head("Metrics", METRICS)]
    for title, metrics in (("Router", router_metrics()), ("Workers", worker_metrics())):
        families = [one for one in metrics.families() if one.name.startswith(PREFIX)]
        rows = (
            (f"`{scraped_name(one)}`", one.type, _labels(metrics, one), one.documentation)
            for one in families
        )
        shared = next(one for one in metrics.collect() if one.name == f"{PREFIX}log_lines_dropped")
        labels = ", ".join(f"`{name}`" for name in shared.samples[0].labels)
        parts += [f"## {title}\n", f"Every metric has these labels: {labels}.\n"]
        parts.append(_table(("metric", "type", "labels of its own", "meaning"), rows))
    return "\n".join(parts)


def _labels(metrics: ProcessMetrics, family: Metric) -> str:
    """The names of a metric's labels; a metric without counts shows no sample."""
    holder = metrics.registry._names_to_collectors.get(family.name, family)
    return ", ".join(f"`{name}`" for name in getattr(holder, "_labelnames", ()))


def _errors() -> str:
    kinds = [
        one
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, errors.EffuseError)
    ]
    columns = ("class", "reason", "gRPC", "HTTP", "retryable", "meaning")
    return f"{_head('Errors', ERRORS)}\n{_table(columns, map(_error_row, kinds))}"


def _error_row(kind: type[errors.EffuseError]) -> tuple[str, ...]:
    error = kind([]) if issubclass(kind, errors.InvalidRequest) else kind("")
    return (
        f"`{kind.__name__}`",
        f"`{kind.reason}`",
        kind.code.name,
        f"{status_of(error).value} {error_body(error)['error']['type']}",
        "yes" if kind.retryable else "no",
        " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()),
    )


# ---- services and Python ---------------------------------------------------------------------


def _proto(name: str, title: str) -> str:
    text = (ROOT / f"protos/{name}.proto").read_text(encoding="utf-8")
    parts = [_head(title, f"from `protos/{name}.proto`.")]
    for service in re.finditer(r"^service (\w+) \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        rows = (
            (f"`{rpc}`", f"{one or ''}`{request}`", f"{many or ''}`{response}`", _comment(about))
            for about, rpc, one, request, many, response in RPC.findall(service[2])
        )
        package = re.search(r"^package ([\w.]+);", text, re.MULTILINE)
        parts.append(f"## {package[1] if package else ''}.{service[1]}\n")
        parts.append(_table(("call", "request", "response", "meaning"), rows))
    return "\n".join([*parts, "## The file\n", f"```proto\n{text.strip()}\n```\n"])


def _comment(lines: str) -> str:
    return " ".join(re.findall(r"//\s*(.*)", lines))


def _python() -> str:
    parts = [_head("Python API", "from signatures and docstrings.")]
    for name in effuse.__all__:
        parts += _class(f"effuse.{name}", getattr(effuse, name))
    parts.append("## Types that these take and return\n")
    for kind in GIVEN:
        parts += _class(f"{kind.__module__}.{kind.__name__}", kind, level="###")
    return "\n".join(parts)


def _class(title: str, kind: type[Any], *, level: str = "##") -> Iterator[str]:
    """A class: its fields or its constructor, and its public methods and properties."""
    yield f"{level} {title}\n"
    yield f"{inspect.getdoc(kind)}\n"
    if stated := _stated(kind):
        yield f"```python\n{stated}\n```\n"
    if "__init__" in vars(kind) and not is_dataclass(kind) and kind not in GIVEN:
        yield _entry(_call(kind.__name__, kind), vars(kind)["__init__"])
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield _entry(f"{name} (property)", member)
        elif inspect.isroutine(member):
            owner = f"{kind.__name__}." if isinstance(member, classmethod) else ""
            yield _entry(_call(owner + name, getattr(kind, name)), member)


def _stated(kind: type[Any]) -> str:
    """The fields of a class with their comments, from its source or from the fields."""
    described = [one for one in fields(kind) if one.metadata] if is_dataclass(kind) else []
    if described:
        return "\n".join(map(_described, described))
    lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    (found,) = ast.parse("\n".join(lines)).body
    assert isinstance(found, ast.ClassDef)
    stated = [one for one in found.body if isinstance(one, ast.AnnAssign)]
    rows = range(stated[0].lineno - 1, stated[-1].end_lineno or 0) if stated else ()
    return textwrap.dedent("\n".join(lines[row] for row in rows))


def _described(one: Field[Any]) -> str:
    about, default = one.metadata["about"], {} if one.default is MISSING else one.default
    line = f"{one.name}: {one.type} = {default}"
    beside = f"{line}  # {about}"
    return beside if len(beside) <= 100 else f"# {about}\n{line}"


class _Plain(str):
    """A text that a signature shows without quotes."""

    __repr__ = str.__str__


def _call(name: str, called: Any) -> str:
    signature = inspect.signature(called)
    listed = [
        one.replace(
            annotation=_Plain(one.annotation),
            default=_Plain("Params()") if isinstance(one.default, effuse.Params) else one.default,
        )
        for one in signature.parameters.values()
        if one.name != "self"
    ]
    end = signature.return_annotation
    shown = signature.replace(parameters=listed, return_annotation=_Plain(end))
    awaited = "await " if inspect.iscoroutinefunction(called) else ""
    return f"{awaited}{name}{shown}".removesuffix(" -> None")


def _entry(text: str, described: Any) -> str:
    """Code and, below it, its own docstring."""
    about = textwrap.indent(inspect.cleandoc(described.__doc__ or ""), "    ").strip()
    return f"`{text}`\n\n:   {about}\n" if about else f"`{text}`\n"


def _head(title: str, about: str) -> str:
    note = f"`make reference` writes this page {about}"
    return f"# {title}\n\n{textwrap.fill(note, 120, break_on_hyphens=False)}\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(_cell, one))} |\n" for one in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
