"""`effuse-decode`: the front of a decode worker, from its flags to its exit status."""

from typing import NoReturn

from effuse.config.extras import explaining
from effuse.telemetry import logs
from effuse.worker.config import DecodeConfig


def main() -> NoReturn:
    """Runs a decode worker until it receives the order to end."""
    with explaining("effuse-decode", "worker", "torch"):
        from effuse.decode_worker.server import make_role
        from effuse.worker import front

    about = "KV pages in, committed tokens out."
    logs.leave(front.main(DecodeConfig, lambda _: make_role(), "effuse-decode", about))


if __name__ == "__main__":
    main()
