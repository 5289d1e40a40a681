"""Makes a prefill engine from its config; the front runs it as the engine's process.

Only connects parts to each other.
"""

import time

from effuse.kvtransfer.sender import HandoffSender
from effuse.prefill_worker.engine import PrefillEngine
from effuse.prefill_worker.executor import PromptExecutor, mark_of
from effuse.prefill_worker.prompts import PrefillLimits
from effuse.worker.assembly import Assembly, assemble
from effuse.worker.config import PrefillConfig
from effuse.worker.engine_process import Engine, main
from effuse.worker.watchdog import Pulse


def build(config: PrefillConfig, incarnation: str, pulse: Pulse | None = None) -> Engine:
    """An engine that is ready to serve. Raises ValueError if the config is wrong."""
    pulse = pulse or Pulse()
    parts = assemble(config, incarnation, "prefill", None, pulse)
    limits = _limits(config, parts)
    connector = parts.connect()
    model = parts.model
    sender = HandoffSender(connector, reservation_s=config.reservation_s, now=time.monotonic)
    executor = PromptExecutor(
        parts.runner,
        parts.memory,
        sender,
        needs_boundary=model.config.shift_logits,
        mark=mark_of(model.device),
        on_progress=pulse.mark,
    )
    core = PrefillEngine(
        executor,
        model.config,
        parts.pool,
        sender,
        limits,
        parts.fingerprint,
        now=time.monotonic,
    )
    return Engine(
        core,
        parts.ready,
        wakes=(connector.fileno(),),
        meanwhile=core.meanwhile,
        ranks=parts.ranks,
    )


def _limits(config: PrefillConfig, parts: Assembly) -> PrefillLimits:
    return PrefillLimits(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=parts.max_model_len,
        num_pages=parts.memory.num_pages,
        page_size=parts.memory.layout.page_size,
        block_size=parts.model.config.block_size,
        vocab_size=parts.model.config.vocab_size,
        mask_token_id=parts.model.config.mask_token_id,
        max_request_s=config.max_request_s,
        enable_prefix_caching=config.enable_prefix_caching,
    )


if __name__ == "__main__":
    main(PrefillConfig, build)
