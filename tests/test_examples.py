"""The examples run as they stand, and the README shows them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def _run(code: str) -> str:
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(FleetConfig(prefill=0, worker_flags=("--device", "cpu"))) as running:
        yield running


@pytest.mark.parametrize(("name", "told"), [("ask", (29, 29)), ("chat", (29, 649))])
def test_asking_a_fleet(fleet: Fleet, name: str, told: tuple[int, int]) -> None:
    said = _run((EXAMPLES / f"{name}.py").read_text().replace("127.0.0.1:50051", fleet.address))
    assert [int(one) for one in re.findall(r"answer: (\d+)", said)] == [*told]
    assert "tokens a forward" in said


def test_a_chat_on_the_command_line(fleet: Fleet) -> None:
    """History is kept, and a message that cannot be rendered gets the template's error."""
    flags = ["generate", "--target", fleet.address, "--chat", "Find the value of 30 + 561 + 58."]
    lines = "Find the value of 2 + 561 + 58.\n\nFind the value of 400 + 561 + 58.\n"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "effuse.cli", *flags, "--stats"],
        input=lines, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert re.findall(r"answer: (\d+)", done.stdout) == ["649", "621", "1019"], done.stderr
    assert done.stderr.count(" prompt tokens, ") == 3
    told = subprocess.run(
        [sys.executable, "-P", "-m", "effuse.cli", *flags, "--system", "Be kind."],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert told.returncode == 1
    assert "user and assistant only, not system" in told.stderr


def test_a_batch_in_this_process() -> None:
    told = _run((EXAMPLES / "offline.py").read_text().replace("LLM()", 'LLM(device="cpu")'))
    assert told.split() == ["answer:", "621", "answer:", "649", "answer:", "1019"]


def test_the_guide_shows_them() -> None:
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs/using.md").read_text(), re.DOTALL)
    assert len(shown) == 2
    code = "".join(path.read_text().split('"""\n\n', 1)[1] for path in EXAMPLES.glob("*.py"))
    assert not [block for block in shown if block not in code]
