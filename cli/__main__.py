"""The `effuse` command: finds the named sub-command and hands it the rest of the line.

A sub-command's module is imported only when it is needed, so that `generate` needs no torch.
"""

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from effuse.cli.process import interruptible
from effuse.cli.streams import settle
from effuse.config.extras import lacking
from effuse.config.flags import CommandError, did_you_mean

COMMANDS = {
    "up": ("up", "start a fleet on this machine"),
    "generate": ("generate", "send prompts to a fleet"),
    "status": ("status", "show a fleet's workers, their load and their links"),
    "role": ("role", "change the role of a worker"),
    "plan": ("plan", "show how many workers should prefill and decode"),
    "top": ("top", "watch a fleet's workers and running requests"),
    "token": ("token", "make a token for a client of a fleet"),
    "logs": ("logs", "show what a fleet's processes have written"),
    "bench": ("bench", "measure a fleet on a dataset"),
    "check-ghz": ("check_ghz", "check a report of ghz against limits"),
    "eval": ("evaluate", "measure the bundled model's accuracy"),
    "demo": ("demo", "start a fleet and solve three fresh problems"),
    "convert-tokenizer": ("convert_tokenizer", "write tokenizer.json for a checkpoint"),
    "completion": ("completion", "print shell completion for these commands"),
}
_STARTS_WORKERS = {"up", "demo", "eval"}


class Command(Protocol):
    """The functions of a sub-command's module."""

    def main(self, argv: Sequence[str]) -> int:
        """Run it; returns the exit status. Raises CommandError and OSError."""

    def make_parser(self) -> argparse.ArgumentParser:
        """Its flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `effuse`; returns the exit status."""
    settle()
    words = list(sys.argv[1:] if argv is None else argv)
    name = " ".join(["effuse", *words[:1]])
    try:
        try:
            with interruptible():
                return _run(words)
        finally:
            sys.stdout.flush()
    except ModuleNotFoundError as error:
        line = lacking(error.name, "worker" if set(words[:1]) & _STARTS_WORKERS else None)
        if line is None:
            raise
        print(f"{name}: {line}", file=sys.stderr)
        return 1
    except CommandError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, like `head`
        _drop_output()
        return 141
    except OSError as error:  # such as a full disk
        print(f"{name}: {error}", file=sys.stderr)
        _drop_output()
        return 1


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"effuse {importlib.metadata.version('effuse')}")
        return 0
    if words[0] not in COMMANDS:
        print(unknown(words[0]), file=sys.stderr)
        return 2
    return find(words[0]).main(words[1:])


def _drop_output() -> None:
    """Discards buffered output, because Python would try to write it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def find(name: str) -> Command:
    return cast(Command, importlib.import_module(f"effuse.cli.{COMMANDS[name][0]}"))


def unknown(word: str) -> str:
    """The error about an unknown command, with a hint on a second line."""
    kind = "flag" if word.startswith("-") else "command"
    names = ["--help", "--version"] if kind == "flag" else list(COMMANDS)
    return f"effuse: unknown {kind} {word!a}{did_you_mean(word, names)}\ntry 'effuse --help'"


def usage() -> str:
    lines = ["usage: effuse COMMAND [FLAGS]", "       effuse --version", ""]
    lines += [f"  {name:<18} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join([*lines, "", "effuse COMMAND --help lists a command's flags."])


if __name__ == "__main__":
    sys.exit(main())
