"""Makes an engine of both kinds from its config; the front runs it as the engine's process.

Only connects parts to each other: both cores share model, pages and connector.
"""

import time

from effuse.both_worker.engine import BothEngine, split
from effuse.decode_worker import build as decode_build
from effuse.prefill_worker import build as prefill_build
from effuse.worker.assembly import assemble
from effuse.worker.config import BothConfig
from effuse.worker.engine_process import Engine, main
from effuse.worker.watchdog import Pulse


def build(config: BothConfig, incarnation: str, pulse: Pulse) -> Engine:
    """An engine that is ready to serve. Raises ValueError if the config is wrong."""
    parts = assemble(config, incarnation, "both", config.default_algorithm, pulse)
    limits = decode_build.limits_of(config, parts)
    connector = parts.connect()
    sending, receiving = split(connector)
    pool, cache = parts.make_pool()
    decode = decode_build.make_engine(
        config, incarnation, parts, pulse, pool, cache, limits, receiving
    )
    prefill = prefill_build.make_core(config, parts, pool, cache, sending, pulse)
    return Engine(
        BothEngine(decode, prefill, receiving, now=time.monotonic),
        parts.ready,
        wakes=(connector.fileno(),),
        meanwhile=prefill.meanwhile,
        ranks=parts.ranks,
    )


if __name__ == "__main__":
    main(BothConfig, build)
