"""Command-line parsers for all commands and processes, and flags from the fields of a frozen
dataclass.

A field `page_size: Annotated[int, "tokens in a page"] = 16` makes the flag `--page-size N`. One of
type `tuple[str, ...]` makes a flag that may be repeated. The dataclass checks its own values in
`__post_init__` and raises ValueError.

A TOML file may hold flags (`--config FILE`), with one key for each flag, without dashes. It becomes
words of a command line before the typed ones, which take precedence. A file serves one command;
tables have no meaning.
"""

import argparse
import difflib
import math
import sys
import tomllib
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from itertools import takewhile
from operator import index
from os import PathLike
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NoReturn,
    Protocol,
    SupportsIndex,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

FLAG = "--config"
_NOT_IN_FILES = ("config", "help")


class CommandError(Exception):
    """A command cannot go on. Its text follows the command's name on standard error, and `status`
    is the exit status."""

    status = 1


class BadInput(CommandError):
    """The same for flags, files and machines with which a command cannot begin."""

    status = 2


class ConfigFileError(ValueError):
    """The file cannot be read or has an unknown flag; the message names file and key."""


def add_config_flag(parser: "argparse._ActionsContainer") -> None:
    parser.add_argument(
        FLAG,
        type=Path,
        metavar="FILE",
        help="TOML file with flags, such as port = 50051; the command line takes precedence",
    )


