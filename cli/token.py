"""`effuse token`: makes a client's token and the line by which routers recognise it.

The token goes to standard output and is not stored. The line belongs in the routers' `--keys` file,
which they read again within a call or two.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from effuse.cli.arguments import command, whole
from effuse.router.tenants import Tenant, line_of, make_token, parse_keys


def make_parser() -> argparse.ArgumentParser:
    parser = command("token", "Make a client's token and the line by which routers recognise it.")
    add = parser.add_argument
    add("tenant", metavar="TENANT", help="name of the client: letters, digits, dots and hyphens")
    add("--requests", type=whole(1, 10**9 - 1), metavar="N",
        help="maximum requests at a time, including waiting ones (default: no limit)")  # fmt: skip
    add("--tokens-per-minute", type=whole(1, 10**12 - 1), metavar="N",
        help="maximum tokens per minute, of prompts and answers (default: no limit)")  # fmt: skip
    add("--keys", type=Path, metavar="FILE",
        help="append the line to this file (default: print the line)")  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    asked = parser.parse_args(argv)
    token = make_token()
    tenant = Tenant(asked.tenant, asked.requests, asked.tokens_per_minute)
    try:
        line = line_of(token, tenant)
    except ValueError:
        parser.error(f"expected a name of letters, digits, dots and hyphens, got {asked.tenant!r}")
    if asked.keys is None:
        print(token)
        print(line, file=sys.stderr)
        return 0
    try:
        _check(asked.keys, tenant)
    except ValueError as error:
        parser.error(f"--keys: {asked.keys}: {error}")
    _append(asked.keys, line)
    print(token)
    return 0


def _check(keys: Path, tenant: Tenant) -> None:
    """Raises ValueError if the file is broken, or if an earlier line overrules these limits."""
    text = keys.read_text() if keys.is_file() else ""
    parse_keys(text)
    nothing = Tenant(tenant.name)
    for number, line in enumerate(text.splitlines(), 1):
        (owner,) = parse_keys(line).values() or (nothing,)
        if owner.name != tenant.name or owner == nothing:
            continue
        if tenant not in (owner, nothing):
            limits = line.partition("#")[0].split(maxsplit=2)[2].strip()
            raise ValueError(
                f"line {number} sets the limits of {tenant.name!r}: {limits}; "
                "change that line, or give the same limits or none"
            )
        return


def _append(keys: Path, line: str) -> None:
    """On its own line, even if the last line of the file has no end."""
    with keys.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = f"\n{line}"
        file.write(f"{line}\n".encode())
