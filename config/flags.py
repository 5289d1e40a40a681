"""Command-line parsers: the one that all commands and processes have, and flags from the fields of
a frozen dataclass.

A field `page_size: Annotated[int, "tokens in a page"] = 16` makes the flag `--page-size N`. What
a value may be beyond its type is checked by the dataclass in `__post_init__`: ValueError. Values of
flags may also stand in a file (`file.py`).
"""

import argparse
import math
import types
from collections.abc import Collection, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from effuse.config.file import add_config_flag, with_file


class Dataclass(Protocol):
    """Any dataclass type."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Config = TypeVar("Config", bound=Dataclass)


def parse(config: type[Config], argv: Sequence[str], *, prog: str, about: str) -> Config:
    """Returns the config that `argv` asks for.

    An unknown flag or a bad value ends the process with status 2 and a line that names the accepted
    form, as every command does.
    """
    parser = make_parser(prog, about)
    add_flags(parser, config)
    add_config_flag(parser)
    found = vars(parser.parse_args(with_file(parser, argv)))
    del found["config"]
    try:
        return config(**found)
    except ValueError as error:
        parser.error(str(error))


def make_parser(prog: str, about: str) -> argparse.ArgumentParser:
    """A parser whose flags must be written out in full, and whose help tells every default."""
    return argparse.ArgumentParser(
        prog=prog, description=about, allow_abbrev=False, formatter_class=HelpWithDefaults
    )


class HelpWithDefaults(argparse.HelpFormatter):
    """Adds to every flag's help its default, or that it is required, where that is not told yet."""

    def _get_help_string(self, action: argparse.Action) -> str:
        told = action.help or ""
        if not action.option_strings or isinstance(action, argparse._HelpAction):
            return told
        if "(default: " in told:
            return told
        end = "required" if action.required else f"default: {_default_text(action.default)}"
        return f"{told} ({end})"


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
    """Adds a flag that is off unless it is given, or on by `default`, and that `--no-..` turns off,
    also where a file turned it on."""
    action = parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=about)
    parser.set_defaults(**{action.dest: default})


def add_flags(
    parser: "argparse._ActionsContainer",
    config: type[Config],
    *,
    only: Collection[str] | None = None,
) -> None:
    """Adds a flag for every field of `config`, or those named, to a parser or a group of one."""
    hints = get_type_hints(config, include_extras=True)
    for one in fields(config):
        if only is None or one.name in only:
            _add(parser, one, hints[one.name])


def flag_of(name: str) -> str:
    """Returns the flag of a field."""
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
    else:
        name = {int: "N", float: "X", Path: "PATH"}.get(cast(type, kind), "NAME")
        parse_value = cast("type[int] | type[float] | type[str] | type[Path]", kind)
        parser.add_argument(flag, type=parse_value, default=default, metavar=name, help=text)


def _without_none(hint: object) -> object:
    if get_origin(hint) in (Union, types.UnionType):  # the former where a Literal takes part
        return next(kind for kind in get_args(hint) if kind is not type(None))
    return hint
