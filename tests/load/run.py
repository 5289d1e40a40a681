"""`make load`: `effuse up`, ghz against it, once unary and once streaming, and a verdict.

Every call must end well. Afterwards the fleet must be as after a first, small load: no page and no
request held, as many tasks and descriptors, about as much memory in each process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from load.up import UpError, running

from effuse.cli import check_ghz

HERE = Path(__file__).parent
FLEET = ("--prefill", "1", "--decode", "1", "--gpu-sharing")
Totals: TypeAlias = Mapping[str, int | None]
CALLS_A_SECOND = 10  # fewer count as hanging


def main() -> int:
    parser = argparse.ArgumentParser(prog="make load", description=__doc__, allow_abbrev=False)
    parser.add_argument("--ghz", type=Path, required=True, help="the ghz binary")
    parser.add_argument("--target", help="HOST:PORT of a running fleet; one is started if absent")
    parser.add_argument("--prefill", default="1", help="prefill workers")
    parser.add_argument("--decode", default="1", help="decode workers")
    parser.add_argument("--unary", type=int, help="unary calls (default: those of unary.json)")
    parser.add_argument("--stream", type=int, help="streams (default: those of stream.json)")
    found = parser.parse_args()
    totals = {"unary": found.unary, "stream": found.stream}
    try:
        if found.target:
            faults = load(found.ghz, found.target, totals)
        else:
            flags = (*FLEET, "--prefill", found.prefill, "--decode", found.decode)
            faults = load_of_its_own(found.ghz, flags, totals)
    except UpError as error:
        faults = [str(error)]
    for fault in faults:
        print(f"make load: {fault}", file=sys.stderr)
    return 1 if faults else 0


def load_of_its_own(ghz: Path, flags: Sequence[str], totals: Totals) -> list[str]:
    """Start a fleet with `effuse up`, load it, end it; returns the faults. Raises UpError."""
    with running(flags) as up:
        print(up.greeting, flush=True)
        faults = load(ghz, up.address, {})
        before = up.baseline()
        faults += load(ghz, up.address, totals)
        held = up.held()
        after = up.baseline()
        print("afterwards no page and no request is held" if not held else "", flush=True)
        for line in after.told(before):
            print(line, flush=True)
    return faults + held + after.faults(before)


def load(ghz: Path, target: str, totals: Totals) -> list[str]:
    """Run both configurations against a router, with as many calls as in `totals`; returns the
    faults.
    """
    faults = []
    with tempfile.TemporaryDirectory() as out:
        for name in ("unary", "stream"):
            config, told = HERE / f"{name}.json", Path(out) / f"{name}.json"
            asked = json.loads(config.read_text())
            total = totals.get(name) or asked["total"]
            command = [str(ghz), "--config", str(config), "--total", str(total)]
            command += ["--format", "json", "--output", str(told), target]
            subprocess.run(command, check=True, timeout=60 + total / CALLS_A_SECOND)
            run = check_ghz.read(told)
            print(f"{asked['call']}: {run.line()}", flush=True)
            limits = check_ghz.make_parser().parse_args([str(told), "--count", str(total)])
            faults += check_ghz.faults(run, limits)
    return faults


if __name__ == "__main__":
    sys.exit(main())
