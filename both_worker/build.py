"""Makes an engine of both kinds from its config; the front runs it as the engine's process.

Only connects parts to each other: both cores share model, pages and connector.
"""

import time

from effuse.both_worker.engine import BothEngine, split
from effuse.decode_worker import build as decode_build
from effuse.kvtransfer.pool import PagePool
from effuse.prefill_worker import build as prefill_build
from effuse.worker.assembly import assemble
from effuse.worker.config import BothConfig
from effuse.worker.engine_process import Engine, main
from effuse.worker.watchdog import Pulse


def build(config: BothConfig, incarnation: str, pulse: Pulse) -> Engine:
    """An engine that is ready to serve. Raises ValueError if the config is wrong."""
    parts = assemble(config, incarnation, "both", config.default_algorithm, pulse)
    limits = decode_build.limits_of(config, parts.memory, parts.model, parts.max_model_len)
    decode_build.check_defaults(parts.ready.model, limits)
    connector = parts.connect()
    sending, receiving = split(connector)
    on_device = decode_build.denoises_on_device(config, parts.model.device)
    with pulse.during("capturing" if on_device else "loading"):
        executor = decode_build.make_executor(
            parts.model,
            parts.memory,
            parts.runner,
            limits,
            on_device=on_device,
            queued=parts.queued,
            ranks=parts.ranks,
        )
    pool = PagePool(parts.memory.num_pages)
    cache = parts.make_cache(pool)
    decode = decode_build.make_core(
        config, incarnation, parts, pool, cache, limits, executor, receiving
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
