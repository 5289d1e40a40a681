"""Makes a decode engine from its config or from existing parts; the front runs it as the engine's
process.

Only connects parts to each other.
"""

import contextlib
import time
from functools import partial

import torch

from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.executor import Executor
from effuse.decode_worker.intake import Boundary, Intake
from effuse.decode_worker.replicas import JointForward, ReplicatedEngine
from effuse.decode_worker.scheduler import DecodeLimits
from effuse.kernels.pages import QueuedLayers, place_on_cuda
from effuse.kvtransfer.connector import Connector
from effuse.kvtransfer.ends import HandoffReceiver
from effuse.kvtransfer.layout import Identity, PageMemory
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.units import UnitCache
from effuse.models.part import Forward
from effuse.models.transformer import Transformer
from effuse.worker.assembly import Assembly, assemble
from effuse.worker.config import DecodeConfig
from effuse.worker.engine_process import Engine, main
from effuse.worker.group_parts import ReplicaConnector, pipeline_of
from effuse.worker.rank_messages import CopyPage, ForReplica, Prepare
from effuse.worker.rank_part import RankPart
from effuse.worker.ranks import Ranks
from effuse.worker.watchdog import Pulse


def build(
    config: DecodeConfig, incarnation: str, pulse: Pulse | None = None, *, connects: bool = True
) -> Engine:
    """An engine that is ready to serve. Without a connector it prefills every prompt itself and
    does not listen. Raises ValueError if the config is wrong. Ranks end if the start fails."""
    pulse = pulse or Pulse()
    parts = assemble(
        config, incarnation, "decode", config.default_algorithm, pulse, connects=connects
    )
    with contextlib.ExitStack() as on_failure:
        if parts.ranks is not None:
            on_failure.callback(parts.ranks.close)
        engine = _engine(config, incarnation, parts, pulse, connects=connects)
        on_failure.pop_all()
    return engine


def _engine(
    config: DecodeConfig, incarnation: str, parts: Assembly, pulse: Pulse, *, connects: bool
) -> Engine:
    limits = limits_of(config, parts)
    connector = parts.connect() if connects else None
    wakes = () if connector is None else (connector.fileno(),)
    if config.num_replicas > 1:
        on_device = denoises_on_device(config, parts.model.device)
        with pulse.during("capturing" if on_device else "loading"):
            return replicated(config, incarnation, parts, limits, connector, on_device=on_device)
    core = make_engine(config, incarnation, parts, pulse, *parts.make_pool(), limits, connector)
    return Engine(core, parts.ready, wakes=wakes, ranks=parts.ranks)


def make_engine(
    config: DecodeConfig,
    incarnation: str,
    parts: Assembly,
    pulse: Pulse,
    pool: PagePool,
    cache: UnitCache,
    limits: DecodeLimits,
    connector: Connector | None,
) -> DecodeEngine:
    """An engine over the pages of `pool`, with captured graphs if it denoises on a device."""
    on_device = denoises_on_device(config, parts.model.device)
    with pulse.during("capturing" if on_device else "loading"):
        executor = make_executor(
            parts.model,
            parts.memory,
            parts.runner,
            limits,
            on_device=on_device,
            queued=parts.queued,
            ranks=parts.ranks,
        )
    return make_core(config, incarnation, parts, pool, cache, limits, executor, connector)


