"""The `effuse` command finds its sub-commands and stays light until it does."""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from effuse.cli.__main__ import COMMANDS, WORKERS_OWN, find, main
from effuse.config.flags import Dataclass, HelpWithDefaults, add_flags, make_parser
from effuse.router.config import RouterConfig
from effuse.worker.config import DecodeConfig, PrefillConfig


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("serve", "unknown command 'serve'"),
        ("gnerate", "unknown command 'gnerate'; did you mean generate?"),
        ("check_ghz", "unknown command 'check_ghz'; did you mean check-ghz?"),
        ("--verison", "unknown flag '--verison'; did you mean --version?"),
    ],
)
def test_an_unknown_command_is_one_line_and_a_hint(
    word: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == f"effuse: {told}\ntry 'effuse --help'\n"


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
        "completion": ["bash"],
        "check-ghz": [__file__],
    }
    with pytest.raises(SystemExit) as ended:
        main([name, *required.get(name, []), "--no-such-flag"])
    assert ended.value.code == 2
    line, hint = capsys.readouterr().err.splitlines()
    assert line.startswith(f"effuse {name}: unrecognized arguments: --no-such-flag")
    assert hint == f"try 'effuse {name} --help'"


def test_the_version_is_that_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"effuse {project['version']}\n"


def _parsers() -> dict[str, argparse.ArgumentParser]:
    processes: dict[str, type[Dataclass]] = {
        "effuse-router": RouterConfig,
        "effuse-prefill": PrefillConfig,
        "effuse-decode": DecodeConfig,
    }
    parsers = {f"effuse {name}": find(name).make_parser() for name in COMMANDS}
    for name, config in processes.items():
        parsers[name] = make_parser(name, "")
        add_flags(parsers[name], config)
    return parsers


def test_help_tells_every_flags_default_or_that_it_is_required() -> None:
    """And a number that a text tells is the one that holds."""
    count = 0
    for name, parser in _parsers().items():
        formatter = parser._get_formatter()
        assert isinstance(formatter, HelpWithDefaults)
        for action in parser._actions:
            if not action.option_strings or action.dest == "help":
                continue
            count += 1
            told = formatter._get_help_string(action)
            if action.required:
                assert told.endswith("(required)"), (name, action.dest)
                continue
            default = re.search(r"\(default: (.+)\)$", told)
            assert default, (name, action.dest, told)
            if isinstance(action.default, int | float) and not isinstance(action.default, bool):
                texts = [str(action.default), f"{action.default:g}"]
                assert default[1] in (["none"] if math.isinf(action.default) else texts), told
    assert count > 150


def test_telling_flags_imports_no_torch() -> None:
    code = (
        "import sys; from effuse.cli.__main__ import COMMANDS, find\n"
        "for name in COMMANDS: find(name).make_parser()\n"
        "print('torch' in sys.modules)"
    )
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


_WITHOUT_WORKERS = (
    "import sys; from effuse.cli.__main__ import WORKERS_OWN, main;"
    "sys.modules |= dict.fromkeys(WORKERS_OWN); sys.exit(main(sys.argv[1:]))"
)


def test_what_workers_bring_is_said_to_be_missing_where_only_clients_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["worker"]
    assert {re.split(r"[<>=;]", one)[0] for one in extra} == WORKERS_OWN
    for words in (["up"], ["demo"], ["eval"]):
        done = _run_without_workers(*words)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert re.fullmatch(rf"effuse {words[0]}: \w+ is needed: pip install '.*\[worker\]'", line)
    assert not list(tmp_path.iterdir())


def test_who_has_only_clients_completes_their_commands() -> None:
    done = _run_without_workers("completion", "bash")
    assert (done.returncode, done.stderr) == (0, "")
    assert "generate) flags=" in done.stdout and "up) flags=" not in done.stdout


def _run_without_workers(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", _WITHOUT_WORKERS, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
