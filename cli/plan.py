"""`effuse plan`: how many workers should prefill and decode, and why.

Times and load are those of a running fleet, or of a file that `effuse plan --json` wrote. Flags
replace parts of the load and the objectives.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from effuse.cli.arguments import (
    add_router,
    calling,
    client_of,
    command,
    credentials_of,
    file,
    number,
    seconds,
    text,
    whole,
)
from effuse.config.checks import UNREADABLE
from effuse.config.flags import CommandError
from effuse.config.words import plain
from effuse.placement.records import U32
from effuse.protos.channels import fields_of
from effuse.router.planner import (
    HEADROOM,
    Objectives,
    Planner,
    Split,
    Times,
    Workload,
)
from effuse.router.policy import PrefillMode
from effuse.router.reasons import needed, reasons
from effuse.v1 import monitor_pb2

_LOAD = ("rate", "prompt", "answer")
_OBJECTIVES = ("first_block_s", "gap_s", "gap_ratio")


class Sheet(Struct, frozen=True):
    """The inputs of a plan, and its results when it is written. It ignores unknown fields."""

    times: Times
    model: str = ""
    workload: Workload | None = None
    objectives: Objectives = Objectives()
    mode: PrefillMode = "auto"
    workers: U32 = 0  # that there are; 0 if that is not known
    roles: Split | None = None
    desired: Split | None = None
    lines: tuple[str, ...] = ()


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    asked = parser.parse_args(argv)
    shown = credentials_of(parser, asked)
    if asked.times is not None:
        sheets = read_sheets(asked.times)
    else:
        with calling(asked.target), client_of(asked.target, shown, asked.timeout) as client:
            sheets = [_sheet_of(one) for one in client.plans()]
    sheets = [planned(one, asked) for one in _chosen(sheets, asked.model, asked.times)]
    if asked.json:
        print(json.dumps(msgspec.to_builtins(sheets), indent=1))
    else:
        heads = [f"{one.model}:" if one.model else "the plan:" for one in sheets]
        texts = ("\n  ".join([head, *one.lines]) for head, one in zip(heads, sheets, strict=True))
        print("\n\n".join(texts))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = command("plan", "Show how many workers should prefill and decode, and why.")
    add = parser.add_argument
    add("--times", type=file, metavar="FILE",
        help="measured times, from effuse plan --json (default: the fleet's)")  # fmt: skip
    positive = number(0, 1e9, open_left=True)
    add("--rate", type=number(0, 1e9), metavar="X",
        help="requests a second (default: the present load)")  # fmt: skip
    add("--prompt", type=positive, metavar="N",
        help="mean tokens of a prompt (default: the present load's)")  # fmt: skip
    add("--output", dest="answer", type=positive, metavar="N",
        help="mean tokens of an answer (default: the present load's)")  # fmt: skip
    add("--workers", type=whole(1, 1 << 20), metavar="N",
        help="workers to plan for (default: the present ones)")  # fmt: skip
    add("--first-block-within", dest="first_block_s", type=seconds, metavar="S",
        help="longest time to the first block (default: the router's objective)")  # fmt: skip
    add("--gap-within", dest="gap_s", type=seconds, metavar="S",
        help="longest gap between blocks (default: the router's objective)")  # fmt: skip
    add("--gap-ratio", type=number(1, 1000), metavar="X",
        help="the same, over the shortest measured (default: the router's objective)")  # fmt: skip
    add("--model", type=text, metavar="NAME", help="only this model (default: all)")
    add("--json", action="store_true", help="print times, load and plans as JSON")
    add_router(parser, has_timeout=True)
    return parser


def read_sheets(path: Path) -> list[Sheet]:
    """The sheets in a file: one JSON object, or a list of them. Raises OSError and CommandError
    that names the file and the bad field."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Sheet | list[Sheet])
    except UNREADABLE as error:
        raise CommandError(f"{path}: {error}") from error
    return [replace(one, lines=()) for one in (found if isinstance(found, list) else [found])]


def planned(sheet: Sheet, asked: argparse.Namespace) -> Sheet:
    """The sheet with these flags, and the plans that follow from it; raises CommandError."""
    given = {name: getattr(asked, name) for name in (*_LOAD, *_OBJECTIVES, "workers")}
    given = {name: value for name, value in given.items() if value is not None}
    if sheet.lines and not given:
        return sheet
    if not sheet.times.are_known:
        raise CommandError(
            "times: expected at least one entry in prompts and one in answers, which a fleet has "
            "once it has answered some requests"
        )
    known = {} if sheet.workload is None else msgspec.structs.asdict(sheet.workload)
    load = known | {name: given[name] for name in _LOAD if name in given}
    if lacking := [name for name in _LOAD if name not in load]:
        flags = ", ".join(f"--{name}".replace("answer", "output") for name in lacking)
        raise CommandError(f"{flags}: expected, because the times come without a load")
    bounds = {name: given[name] for name in _OBJECTIVES if name in given}
    sheet = replace(
        sheet,
        workload=Workload(**load),
        objectives=replace(sheet.objectives, **bounds),
        workers=given.get("workers", sheet.workers),
    )
    return _with_plans(sheet)


def _with_plans(sheet: Sheet) -> Sheet:
    assert sheet.workload is not None
    planner = Planner(sheet.times, sheet.workload, sheet.objectives, sheet.mode)
    rate = max(1e-6, sheet.workload.rate) / HEADROOM
    try:
        desired = planner.within_cost(rate).least(rate)
    except ValueError as error:
        raise CommandError(f"--rate {plain(sheet.workload.rate)}: {error}") from error
    roles = planner.within_reach(sheet.workers).best(sheet.workers) if sheet.workers else None
    lines = [
        *reasons(planner, roles or desired),
        needed(desired),
    ]
    return replace(sheet, roles=roles, desired=desired, lines=tuple(lines))


def _chosen(sheets: Sequence[Sheet], model: str | None, path: Path | None) -> list[Sheet]:
    """Those of this model, or of all; `path` is the file that has them, if one has."""
    found = [one for one in sheets if model in (None, one.model)]
    if not sheets and path is not None:
        raise CommandError(f"{path}: expected at least one plan, got an empty list")
    if not found and path is not None:
        names = ", ".join(sorted({repr(one.model) for one in sheets}))
        raise CommandError(f"--model: expected a model of {path} ({names}), got {model!r}")
    if not found and model is not None:
        raise CommandError(f"--model: expected a model that had requests, got {model!r}")
    if not found:
        raise CommandError("there is no plan yet, because this router has answered no requests")
    return found


def _sheet_of(plan: monitor_pb2.ModelPlan) -> Sheet:
    found = fields_of(plan)
    found["workers"] = plan.roles.prefill + plan.roles.decode
    found["mode"] = plan.mode or "auto"
    return msgspec.convert({"times": {}} | found, Sheet)
