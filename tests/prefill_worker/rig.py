"""A prefill engine over a tiny model, and a pool in the same hub that it hands pages to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from auditing import audit
from decoding.engines import cache_of
from decoding.staged import Stages
from kvtransfer.loopback import Hub, LoopbackConnector

from effuse.kernels.pages import LayerMarks
from effuse.kvtransfer.connector import ArrivalRefused, Arrived
from effuse.kvtransfer.ends import HandoffReceiver, HandoffSender
from effuse.kvtransfer.host_pages import HostPages
from effuse.kvtransfer.layout import (
    Fingerprint,
    Identity,
    KVLayout,
    ModelFacts,
    PageMemory,
    fingerprint,
)
from effuse.kvtransfer.messages import AttemptId, PageRef, Reservation
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.stores import UnitStore
from effuse.kvtransfer.tiers import Tiers
from effuse.models.part import Part, PartResult
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer
from effuse.models.weights import load_model
from effuse.prefill_worker.engine import PrefillEngine
from effuse.prefill_worker.executor import Mark, PromptExecutor
from effuse.worker.config import PrefillConfig
from effuse.worker.messages import Abort, CoreEvent, Heartbeat, PushTo, StartPrefill
from effuse.worker.watchdog import Pulse

PREFILL, DECODE = "prefill-1", "decode-1"
RESERVATION_S, MOST_S, LEASE_S = 20.0, 100.0, 10.0

Event = TypeVar("Event")


class Watched:
    """A model runner that keeps its inputs, and fails on demand."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.ran: list[Sequence[Part]] = []
        self.fails = 0

    def progress(self) -> Callable[[], int]:
        return self._runner.progress()

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        self.ran.append(parts)
        if self.fails:
            self.fails -= 1
            raise RuntimeError("planted")
        return self._runner.run(parts)


