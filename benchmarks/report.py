"""Figures beside their limits: one table, one JSON file, one exit status.

A benchmark measures a figure and its limit in the same run and gives both to a ``Report``. This
file measures nothing.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value and the bound it must keep.

    ``against`` describes ``limit`` and its source; ``bound`` is the side of it on which the value
    must be.
    """

    name: str
    value: float
    limit: float
    unit: str
    bound: Literal["at most", "at least"]
    against: str

    @property
    def holds(self) -> bool:
        """Whether the value lies on the right side of its limit."""
        if self.bound == "at most":
            return self.value <= self.limit
        return self.value >= self.limit


@dataclass(slots=True)
class Report:
    """The figures of one run, with its machine."""

    title: str
    settings: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        """Adds a figure."""
        self.figures.append(figure)

    def print(self) -> None:
        """Draws the table on standard output."""
        table = Table(title=self.title)
        for heading in ("figure", "measured", "bound", "against", "holds"):
            table.add_column(heading, overflow="fold")
        for figure in self.figures:
            table.add_row(
                figure.name,
                f"{figure.value:.3g} {figure.unit}",
                f"{figure.bound} {figure.limit:.3g} {figure.unit}",
                figure.against,
                "yes" if figure.holds else "NO",
            )
        console = Console(width=140)
        console.print(table)
        for key, value in (self.settings | machine()).items():
            console.print(f"{key}: {value}")
        for note in self.notes:
            console.print(note)

    def write(self, path: Path) -> None:
        """Writes the run as JSON, with the machine and the date."""
        content = {
            "title": self.title,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "settings": self.settings,
            "figures": [asdict(figure) | {"holds": figure.holds} for figure in self.figures],
            "notes": self.notes,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")

    @property
    def exit_status(self) -> int:
        """0 if every figure holds."""
        return 0 if all(figure.holds for figure in self.figures) else 1


def machine() -> dict[str, str]:
    """The machine of the run."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