def replicated(
    config: DecodeConfig,
    incarnation: str,
    parts: Assembly,
    limits: DecodeLimits,
    connector: Connector | None,
    *,
    on_device: bool,
) -> Engine:
    """An engine of several replicas; `connector` is that of this process's own pages, or None."""
    ranks, memory, runner = parts.ranks, parts.memory, parts.runner
    assert ranks is not None, "replicas are ranks"
    steps = None
    if on_device:
        from effuse.decode_worker.device_slots import DeviceSlots
        from effuse.decode_worker.device_stepper import make_stepper
        from effuse.decode_worker.replica_steps import ReplicaSteps

        ranks.send(Prepare())
        stepper = make_stepper(parts.model, memory.layer_views(), limits)
        steps = ReplicaSteps(stepper, ranks, config.num_replicas)
    joint = JointForward(runner, steps)
    cores = []
    for number in range(config.num_replicas):
        own, copy_page = connector, memory.copy_page
        place = place_on_cuda if parts.model.device.type == "cuda" else None
        if number:
            # A rank has ended all work of a forward once its results are here.
            place, copy_page = None, partial(_copy_of_replica, ranks, number)
            own = connector and ReplicaConnector(ranks, number, connector.name)
        slots = None if steps is None else DeviceSlots(steps.of[number])
        executor = Executor(runner, copy_page, place, slots=slots, replica=number, ask=joint.ask)
        made = *parts.make_pool(), limits, executor, own
        cores.append(make_core(config, incarnation, parts, *made))
    wakes = () if connector is None else (connector.fileno(), ranks.event_signal)
    return Engine(ReplicatedEngine(cores, joint), parts.ready, wakes=wakes, ranks=ranks)


def _copy_of_replica(ranks: Ranks, replica: int, source: int, target: int) -> None:
    ranks.send(ForReplica(replica, CopyPage(source, target)))


def make_core(
    config: DecodeConfig,
    incarnation: str,
    parts: Assembly,
    pool: PagePool,
    cache: UnitCache,
    limits: DecodeLimits,
    executor: Executor,
    connector: Connector | None,
) -> DecodeEngine:
    """An engine over the pages of `pool`."""
    model = parts.model
    own = Identity(incarnation, parts.fingerprint, parts.memory.layout)
    return DecodeEngine(
        executor,
        pool,
        cache,
        Intake(model.config, limits),
        HandoffReceiver(pool, connector, own, config.handoff_lease_s),
        Boundary(
            hidden_size=model.config.hidden_size if model.config.shift_logits else None,
            dtype=model.dtype,
            device=model.device,
        ),
        now=time.monotonic,
        max_request_s=config.max_request_s,
    )


def denoises_on_device(config: DecodeConfig, device: torch.device) -> bool:
    """Whether steps are graphs over the device's slots, instead of run by the host, which has
    several forwards of a pipeline under way."""
    is_whole = config.pipeline_parallel_size == 1
    return device.type == "cuda" and config.runs_graphs and is_whole


def limits_of(config: DecodeConfig, part: Assembly | RankPart) -> DecodeLimits:
    """The limits that a config, the pages and the model set."""
    layout = part.memory.layout
    return DecodeLimits(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=part.max_model_len,
        num_pages=part.memory.num_pages,
        page_size=layout.span,
        context_degree=layout.context_degree,
        block_size=part.model.config.block_size,
        max_window=config.max_window,
        max_stop_ids=config.max_stop_ids,
    )


def make_executor(
    model: Transformer,
    memory: PageMemory,
    forward: Forward,
    limits: DecodeLimits,
    *,
    on_device: bool,
    queued: QueuedLayers | None = None,
    ranks: Ranks | None = None,
) -> Executor:
    """The executor for the pages in `memory`, with captured graphs if it denoises `on_device`.
    `queued` are the layers of `forward`."""
    place = place_on_cuda if model.device.type == "cuda" else None
    if not on_device:
        pipeline = pipeline_of(forward)
        return Executor(forward, memory.copy_page, place, queued, pipeline=pipeline)
    # A CPU needs neither the kernels of steps nor Triton.
    from effuse.decode_worker.device_slots import DeviceSlots
    from effuse.decode_worker.device_stepper import make_stepper

    if ranks is not None:
        ranks.send(Prepare())
    stepper = make_stepper(model, memory.layer_views(), limits, ranks=ranks)
    return Executor(forward, memory.copy_page, place, queued, DeviceSlots(stepper))


if __name__ == "__main__":
    main(DecodeConfig, build)