class Rig:
    """Everything around one engine, with a clock that stands still until it is moved."""

    def __init__(
        self,
        path: Path,
        *,
        page_size: int = 4,
        budget: int = 64,
        num_pages: int = 32,
        max_num_seqs: int = 8,
        mark: Mark | None = None,
        device: str = "cpu",
        caches: bool = True,
        num_slots: int = 0,  # pages of host memory
        stores: Callable[[HostPages], Sequence[UnitStore]] = lambda _: (),  # below it
        stages: int = 0,  # of a pipeline
    ) -> None:
        self.time = 1000.0
        self.model: Transformer = load_model(path, device=device)
        config = self.model.config
        self.layout = KVLayout(
            "unified", config.num_layers, config.num_kv_heads, config.head_dim, page_size, "float32"
        )
        self.fingerprint: Fingerprint = fingerprint(
            self.layout,
            ModelFacts(
                weights="w",
                architecture=config.architecture,
                block_size=config.block_size,
                mask_token_id=config.mask_token_id,
                prompt_attention=config.prompt_attention,
                commit_rule="settled",
            ),
        )
        self.hub = Hub()
        self.memory = PageMemory(self.layout, num_pages, device)
        self.pool = PagePool(num_pages)
        self.memory.tensor.fill_(float("nan"))
        self.source = self._connector(self.memory, PREFILL)
        self.target_memory, self.target_pool = PageMemory(self.layout, 64), PagePool(64)
        self.target = self._connector(self.target_memory, DECODE)
        identity = Identity(DECODE, self.fingerprint, self.layout)
        self.receiver = HandoffReceiver(self.target_pool, self.target, identity, LEASE_S)
        runner = ModelRunner(
            self.model,
            self.memory.layer_views(),
            page_size=page_size,
            block_size=config.block_size,
            marks=LayerMarks(config.num_layers, self.layout.num_groups, self.model.device),
            on_layer=lambda _: self.on_layer(),
        )
        self.on_layer: Callable[[], None] = lambda: None
        self.forward = Watched(runner)
        tiers = None
        if num_slots:
            host = HostPages(self.memory, num_slots, is_shared=True)
            tiers = Tiers(host, stores(host), now=self.now)
        sender = HandoffSender(self.source, reservation_s=RESERVATION_S, now=self.now)
        self.stages = Stages(self.forward, stages) if stages else None
        self.beats: list[Heartbeat] = []
        self.pulse = Pulse(self.beats.append, now=self.now)
        executor = PromptExecutor(
            self.forward,
            self.memory,
            sender,
            needs_boundary=config.shift_logits,
            mark=mark,
            on_progress=self.pulse.mark,
            pipeline=self.stages,
        )
        self.engine = PrefillEngine(
            executor,
            PrefillConfig(
                max_num_batched_tokens=budget,
                max_num_seqs=max_num_seqs,
                max_model_len=200,
                page_size=page_size,
                max_request_s=MOST_S,
            ),
            config,
            self.pool,
            cache_of(self.model, self.pool, page_size, is_on=caches, tiers=tiers),
            sender,
            self.fingerprint,
            now=self.now,
        )
        self.said: list[CoreEvent] = []
        self._reserved: dict[AttemptId, tuple[PageRef, ...]] = {}

    def now(self) -> float:
        """The clock."""
        return self.time

    def start(self, name: str, token_ids: Sequence[int], *, to_pool: bool = False) -> AttemptId:
        """Has the engine begin a prompt."""
        attempt, ids = attempt_of(name), tuple(token_ids)
        message = StartPrefill(attempt=attempt, prompt_token_ids=ids, to_pool=to_pool)
        self.engine.handle(message)
        return attempt

    def reserve(self, attempt: AttemptId, num_pages: int) -> Reservation:
        """Has the target expect this many pages."""
        pages = self.target_pool.allocate(num_pages)
        assert pages is not None
        self._reserved[attempt] = pages
        return self.receiver.reserve(attempt, pages, PREFILL, self.time)

    def push_to(self, attempt: AttemptId, num_pages: int) -> Reservation:
        """Reserves, and sends the reservation to the engine."""
        reservation = self.reserve(attempt, num_pages)
        self.engine.handle(PushTo(reservation=reservation))
        return reservation

    def abort(self, attempt: AttemptId) -> None:
        """Has the engine end an attempt."""
        self.engine.handle(Abort(attempt=attempt))

    def step(self) -> bool:
        """One step; keeps the events."""
        moved = self.engine.step()
        self.said += self.engine.outbox()
        return moved

    def settle(self) -> None:
        """Steps until nothing moves."""
        for _ in range(2000):
            if not self.step() and not self._device_works():
                return
        raise AssertionError("the engine never comes to rest")

    def _device_works(self) -> bool:
        """Whether units are on their way, or a real device still computes or digests, after a
        while."""
        if self.model.device.type == "cpu":
            return self.engine._cache.is_copying
        if not self.engine.is_working() and not self.source.exchange.is_moving:
            return False
        time.sleep(0.001)
        return True

    def take(self, kind: type[Event]) -> list[Event]:
        """The events of this kind, removed."""
        found: list[Event] = [event for event in self.said if isinstance(event, kind)]
        self.said = [event for event in self.said if not isinstance(event, kind)]
        return found

    def arrived(self) -> list[Arrived]:
        """The pages that the target has verified; nothing may have failed there."""
        reports = self.receiver.poll(self.time)
        assert not [report for report in reports if isinstance(report, ArrivalRefused)], reports
        return [report for report in reports if isinstance(report, Arrived)]

    def pages_of(self, arrived: Arrived) -> tuple[PageRef, ...]:
        """Its place."""
        return self._reserved[arrived.manifest.attempt]

    def handed(self, arrived: Arrived, count: int) -> torch.Tensor:
        """KV of its first tokens, equal to `kv`."""
        return self.kv([page.page_id for page in self.pages_of(arrived)], count)

    def check_idle(self) -> None:
        """All source pages are available again and no event is left."""
        self.settle()
        audit(self.engine)
        load = self.engine.load()
        assert load.free_pages == load.total_pages
        assert (load.running, load.waiting, load.runnable, load.queued_tokens) == (0, 0, 0, 0)
        assert self.said == []

    def kv(self, page_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
        """K and V in the target's pages: [layers, 2, kv_heads, num_tokens, head_dim]."""
        pages = torch.tensor(list(page_ids))
        kv = torch.stack([torch.stack(layer) for layer in self.target_memory.layers()])
        return kv[:, :, pages].transpose(2, 3).flatten(3, 4)[:, :, :, :num_tokens]

    def _connector(self, memory: PageMemory, incarnation: str) -> LoopbackConnector:
        connector = LoopbackConnector(self.hub, memory, incarnation, self.fingerprint, self.now)
        connector.start()
        return connector

    def close(self) -> None:
        """Gives descriptors back."""
        self.engine.close()
        self.target.close()


def attempt_of(name: str) -> AttemptId:
    """An attempt's id."""
    return AttemptId(f"request-{name}", 1, f"transfer-{name}")
