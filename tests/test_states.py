"""The page of state diagrams shows the tables as they are, each event of each state once."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from effuse.kvtransfer import handoff, pool
from effuse.placement import leases as lease
from effuse.router import request_states

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "states.md").read_text()
DIAGRAMS = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
ARROW = re.compile(r"^ {4}(\w+) --> (\w+) : ([^/\n]+?)(?: / (.+))?$", re.MULTILINE)
TABLES: dict[str, Mapping[Any, Any]] = {
    "request": request_states.TRANSITIONS,
    "page": pool.TRANSITIONS,
    "receiver": handoff.RECEIVER,
    "sender": handoff.SENDER,
    "lease": lease.TRANSITIONS,
}


def test_the_page_is_what_the_tables_give() -> None:
    command = [sys.executable, "-P", str(DOCS / "states.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == PAGE, "docs/states.md is stale: run `make states`"


@pytest.mark.parametrize("number", range(len(TABLES)), ids=list(TABLES))
def test_a_diagram_read_back_is_its_table(number: int) -> None:
    """Parsed by other code than wrote it, so that a lost or a wrong arrow is seen."""
    table = list(TABLES.values())[number]
    drawn = {
        (state, event, after, done)
        for state, after, events, done in ARROW.findall(DIAGRAMS[number])
        for event in events.split(", ")
    }
    assert drawn == {_row(state, event, step) for (state, event), step in table.items()}
    assert len(DIAGRAMS) == len(TABLES)


def _row(state: Enum, event: Enum, step: Any) -> tuple[str, str, str, str]:
    after, actions = step if isinstance(step, tuple) else (step, ())
    words = (one.name.lower().replace("_", " ") for one in (event, *actions))
    return state.name.lower(), next(words), after.name.lower(), ", ".join(words)
