"""Engines of both kinds on a model in this process, as the workers build them, for benchmarks.

No checkpoint, no front and no connector; every prompt is prefilled in its decode engine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from effuse.decode_worker import scheduler as decode_scheduler
from effuse.decode_worker.device_slots import DeviceSlots
from effuse.decode_worker.device_stepper import DeviceStepper
from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.executor import Executor
from effuse.decode_worker.intake import Boundary, Intake
from effuse.kernels.pages import LayerMarks
from effuse.kvtransfer.connector import Command, ConnectorEvent
from effuse.kvtransfer.ends import HandoffReceiver, HandoffSender
from effuse.kvtransfer.layout import (
    Fingerprint,
    Identity,
    KVLayout,
    ModelFacts,
    PageMemory,
    fingerprint,
)
from effuse.kvtransfer.messages import Shard
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.units import UnitCache, unit_tokens_of
from effuse.models.part import Forward
from effuse.models.prompt_graphs import PromptGraphs
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer
from effuse.prefill_worker.engine import PrefillEngine
from effuse.prefill_worker.executor import PromptExecutor, mark_of
from effuse.worker.config import PrefillConfig

_MOST_S = 3600.0
_NAME = "benchmark"


@dataclass(frozen=True, slots=True)
class Paged:
    """A model with pages, and the runner over both."""

    model: Transformer
    memory: PageMemory
    runner: ModelRunner

    @property
    def layout(self) -> KVLayout:
        return self.memory.layout

    def make_cache(self, pool: PagePool) -> UnitCache:
        config = self.model.config
        return UnitCache(
            pool,
            page_size=self.layout.page_size,
            unit_size=unit_tokens_of(self.layout.page_size, config.block_size),
            is_causal=config.prompt_attention == "causal_blocks",
        )

    @property
    def fingerprint(self) -> Fingerprint:
        config = self.model.config
        facts = ModelFacts(
            weights=_NAME,
            architecture=config.architecture,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            prompt_attention=config.prompt_attention,
            commit_rule=_NAME,
        )
        return fingerprint(self.layout, facts)


def paged(model: Transformer, num_tokens: int, *, page_size: int) -> Paged:
    """Pages for `num_tokens` tokens; short prompts run as graphs on a GPU."""
    config = model.config
    dtype = str(model.dtype).removeprefix("torch.")
    layout = KVLayout(
        "unified", config.num_layers, config.num_kv_heads, config.head_dim, page_size, dtype
    )
    memory = PageMemory(layout, -(-num_tokens // page_size), model.device)
    kv, marks = memory.layer_views(), LayerMarks(layout.num_layers, layout.num_groups, model.device)
    graphs = None
    if model.device.type == "cuda":
        graphs = PromptGraphs(
            model,
            kv,
            page_size=page_size,
            block_size=config.block_size,
            marks=marks,
            max_context=num_tokens if config.prompt_attention == "causal_blocks" else 0,
        )
        graphs.prepare()
    runner = ModelRunner(
        model, kv, page_size=page_size, block_size=config.block_size, graphs=graphs, marks=marks
    )
    return Paged(model, memory, runner)


class NoConnector:
    """A Connector of prompts for which no reservation ever comes."""

    name = "none"

    def start(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Nothing to close."""

    def describe(self) -> tuple[Shard, ...]:
        """It has no address."""
        return ()

    def send(self, command: Command) -> None:
        """Nothing moves."""

    def poll(self) -> list[ConnectorEvent]:
        """It has no events."""
        return []

    def fileno(self) -> int:
        """No descriptor."""
        return -1


def prefill_engine(
    parts: Paged,
    *,
    max_num_batched_tokens: int,
    pool: PagePool | None = None,
    cache: UnitCache | None = None,
) -> PrefillEngine:
    """A prefill worker's engine without readers of its results, and its `pool` and `cache` if they
    are not given."""
    config, memory, agreed = parts.model.config, parts.memory, parts.fingerprint
    pool = pool or PagePool(memory.num_pages)
    sender = HandoffSender(NoConnector(), reservation_s=_MOST_S, now=time.monotonic)
    executor = PromptExecutor(
        parts.runner,
        memory,
        sender,
        needs_boundary=config.shift_logits,
        mark=mark_of(parts.model.device),
    )
    return PrefillEngine(
        executor,
        PrefillConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=parts.layout.page_size,
            max_request_s=_MOST_S,
        ),
        config,
        pool,
        cache or parts.make_cache(pool),
        sender,
        agreed,
        now=time.monotonic,
    )


def decode_engine(
    parts: Paged, limits: decode_scheduler.DecodeLimits, stepper: DeviceStepper, forward: Forward
) -> DecodeEngine:
    """A decode worker's engine with device steps; prompts are prefilled in it, by `forward`. Pages
    beyond those of `limits` stay free for others. A stepper may have served other engines before.
    """
    config, model = parts.model.config, parts.model
    _forget(stepper)
    pool = PagePool(limits.num_pages)
    identity = Identity(_NAME, parts.fingerprint, parts.memory.layout)
    hidden_size = config.hidden_size if config.shift_logits else None
    return DecodeEngine(
        Executor(forward, parts.memory.copy_page, slots=DeviceSlots(stepper)),
        pool,
        parts.make_cache(pool),
        Intake(config, limits),
        HandoffReceiver(pool, None, identity, _MOST_S),
        Boundary(hidden_size=hidden_size, dtype=model.dtype, device=model.device),
        now=time.monotonic,
        max_request_s=_MOST_S,
    )


def _forget(stepper: DeviceStepper) -> None:
    """Each engine numbers its requests from 1, and would mistake records of an earlier engine's
    step for its own.
    """
    while stepper.num_ahead:
        stepper.read()
    stepper.step.table.rows.zero_()
    stepper.step.records.zero_()