def with_file(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Returns the words of the file that `argv` names, if any, followed by `argv`. Typed values of
    a flag that may be repeated replace those of the file.

    A bad file ends the process with status 2, like a bad flag.
    """
    finder = type(parser)(prog=parser.prog, add_help=False, allow_abbrev=False)
    add_config_flag(finder)
    path: Path | None = finder.parse_known_args(argv)[0].config
    if path is None:
        return list(argv)
    flags, typed = flags_of(parser), {word.partition("=")[0] for word in argv}
    lists = {f"--{name}" for name, one in flags.items() if isinstance(one, argparse._AppendAction)}
    try:
        words = read_words(path, flags)
        return [*(one for one in words if one.partition("=")[0] not in lists & typed), *argv]
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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigFileError(f"{path}: not TOML: {error}") from error
    words: list[str] = []
    for key, value in entries.items():
        if key not in flags and isinstance(value, dict):
            raise ConfigFileError(f"{path}: [{key}]: expected flags without a table around them")
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
            raise ConfigFileError(f"{where}: expected true or false, got {value!r}")
        off = name.replace("--", "--no-", 1)
        if value:
            return [name]
        return [off] if off in flag.option_strings else []
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int | float | str) for one in values):
        raise ConfigFileError(f"{where}: expected a string, a number or a list, got {value!r}")
    texts = [str(one) for one in values]
    if isinstance(flag, argparse._AppendAction):
        return [f"{name}={text}" for text in texts]
    return [f"{name}={','.join(texts)}"]


_MOST_SHOWN: Final = 1000  # characters of an error, which may quote a value of any length


class Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Config = TypeVar("Config", bound=Dataclass)


def parse(config: type[Config], argv: Sequence[str], *, prog: str, about: str) -> Config:
    """Returns the config that `argv` describes.

    An unknown flag or a bad value ends the process with status 2. The error is one line that names
    the accepted form, and a line that names `--help`.
    """
    parser = make_parser(prog, about)
    add_flags(parser, config)
    add_config_flag(parser)
    found = vars(parser.parse_args(with_file(parser, argv)))
    del found["config"]
    try:
        return config(**{n: tuple(v) if isinstance(v, list) else v for n, v in found.items()})
    except ValueError as error:
        parser.error(str(error))


def make_parser(prog: str, about: str) -> argparse.ArgumentParser:
    """A parser whose flags must be written out in full, and whose help shows every default."""
    return Parser(
        prog=prog, description=about, allow_abbrev=False, formatter_class=HelpWithDefaults
    )


class Parser(argparse.ArgumentParser):
    """Reports an error on one line, with the flag that was probably meant, and names `--help`."""

    _words: Sequence[str] = ()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses like argparse; an unknown flag ends the process with status 2."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._suggestion()}")
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses like argparse; if a required flag is missing, the error names a near miss."""
        self._words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required"):
            message += self._suggestion()
        line = _printable(f"{self.prog}: {message}")
        shown = line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]} ..."
        self.exit(2, f"{shown}\ntry '{self.prog} --help'\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(one) for one in action.choices]
            found = f"invalid choice: {value!r} (choose from {', '.join(choices)})"
            raise argparse.ArgumentError(action, found + did_you_mean(str(value), choices))

    def _suggestion(self) -> str:
        """The known flag that is nearest to an unknown one among the words of the command line."""
        flags = self._option_string_actions
        before = takewhile("--".__ne__, self._words)
        names = [word.partition("=")[0] for word in before if word.startswith("-")]
        near = (did_you_mean(name, flags) for name in names if name not in flags)
        return next(filter(None, near), "")


def _printable(text: str) -> str:
    """The text on one line: characters that move the cursor are escaped, lone surrogates too."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown word, with the nearest known one; "" if none is near."""
    plain = word.lower().replace("_", "-")
    near = difflib.get_close_matches(plain, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


class HelpWithDefaults(argparse.HelpFormatter):
    """Adds to every flag's help its default, or that it is required, unless the help has it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not action.option_strings or isinstance(action, argparse._HelpAction):
            return text
        if "(default: " in text:
            return text
        end = "required" if action.required else f"default: {_default_text(action.default)}"
        return f"{text} ({end})"


def _default_text(value: object) -> str:
    if isinstance(value, bool):
        text = "on" if value else "off"
    elif isinstance(value, float):
        text = "none" if math.isinf(value) else f"{value:g}"
    else:
        text = "none" if value in (None, [], ()) else str(value)
    return text.replace("%", "%%")


def add_switch(
    parser: "argparse._ActionsContainer", flag: str, about: str, *, default: bool = False
) -> None:
    """Adds a flag that is off unless it is given, or on by `default`. `--no-..` turns it off, even
    if a file turns it on."""
    action = parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=about)
    parser.set_defaults(**{action.dest: default})


def add_flags(
    parser: "argparse._ActionsContainer",
    config: type[Config],
    *,
    only: Collection[str] | None = None,
) -> None:
    """Adds a flag for every field of `config`, or for the named ones, to a parser or a group."""
    hints = get_type_hints(config, include_extras=True)
    for one in fields(config):
        if only is None or one.name in only:
            _add(parser, one, hints[one.name])


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _add(parser: "argparse._ActionsContainer", one: "Field[Any]", hint: object) -> None:
    if get_origin(hint) is not Annotated:
        raise TypeError(f"field {one.name} has no help text")
    flag = flag_of(one.name)
    kind, text = _without_none(get_args(hint)[0]), str(get_args(hint)[1]).replace("%", "%%")
    default = None if one.default is MISSING else one.default
    if kind is bool:
        add_switch(parser, flag, text, default=bool(default))
    elif get_origin(kind) is Literal:
        parser.add_argument(flag, choices=get_args(kind), default=default, help=text)
    elif get_origin(kind) is tuple:
        parser.add_argument(flag, action="append", default=[], metavar="NAME", help=text)
    else:
        name = {int: "N", float: "X", Path: "PATH"}.get(cast(type, kind), "NAME")
        parse_value = cast("type[int] | type[float] | type[str] | type[Path]", kind)
        forms = {int: "a whole number", float: "a number", Path: "a path"}
        form = forms.get(cast(type, kind), "")
        parser.add_argument(
            flag, type=typed(parse_value, form), default=default, metavar=name, help=text
        )


def from_python(config: type[Config], values: Mapping[str, object]) -> dict[str, Any]:
    """Values of fields that Python code has set, in the types of these fields: a string becomes a
    path, for example. Raises TypeError for a value of another type and ValueError for one that is
    no choice; both name field and form.
    """
    hints = get_type_hints(config)
    return {name: _in_type(name, hints[name], value) for name, value in values.items()}


def _in_type(name: str, hint: object, value: object) -> object:
    kind = _without_none(hint)
    if value is None and kind is not hint:
        return None
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            choices = ", ".join(get_args(kind))
            raise ValueError(f"{flag_of(name)}: expected one of {choices}, got {value!r}")
        return value
    accepted, form, convert = _FROM_PYTHON[cast(type, kind)]
    is_switch = isinstance(value, bool)
    if is_switch is not (kind is bool) or not isinstance(value, accepted):
        raise TypeError(f"{name}: expected {form}, got {value!r}")
    if kind is Path and value == "":  # which would be the working directory
        raise ValueError(f"{name}: expected {form}, got ''")
    return convert(value)


_FROM_PYTHON: Final[Mapping[type, tuple[Any, str, Callable[[Any], object]]]] = {
    bool: (bool, "True or False", bool),
    int: (SupportsIndex, "a whole number", index),
    float: ((int, float, SupportsIndex), "a number", float),
    str: (str, "a string", str),
    Path: ((str, PathLike), "a path", Path),
}
"""By a field's type: the types that Python code may set, their form, and the conversion."""


def typed(
    kind: Callable[[str], Any], form: str, accepts: Callable[[Any], bool] = lambda value: True
) -> Callable[[str], Any]:
    """A flag's type, whose error names the accepted form."""

    def parse(text: str) -> Any:
        with suppress(ValueError):
            # An empty path, such as an unset variable of a shell, would be the working directory.
            if (text or kind is not Path) and accepts(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"expected {form}, got {text!r}")

    return parse


def _without_none(hint: object) -> object:
    if get_origin(hint) in (Union, types.UnionType):  # the former if the type is a Literal
        return next(kind for kind in get_args(hint) if kind is not type(None))
    return hint
