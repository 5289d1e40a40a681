"""`effuse-prefill`: the front of a prefill worker, from its flags to its exit status."""

import sys

from effuse.config import flags
from effuse.config.extras import explaining
from effuse.worker.config import PrefillConfig


def main() -> int:
    """Runs a prefill worker until it receives the order to end."""
    with explaining("effuse-prefill", "worker", "torch"):
        from effuse.prefill_worker.server import make_role
        from effuse.worker import front

    config = flags.parse(
        PrefillConfig,
        sys.argv[1:],
        prog="effuse-prefill",
        about="Prompt in, KV pages out.",
    )
    return front.run(config, make_role(config))


if __name__ == "__main__":
    sys.exit(main())
