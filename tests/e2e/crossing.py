"""Which of effuse's files one request crosses, router to router: those of which a function runs in
any process of a 1P1D fleet while one request is answered, and those that run without any.

From the root of the checkout: PYTHONPATH=src:tests python -P -m e2e.crossing
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

VARIABLE = "EFFUSE_CROSSING_HOME"
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "tests")
STARTER = "import e2e.crossing\n\ne2e.crossing.record()\n"
SETTLE_S = 1.5  # longer than between two heartbeats, renewals or looks of any process
POLL_S = 0.02


def record() -> None:
    """In a process of the fleet: note the file of every call between two marks of the home."""
    home = os.environ.get(VARIABLE)
    if home is None:
        return
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)

    sys.setprofile(note)
    watch = threading.Thread(target=_tell, args=(Path(home), called), daemon=True)
    watch.start()
    threading.setprofile(note)


def _tell(home: Path, called: set[str]) -> None:
    """Between the marks of a window the names are gathered, at its end written down."""
    for window in ("idle", "asked"):
        while not (home / f"{window}-begins").exists():
            time.sleep(POLL_S)
        called.clear()
        while not (home / f"{window}-ends").exists():
            time.sleep(POLL_S)
        (home / f"{window}.{os.getpid()}").write_text("\n".join(sorted(called)))


def _ours(home: Path, window: str) -> set[Path]:
    """Files of effuse whose code ran in it, as paths in the checkout."""
    names = {Path(name) for one in home.glob(f"{window}.*") for name in one.read_text().split("\n")}
    product = (ROOT / "src" / "effuse").resolve()
    linked = {name.resolve() for name in names if name.is_relative_to(product)}
    return {path.relative_to(ROOT) for path in linked}


def crossed(connector: str) -> tuple[set[Path], set[Path]]:
    """Files that run while one request is answered, and while none is."""
    from e2e.tiny import tiny_checkpoint

    from effuse.cli.commands import FleetConfig
    from effuse.cli.fleet import Fleet
    from effuse.client.client import Client
    from effuse.client.params import Params

    with tempfile.TemporaryDirectory(prefix="effuse-crossing-") as name:
        home = Path(name)
        (home / "sitecustomize.py").write_text(STARTER)
        paths = [name, *(str(ROOT / folder) for folder in FOLDERS)]
        config = FleetConfig(
            model=tiny_checkpoint(home / "model", "sdar"),
            connector=connector,
            worker_flags=("--device", "cpu", "--num-pages", "64", "--max-model-len", "256"),
            env={VARIABLE: name, "PYTHONPATH": os.pathsep.join(paths)},
        )
        with Fleet(config) as fleet, Client(fleet.address) as client:
            for window, requests in (("warm", 3), ("idle", 0), ("asked", 1)):
                (home / f"{window}-begins").touch()
                time.sleep(SETTLE_S if window == "idle" else POLL_S * 5)
                for _ in range(requests):
                    client.generate([5, 6, 7] * 20, Params(max_tokens=24, seed=1))
                (home / f"{window}-ends").touch()
                time.sleep(POLL_S * 25)
        return _ours(home, "asked"), _ours(home, "idle")


def main(argv: Sequence[str] | None = None) -> int:
    """The files with their lines, and how many there are."""
    parser = argparse.ArgumentParser(prog="python -m e2e.crossing", description=__doc__)
    parser.add_argument("--connector", choices=("nixl", "zmq"), default="nixl")
    asked, idle = crossed(parser.parse_args(argv).connector)
    for path in sorted(asked):
        lines = len((ROOT / path).read_text().splitlines())
        print(f"{lines:5} {path}{'  (idle, too)' if path in idle else ''}")
    print(f"one request crosses {len(asked)} files; {len(asked & idle)} of them run without it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
