"""`effuse-prefill`: the front of a prefill worker, from its flags to its exit status."""

from typing import NoReturn

from effuse.config.extras import explaining
from effuse.telemetry import logs
from effuse.worker.config import PrefillConfig


def main() -> NoReturn:
    """Runs a prefill worker until it receives the order to end."""
    with explaining("effuse-prefill", "worker", "torch"):
        from effuse.prefill_worker.server import make_role
        from effuse.worker import front

    logs.leave(front.main(PrefillConfig, make_role, "effuse-prefill", "Prompt in, KV pages out."))


if __name__ == "__main__":
    main()
