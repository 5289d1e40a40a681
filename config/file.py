"""Flags of a command from a TOML file: `--config FILE`, with one key for each flag, without dashes.

The file becomes words of a command line before the typed ones. Both are checked in the same way,
and typed flags take precedence. A file serves one command; tables have no meaning.
"""

import argparse
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

FLAG = "--config"
_NOT_IN_FILES = ("config", "help")


class ConfigFileError(ValueError):
    """The file cannot be read or has an unknown flag; the message names file and key."""


def add_config_flag(parser: "argparse._ActionsContainer") -> None:
    """Adds `--config FILE`."""
    parser.add_argument(
        FLAG,
        type=Path,
        metavar="FILE",
        help="TOML file with flags, such as port = 50051; the command line takes precedence",
    )


def with_file(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Returns the words of the file that `argv` names, if any, followed by `argv`.

    A bad file ends the process with status 2, like a bad flag.
    """
    finder = type(parser)(prog=parser.prog, add_help=False, allow_abbrev=False)
    add_config_flag(finder)
    path: Path | None = finder.parse_known_args(argv)[0].config
    if path is None:
        return list(argv)
    try:
        return [*read_words(path, flags_of(parser)), *argv]
    except ConfigFileError as error:
        parser.error(f"{FLAG}: {error}")


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The flags of a parser by their names without dashes, which are keys of a file."""
    return {
        action.option_strings[0].removeprefix("--"): action
        for action in parser._actions  # argparse has no other list of them
        if action.option_strings and action.dest not in _NOT_IN_FILES
    }


def read_words(path: Path, flags: Mapping[str, argparse.Action]) -> list[str]:
    """The file as words of a command line. Raises ConfigFileError."""
    try:
        # Some editors write a byte-order mark.
        entries = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigFileError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{path}: not TOML: {error}") from error
    words: list[str] = []
    for key, value in entries.items():
        if key not in flags:
            near = difflib.get_close_matches(key.replace("_", "-"), flags, n=1, cutoff=0.0)
            raise ConfigFileError(f"{path}: {key}: unknown flag; did you mean {near[0]}?")
        words += _words(f"{path}: {key}", flags[key], value)
    return words


def _words(where: str, flag: argparse.Action, value: object) -> list[str]:
    """One flag and its value. A list is 0,1,.. or the flag once for each element."""
    name = flag.option_strings[0]
    if flag.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigFileError(f"{where}: expected true or false, found {value!r}")
        off = name.replace("--", "--no-", 1)
        if value:
            return [name]
        return [off] if off in flag.option_strings else []
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int | float | str) for one in values):
        raise ConfigFileError(f"{where}: expected a text, a number or a list, found {value!r}")
    texts = [str(one) for one in values]
    if isinstance(flag, argparse._AppendAction):
        return [f"{name}={text}" for text in texts]
    return [f"{name}={','.join(texts)}"]
