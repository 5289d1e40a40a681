"""The examples run as they stand, and the README shows them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from effuse.cli.fleet import Fleet, FleetConfig

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def _run(code: str) -> str:
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_asking_a_fleet() -> None:
    code = (EXAMPLES / "ask.py").read_text()
    with Fleet(FleetConfig(worker_flags=("--device", "cpu"))) as fleet:
        told = _run(code.replace("127.0.0.1:50051", fleet.address))
    assert told.count("answer: 29") == 2 and "tokens a forward" in told


def test_a_batch_in_this_process() -> None:
    told = _run((EXAMPLES / "offline.py").read_text().replace("LLM()", 'LLM(device="cpu")'))
    assert told.split() == ["answer:", "621", "answer:", "649", "answer:", "1019"]


def test_the_readme_shows_them() -> None:
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(shown) == 2
    code = "".join(path.read_text().split('"""\n\n', 1)[1] for path in EXAMPLES.glob("*.py"))
    assert not [block for block in shown if block not in code]
