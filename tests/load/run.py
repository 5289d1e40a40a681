"""`make load`: a fleet, ghz against it, once unary and once streaming, and a verdict.

Every call must end well; the fleet must hold no page and no request afterwards.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from load import report

from effuse.cli.fleet import Fleet, FleetConfig, FleetError

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="make load", description=__doc__, allow_abbrev=False)
    parser.add_argument("--ghz", type=Path, required=True, help="the ghz binary")
    parser.add_argument("--target", help="HOST:PORT of a running fleet; one is started if absent")
    found = parser.parse_args()
    if found.target is not None:
        return load(found.ghz, found.target)
    try:
        with Fleet(FleetConfig(prefill=1, decode=1)) as fleet:
            print(f"a fleet is ready on {fleet.address} after {fleet.ready_s:.1f} s", flush=True)
            status = load(found.ghz, fleet.address)
            ended = fleet.dead()
    except FleetError as error:
        print(f"make load: {error}", file=sys.stderr)
        return 1
    for process in ended:
        print(f"make load: {process.ending()}", file=sys.stderr)
    return status or len(ended)


def load(ghz: Path, target: str) -> int:
    """Run both configurations; 0 where no call failed."""
    faults = []
    with tempfile.TemporaryDirectory() as out:
        for name in ("unary", "stream"):
            config, told = HERE / f"{name}.json", Path(out) / f"{name}.json"
            command = [str(ghz), "--config", str(config), "--format", "json"]
            subprocess.run([*command, "--output", str(told), target], check=True, timeout=300)
            run = report.read(told, config)
            print(run.line(), flush=True)
            faults += run.faults()
    for fault in faults:
        print(f"make load: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
