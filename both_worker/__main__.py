"""`effuse-worker`: a worker whose role may change, from its flags to its exit status."""

from typing import NoReturn

from effuse.config.extras import explaining
from effuse.telemetry import logs
from effuse.worker.config import BothConfig


def main() -> NoReturn:
    """Runs a worker until it receives the order to end."""
    with explaining("effuse-worker", "worker", "torch"):
        from effuse.both_worker.server import make_role
        from effuse.worker import front

    about = "Prompts in, KV pages out; KV pages in, committed tokens out."
    logs.leave(front.main(BothConfig, make_role, "effuse-worker", about))


if __name__ == "__main__":
    main()
