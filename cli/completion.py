"""`effuse completion`: scripts with which bash, zsh or fish complete commands, flags and choices.

The script comes from the commands' own parsers, so that no code of effuse runs while a user types.
Other values are completed as file names.
"""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from effuse.cli.__main__ import COMMANDS, find
from effuse.cli.arguments import command

_TOP = ("--help", "--version")
_BASH = """\
_effuse() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} flags= values=
  if ((COMP_CWORD == 1)); then
    values={commands}
  else
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{choices}
    esac
    case "${{COMP_WORDS[1]}}" in
{flags}
    esac
  fi
  if [[ -n $values ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$word"))
  elif [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  else
    COMPREPLY=()
  fi
}}
complete -o default -F _effuse effuse
"""
_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"

Parsers = Mapping[str, argparse.ArgumentParser]


def main(argv: Sequence[str]) -> int:
    write = _SHELLS[make_parser().parse_args(argv).shell]
    parsers = {}
    for name in COMMANDS:
        with suppress(ModuleNotFoundError):  # only machines with workers can run it
            parsers[name] = find(name).make_parser()
    print(write(parsers), end="")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = command("completion", "Print shell completion for effuse's commands.")
    parser.add_argument("shell", choices=_SHELLS, help='as in: eval "$(effuse completion bash)"')
    return parser


def bash(parsers: Parsers) -> str:
    of_flags, of_positions, flags = [], [], []
    for name, parser in parsers.items():
        names = [flag for action in parser._actions for flag in _long(action)]
        flags.append(f"      {name}) flags={shlex.quote(' '.join(names))} ;;")
        for action in (one for one in parser._actions if one.choices is not None):
            values = shlex.quote(" ".join(map(str, action.choices or ())))
            of_flags += [
                f'      "{name} {flag}") values={values} ;;' for flag in action.option_strings
            ]
            if not action.option_strings:
                of_positions.append(f"      {name}' '*) values={values} ;;")
    return _BASH.format(
        commands=shlex.quote(" ".join([*parsers, *_TOP])),
        choices="\n".join([*of_flags, *of_positions]),
        flags="\n".join(flags),
    )


def zsh(parsers: Parsers) -> str:
    """For zsh, which can use bash's."""
    return _ZSH + bash(parsers)


def fish(parsers: Parsers) -> str:
    lines = [f"complete -c effuse -f -n __fish_use_subcommand -l {top[2:]}" for top in _TOP]
    for name, parser in parsers.items():
        about = shlex.quote(COMMANDS[name][1])
        lines.append(f"complete -c effuse -f -n __fish_use_subcommand -a {name} -d {about}")
        inside = f"complete -c effuse -n '__fish_seen_subcommand_from {name}'"
        for action in parser._actions:
            values = " ".join(map(str, action.choices or ()))
            if not action.option_strings:
                lines += [f"{inside} -f -a {shlex.quote(values)}"] if values else []
                continue
            takes = f" -x -a {shlex.quote(values)}" if values else " -r" * (action.nargs != 0)
            for flag in _long(action):
                lines.append(f"{inside} -l {flag.removeprefix('--')}{takes}")
    return "\n".join(lines) + "\n"


def _long(action: argparse.Action) -> list[str]:
    return [flag for flag in action.option_strings if flag.startswith("--")]


_SHELLS: dict[str, Callable[[Parsers], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
