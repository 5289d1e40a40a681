"""`effuse-router`: settles the options that gRPC reads at its import, then runs `process.py`."""

from __future__ import annotations

import sys

from effuse.config.extras import explaining
from effuse.protos import library


def main() -> None:
    """Entry point."""
    library.settle()
    with explaining("effuse-router", "server"):
        from effuse.router import process

    process.main(sys.argv[1:])


if __name__ == "__main__":
    main()
