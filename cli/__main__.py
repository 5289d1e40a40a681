"""The `effuse` command: finds the named sub-command and hands it the rest of the line.

A sub-command's module is imported only when it is asked for, so that `generate` needs no torch.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

COMMANDS = {
    "up": ("up", "start a fleet on this machine"),
    "generate": ("generate", "send prompts to a fleet"),
    "status": ("status", "show a fleet's workers, their load and their links"),
    "token": ("token", "make a token for a client of a fleet"),
    "bench": ("bench", "measure a fleet on a dataset"),
    "eval": ("evaluate", "measure the bundled model's accuracy"),
    "demo": ("demo", "start a fleet and solve three fresh problems"),
    "convert-tokenizer": ("convert_tokenizer", "write tokenizer.json for a checkpoint"),
}


class Command(Protocol):
    """What a sub-command's module offers."""

    def main(self, argv: Sequence[str]) -> int:
        """Run it; the exit status."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run `effuse`; the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"effuse: expected one of {known}; got {words[0]!r}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"effuse.cli.{COMMANDS[words[0]][0]}")
    try:
        return cast(Command, module).main(words[1:])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def usage() -> str:
    """What `effuse --help` prints."""
    lines = ["usage: effuse COMMAND [FLAGS]", ""]
    lines += [f"  {name:<18} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join([*lines, "", "effuse COMMAND --help lists a command's flags."])


if __name__ == "__main__":
    sys.exit(main())
