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

from effuse.cli.__main__ import COMMANDS, find, main
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
        "role": ["worker-0", "both"],
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
    """And a number in a text is the real one."""
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


_WITHOUT = (
    "import sys; from effuse.config.extras import MODULES;"
    "lacking = sys.argv.pop(1).split(',');"
    "sys.modules |= dict.fromkeys(one for extra in lacking for one in MODULES[extra]);"
)
_COMMAND = "from effuse.cli.__main__ import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("lacking", ["worker", "server,worker"])
@pytest.mark.parametrize("name", ["up", "demo", "eval"])
def test_the_extra_of_workers_is_named_if_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lacking: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = _run_without(lacking, _COMMAND, name)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    form = rf"effuse {name}: \w+ is needed: in a checkout of effuse, run pip install '\.\[worker\]'"
    assert re.fullmatch(form, line)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["bench", "logs"])
def test_the_extra_of_servers_is_named_if_only_clients_are_installed(name: str) -> None:
    done = _run_without("server,worker", _COMMAND, name)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.partition(" pip ")[2]) == (1, "install '.[server]'")


@pytest.mark.parametrize("name", ["generate", "status", "top", "token", "check-ghz", "completion"])
def test_a_clients_commands_need_no_extra(name: str) -> None:
    done = _run_without("server,worker", _COMMAND, name, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: effuse {name}")


@pytest.mark.parametrize(
    ("program", "lacking", "extra"),
    [
        ("router", "server,worker", "server"),
        ("prefill", "server,worker", "worker"), ("decode", "server,worker", "worker"),
        ("prefill", "worker", "worker"), ("decode", "worker", "worker"),
    ],
)  # fmt: skip
def test_a_process_names_its_extra(program: str, lacking: str, extra: str) -> None:
    package = "router" if program == "router" else f"{program}_worker"
    code = f"from effuse.{package}.__main__ import main; sys.exit(main())"
    done = _run_without(lacking, code)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith(f"effuse-{program}: ")
    assert line.endswith(f"pip install '.[{extra}]'")


def test_an_llm_without_torch_names_the_extra() -> None:
    done = _run_without("worker", "import effuse; effuse.LLM()")
    line = done.stderr.splitlines()[-1]
    assert line.endswith(
        "effuse.LLM: torch is needed: in a checkout of effuse, run pip install '.[worker]'"
    )
    assert "During handling" not in done.stderr


def test_who_has_only_clients_completes_their_commands() -> None:
    done = _run_without("worker", _COMMAND, "completion", "bash")
    assert (done.returncode, done.stderr) == (0, "")
    assert "generate) flags=" in done.stdout and "up) flags=" not in done.stdout


def _run_without(lacking: str, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` as if the extras `lacking`, by their names, were not installed."""
    command = [sys.executable, "-P", "-c", _WITHOUT + code, lacking, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
