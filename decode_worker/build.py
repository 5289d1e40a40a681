"""Makes a decode engine from its config; run as the engine's process by the front.

Only wires parts to each other.
"""

import time

import torch

from effuse.decode_worker.config import DecodeConfig
from effuse.decode_worker.device_build import make_engine
from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.kvtransfer.connector import Connector
from effuse.kvtransfer.receiver import HandoffReceiver, ReceiverIdentity
from effuse.worker.assembly import Assembly, assemble
from effuse.worker.engine_process import Engine, main
from effuse.worker.pulse import Pulse


def build(
    config: DecodeConfig,
    incarnation: str,
    pulse: Pulse | None = None,
    *,
    connects: bool = True,
) -> Engine:
    """An engine that is ready to serve. Without a connector it prefills every prompt itself and
    listens nowhere. Raises ValueError where the config is at fault."""
    pulse = pulse or Pulse()
    parts = assemble(config, incarnation, "decode", config.default_algorithm, pulse)
    limits = _limits(config, parts)
    connector = parts.connect() if connects else None
    captures = denoises_on_device(config, parts.model.device)
    with pulse.during("capturing" if captures else "loading"):
        core = _core(config, incarnation, parts, limits, connector)
    return Engine(core, parts.ready, wakes=() if connector is None else (connector.fileno(),))


def _core(
    config: DecodeConfig,
    incarnation: str,
    parts: Assembly,
    limits: DecodeLimits,
    connector: Connector | None,
) -> DecodeEngine:
    model = parts.model
    identity = ReceiverIdentity(
        incarnation=incarnation,
        fingerprint=parts.fingerprint,
        page_bytes=parts.memory.page_bytes,
        lease_s=config.handoff_lease_s,
    )
    handoffs = HandoffReceiver(parts.pool, connector, identity)
    return make_engine(
        model,
        parts.memory.layer_views(),
        parts.runner,
        parts.pool,
        limits,
        handoffs,
        on_device=denoises_on_device(config, model.device),
        now=time.monotonic,
        max_request_s=config.max_request_s,
    )


def denoises_on_device(config: DecodeConfig, device: torch.device) -> bool:
    """Whether steps are graphs over the device's slots, rather than run by the host."""
    return device.type == "cuda" and config.runs_graphs


def _limits(config: DecodeConfig, parts: Assembly) -> DecodeLimits:
    return DecodeLimits(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=parts.max_model_len,
        num_pages=parts.memory.num_pages,
        page_size=parts.memory.layout.page_size,
        block_size=parts.model.config.block_size,
    )


if __name__ == "__main__":
    main(DecodeConfig, build)
