"""`effuse-router`: settles the options that gRPC reads at its import, then runs `process.py`."""

import sys
from typing import NoReturn

from effuse.config.extras import explaining
from effuse.protos import library
from effuse.telemetry import logs


def main() -> NoReturn:
    library.settle()
    with explaining("effuse-router", "server"):
        from effuse.router import process

    logs.leave(process.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
