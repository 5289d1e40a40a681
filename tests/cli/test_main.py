"""The `effuse` command finds its sub-commands and stays light until it does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from effuse.cli.__main__ import COMMANDS, main


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    told = capsys.readouterr().err
    assert "'serve'" in told
    assert all(name in told for name in COMMANDS)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_an_unknown_flag(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    required = {
        "generate": ["hello"],
        "bench": ["--dataset", __file__],
        "convert-tokenizer": ["."],
        "token": ["acme"],
    }
    with pytest.raises(SystemExit) as ended:
        main([name, *required.get(name, []), "--no-such-flag"])
    assert ended.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["generate", "bench", "up", "demo"])
def test_no_client_command_imports_torch(module: str) -> None:
    code = f"import sys, effuse.cli.{module}; print('torch' in sys.modules)"
    told = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.strip() == "False"


def test_a_reader_that_leaves_is_no_error() -> None:
    code = (
        "import sys; from effuse.cli import __main__ as command, convert_tokenizer\n"
        "convert_tokenizer.main = lambda argv: print('x' * 10**6, flush=True)\n"
        "sys.exit(command.main(['convert-tokenizer']))"
    )
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(60) == 141
