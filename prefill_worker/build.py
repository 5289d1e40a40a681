"""Makes a prefill engine from its config; the front runs it as the engine's process.

Only connects parts to each other.
"""

import time

from effuse.kvtransfer.connector import Connector
from effuse.kvtransfer.ends import HandoffSender
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.units import UnitCache
from effuse.prefill_worker.engine import PrefillEngine
from effuse.prefill_worker.executor import PromptExecutor, mark_of
from effuse.worker.assembly import Assembly, assemble
from effuse.worker.config import PrefillConfig
from effuse.worker.engine_process import Engine, main
from effuse.worker.group_parts import pipeline_of
from effuse.worker.watchdog import Pulse


def build(config: PrefillConfig, incarnation: str, pulse: Pulse) -> Engine:
    """An engine that is ready to serve. Raises ValueError if the config is wrong."""
    parts = assemble(config, incarnation, "prefill", None, pulse)
    connector = parts.connect()
    core = make_core(config, parts, *parts.make_pool(), connector, pulse)
    return Engine(
        core,
        parts.ready,
        wakes=(connector.fileno(),),
        meanwhile=core.meanwhile,
        ranks=parts.ranks,
    )


def make_core(
    config: PrefillConfig,
    parts: Assembly,
    pool: PagePool,
    cache: UnitCache,
    connector: Connector,
    pulse: Pulse,
) -> PrefillEngine:
    """An engine over the pages of `pool`. Raises ValueError if the config is wrong."""
    model = parts.model
    sender = HandoffSender(connector, reservation_s=config.reservation_s, now=time.monotonic)
    executor = PromptExecutor(
        parts.runner,
        parts.memory,
        sender,
        needs_boundary=model.config.shift_logits,
        mark=mark_of(model.device),
        on_progress=pulse.mark,
        pipeline=pipeline_of(parts.runner),
    )
    return PrefillEngine(
        executor,
        config,
        model.config,
        pool,
        cache,
        sender,
        parts.fingerprint,
        now=time.monotonic,
    )


if __name__ == "__main__":
    main(PrefillConfig, build)
