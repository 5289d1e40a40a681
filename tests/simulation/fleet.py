"""Shared parts of a run's processes: names, hosts, leases in Redis, and how one reaches another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from effuse.config.decoding import DecodeSettings, DecodingDefaults
from effuse.kvtransfer.messages import AttemptId
from effuse.placement.records import Capacity, Load, ModelInfo, Role, WorkerRecord, encode
from effuse.worker.messages import CoreEvent

from .clock import Clock
from .engine_process import EngineProcess, Sizes
from .network import Call, Network
from .pages import BLOCK, MASK, PAGE, TOKENS, fingerprint_of
from .transport import Fabric

if TYPE_CHECKING:
    from .worker import Front

ROUTERS, REDIS, MODEL = ("router0", "router1"), "redis", "simulated"


@dataclass(frozen=True, slots=True)
class Writer:
    """The life of a prefill worker that knows the pages."""

    host: str
    incarnation: str


def record_of(
    sizes: Sizes, worker_id: str, role: Role, incarnation: str, *, is_ready: bool
) -> WorkerRecord:
    """A worker's announcement."""
    model = sizes.model
    return WorkerRecord(
        worker_id=worker_id,
        role=role,
        address=worker_id,
        incarnation=incarnation,
        state="ready" if is_ready else "starting",
        fingerprint=tuple((field.name, field.value) for field in fingerprint_of(model)),
        model=ModelInfo(
            name=MODEL,
            architecture=model.architecture,
            block_size=BLOCK,
            max_model_len=TOKENS,
            vocab_size=model.vocab_size,
            mask_token_id=MASK,
            eos_token_ids=(),
            prompt_attention=model.prompt_attention,
            defaults=DecodingDefaults(
                settings=DecodeSettings(algorithm="d2f", denoising_steps=BLOCK)
            ),
        ),
        capacity=Capacity(
            total_pages=sizes.prefill_pages if role == "prefill" else sizes.decode_pages,
            page_size=PAGE,
            max_num_seqs=4,
            max_num_batched_tokens=sizes.budget,
        ),
        load=Load(),
    )


@dataclass(slots=True)
class Registry:
    """Redis, as far as leases go (placement/*.lua)."""

    clock: Clock
    network: Network
    down_until: float = 0.0
    _leases: dict[str, tuple[str, bytes, float]] = field(default_factory=dict)

    def announce(
        self, record: WorkerRecord, holder: str, ttl_s: float, *, takes: bool
    ) -> str | None:
        """Takes or renews a lease; None if Redis does not answer."""
        now = self.clock.now
        if not self.answers(record.worker_id):
            return None
        held = self._leases.get(record.worker_id)
        is_live = held is not None and held[2] > now
        if held is not None and is_live and not takes and held[0] > holder:
            return "superseded"
        self._leases[record.worker_id] = holder, encode(record), now + ttl_s
        return "held"

    def workers(self, host: str) -> list[tuple[bytes, float]] | None:
        """Records of live workers, and seconds left; None if Redis does not answer a router."""
        if not self.answers(host):
            return None
        now = self.clock.now
        return [(record, end - now) for _, record, end in self._leases.values() if end > now]

    def forget(self) -> None:
        """It was emptied."""
        self._leases.clear()

    def answers(self, host: str) -> bool:
        """Whether Redis answers a host now."""
        return self.clock.now >= self.down_until and not self.network.is_cut(host, REDIS)


class Fleet:
    """All processes that are or were."""

    def __init__(self, fabric: Fabric, sizes: Sizes) -> None:
        self.clock = fabric.clock
        self.network = fabric.network
        self.fabric = fabric
        self.sizes = sizes
        self.registry = Registry(fabric.clock, fabric.network)
        self.fronts: dict[str, Front] = {}  # the newest one of each host
        self.engines: dict[str, EngineProcess] = {}  # by incarnation, dead ones too
        self.troubled: set[str] = set()  # workers that were silent or unwell at some time
        self._names: Counter[str] = Counter()

    def next_name(self, kind: str) -> str:
        """A name that sorts behind the earlier ones of its kind."""
        self._names[kind] += 1
        return f"{kind}{self._names[kind]}"

    def add(self, worker_id: str, role: Role) -> None:
        """Starts a worker."""
        from .worker import Front  # a front knows its fleet

        self.fronts[worker_id] = Front(self, worker_id, role)

    def replace(self, front: Front) -> None:
        """Starts a worker in the place of one that has died."""
        self.add(front.worker_id, front.role)

    def make_engine(
        self, host: str, role: Role, tell: Callable[[str, Sequence[CoreEvent]], None]
    ) -> EngineProcess:
        """A new life of an engine."""
        name = self.next_name(f"{host}.")
        engine = EngineProcess(self.fabric, host, name, role, self.sizes, tell)
        self.engines[name] = engine
        return engine

    def is_refused(self, host: str, writer: Writer) -> bool:
        """Whether a host's connections to a writer's front and engine are refused."""
        if self.network.is_cut(host, writer.host):
            return False
        return (
            not self.fronts[writer.host].is_alive and not self.engines[writer.incarnation].is_alive
        )

    def abort(
        self, source: str, target: str, attempt: AttemptId, answer: Callable[[bool, str], None]
    ) -> None:
        """Asks a worker to end an attempt; there may be no answer."""
        call, front = Call(self.network, source, target), self.fronts[target]

        def reply(drained: bool, incarnation: str) -> None:
            call.answer(lambda: answer(drained, incarnation))

        call.ask(lambda: front.when_awake(lambda: front.abort(attempt, reply)))
