"""`make load`: `effuse up`, ghz against it, once unary and once streaming, and a verdict.

Every call must end well; the fleet must hold no page and no request afterwards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from load.up import UpError, running

from effuse.cli import check_ghz

HERE = Path(__file__).parent
FLEET = ("--prefill", "1", "--decode", "1", "--gpu-sharing")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make load", description=__doc__, allow_abbrev=False)
    parser.add_argument("--ghz", type=Path, required=True, help="the ghz binary")
    parser.add_argument("--target", help="HOST:PORT of a running fleet; one is started if absent")
    found = parser.parse_args()
    try:
        faults = load(found.ghz, found.target) if found.target else load_of_its_own(found.ghz)
    except UpError as error:
        faults = [str(error)]
    for fault in faults:
        print(f"make load: {fault}", file=sys.stderr)
    return 1 if faults else 0


def load_of_its_own(ghz: Path) -> list[str]:
    """Start a fleet with `effuse up`, load it, end it; what went wrong. Raises UpError."""
    with running(FLEET) as up:
        print(up.greeting, flush=True)
        faults = load(ghz, up.address)
        held = up.held()
        print("afterwards no page and no request is held" if not held else "", flush=True)
    return faults + held


def load(ghz: Path, target: str) -> list[str]:
    """Run both configurations against a router; what went wrong."""
    faults = []
    with tempfile.TemporaryDirectory() as out:
        for name in ("unary", "stream"):
            config, told = HERE / f"{name}.json", Path(out) / f"{name}.json"
            command = [str(ghz), "--config", str(config), "--format", "json"]
            subprocess.run([*command, "--output", str(told), target], check=True, timeout=300)
            run, asked = check_ghz.read(told), json.loads(config.read_text())
            print(f"{asked['call']}: {run.line()}", flush=True)
            faults += check_ghz.faults(run, check_ghz.GhzLimits(count=asked["total"]))
    return faults


if __name__ == "__main__":
    sys.exit(main())
