"""The parts of both engines, made from a worker's config: model, pages, connector, fingerprint.

Runs only in the engine's process; the front never imports it. Each engine's own `build.py` uses the
parts.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from effuse.config.checks import name_of_model
from effuse.config.decoding import Algorithm
from effuse.config.pool_address import PoolAddress
from effuse.kernels.pages import QueuedLayers
from effuse.kvtransfer.connector import Connector
from effuse.kvtransfer.layout import Fingerprint, ModelFacts, PageMemory, fingerprint
from effuse.kvtransfer.lmcache_pool import LMCachePool
from effuse.kvtransfer.mooncake_pool import MooncakePool, check_package
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.stores import UnitStore
from effuse.kvtransfer.tiered_cache import TieredCache
from effuse.kvtransfer.tiers import Tiers
from effuse.kvtransfer.unit_files import UnitFiles
from effuse.kvtransfer.units import UnitCache, unit_tokens_of
from effuse.models.defaults import read_defaults, refuse_unserved
from effuse.models.group import RankPlace
from effuse.models.part import PromptForward
from effuse.models.transformer import Transformer
from effuse.models.weights import weights_digest
from effuse.placement.records import ModelInfo, Role
from effuse.worker.config import WorkerConfig
from effuse.worker.connectors import choose_connector, connect, why_no_nixl
from effuse.worker.group_parts import GroupConnector, GroupHost, GroupRunner
from effuse.worker.meeting import join, place_of
from effuse.worker.messages import Ready
from effuse.worker.rank_messages import Open
from effuse.worker.rank_part import (
    GIB,
    RankPart,
    device_of,
    load_shard,
    make_part,
    read_model,
)
from effuse.worker.ranks import Ranks
from effuse.worker.watchdog import Pulse, end_process, note_only

# A block's KV is stored by the forward after the one in which it settled.
_COMMIT_RULE = "settled_recompute"
_OPEN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """The parts of an engine. `connect` starts the connector of its pages and returns it; it raises
    ValueError if that cannot be opened. `queued` are the runner's layers if they are followed on a
    device. With other `ranks`, runner and memory send them the same commands. `tiers` are the
    stores of kept KV outside of the pool, if any.
    """

    model: Transformer
    memory: PageMemory
    runner: PromptForward
    queued: QueuedLayers | None
    fingerprint: Fingerprint
    connect: Callable[[], Connector]
    max_model_len: int
    ready: Ready
    ranks: Ranks | None
    caches: bool  # KV may outlive its request
    tiers: Tiers | None
    unit_tokens: int  # in a unit of kept KV

    def make_pool(self) -> tuple[PagePool, UnitCache]:
        """The accounts of the pages, and the cache over them."""
        pool = PagePool(self.memory.num_pages)
        make: Callable[..., UnitCache] = partial(UnitCache, is_on=self.caches)
        if self.tiers is not None:
            make = partial(TieredCache, tiers=self.tiers)
        return pool, make(
            pool,
            page_size=self.memory.layout.span,
            unit_size=self.unit_tokens,
            is_causal=self.model.config.prompt_attention == "causal_blocks",
        )


def assemble(
    config: WorkerConfig,
    incarnation: str,
    role: Role,
    default_algorithm: Algorithm | None,
    pulse: Pulse,
    *,
    connects: bool = True,
) -> Assembly:
    """Loads everything and runs one forward. Raises ValueError for a bad config.

    `default_algorithm` is the model's if it is None. `pulse` receives the progress of long steps,
    now and in all later forwards. Without `connects` no rank opens a connector, and a broken group
    raises GroupBroken and does not end the process. Ranks end if the start fails.
    """
    device = device_of(config)
    config = _settled(config, device, default_algorithm)
    with contextlib.ExitStack() as on_failure:
        ranks, place = None, RankPlace()
        if config.num_ranks > 1:
            sizes = read_model(config)
            place_of(config, sizes, 0).shard(sizes)  # whether it can be cut for so many ranks
            ranks = Ranks(config, role, incarnation, end_process if connects else note_only)
            on_failure.callback(ranks.close)
            ranks.wait_for("present", config.startup_timeout_s)
            try:
                place = join(config, sizes, 0, device, ranks.meeting)
            except ConnectionError as error:  # a rank may have crashed, so another start may work
                ranks.failed(error, "the meeting")
            ranks.group = place.meeting
        model = load_shard(config, device, place, pulse)
        if ranks is not None:
            ranks.wait_for("loaded", config.startup_timeout_s)
        host_fd = None if ranks is None else ranks.host_fd
        part = make_part(config, role, pulse, model, ranks, host_fd)
        layout = part.memory.layout
        agreed = fingerprint(layout, _facts_of(config, model))
        if ranks is not None and connects:
            ranks.send(Open(agreed))
            ranks.wait_for("open", config.startup_timeout_s)
        parts = Assembly(
            model=model,
            memory=part.memory,
            runner=part.runner if ranks is None else GroupRunner(part.runner, ranks, pulse.mark),
            queued=part.queued,
            fingerprint=agreed,
            connect=partial(_connect_all, config, part, incarnation, agreed, role, ranks),
            max_model_len=part.max_model_len,
            ready=_ready(config, part, agreed, default_algorithm),
            ranks=ranks,
            caches=config.enable_prefix_caching,
            tiers=_tiers(config, part, agreed, ranks),
            unit_tokens=_unit_tokens(config, layout.span, model),
        )
        on_failure.pop_all()
    return parts


def _ready(
    config: WorkerConfig, part: RankPart, agreed: Fingerprint, algorithm: Algorithm | None
) -> Ready:
    layout = part.memory.layout
    return Ready(
        model=_model_info(config, part, algorithm),
        fingerprint=tuple((field.name, field.value) for field in agreed),
        page_size=layout.span,
        page_bytes=layout.span_bytes,
        total_pages=part.memory.num_pages * config.num_replicas,
        connector=config.connector,
    )


def _settled(
    config: WorkerConfig, device: torch.device, algorithm: Algorithm | None
) -> WorkerConfig:
    """The config with its connector. Raises ValueError if a package is missing that it needs, or if
    the model does not fit its limits or the default algorithm."""
    if config.kv_pool is not None and PoolAddress.parse(config.kv_pool).kind == "mooncake":
        check_package()
    adapted, limits = config.adapter is not None, vars(config)
    refuse_unserved(config.directory, config.block_size, algorithm, adapted=adapted, limits=limits)
    connector = choose_connector(
        config, on_gpu=device.type == "cuda", why_no_nixl=partial(why_no_nixl, config.host)
    )
    return replace(config, connector=connector)


def _tiers(
    config: WorkerConfig, part: RankPart, agreed: Fingerprint, ranks: Ranks | None
) -> Tiers | None:
    """Host memory and stores for kept KV. Raises ValueError if there can be no files."""
    if part.host is None:
        return None
    stores: list[UnitStore] = []
    directory = config.kv_offloading_dir
    if directory is not None or config.kv_pool is not None:
        name = _content_of(config, part, agreed)
        if directory is not None:
            try:
                stores.append(UnitFiles(directory / name, int(config.kv_offloading_dir_size * GIB)))
            except OSError as error:
                raise ValueError(f"--kv-offloading-dir: {error}") from error
        if config.kv_pool is not None:
            address = PoolAddress.parse(config.kv_pool)
            if address.kind == "mooncake":
                stores.append(MooncakePool(address, name, part.host))
            else:
                stores.append(LMCachePool(address, name))
    tiers = Tiers(
        part.host if ranks is None else GroupHost(part.host, ranks),
        stores,
        now=time.monotonic,
        row_dtype=part.model.dtype,
        row_device=part.model.device,
    )
    tiers.await_stores(_OPEN_S)  # first requests would compute what these have
    return tiers


def _content_of(config: WorkerConfig, part: RankPart, agreed: Fingerprint) -> str:
    """Name of all on which the bytes of a leader's units depend, beside their keys. The number of
    ranks only changes their rounding, which matters if equal bits are promised."""
    # Other kernels compute other bits.
    device = part.model.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    kernels = config.attention, config.batch_invariant, gpu
    is_cut = config.batch_invariant and config.num_ranks > 1
    cut = (config.num_ranks, config.expert_parallel) if is_cut else ()
    layout = replace(part.memory.layout, held=None, copies=1)
    facts = agreed, layout, part.model.config.block_size, kernels, *cut
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _unit_tokens(config: WorkerConfig, page_size: int, model: Transformer) -> int:
    try:
        return unit_tokens_of(page_size, model.config.block_size, config.kv_unit_tokens)
    except ValueError as error:
        raise ValueError(f"--kv-unit-tokens: {error}") from error


def _connect_all(
    config: WorkerConfig,
    part: RankPart,
    incarnation: str,
    agreed: Fingerprint,
    role: Role,
    ranks: Ranks | None,
) -> Connector:
    """The connector of all ranks, of which the others have opened theirs."""
    own = connect(config, part.memory, part.max_model_len, incarnation, agreed, role)
    return own if ranks is None or config.num_replicas > 1 else GroupConnector(own, ranks)


def _facts_of(config: WorkerConfig, model: Transformer) -> ModelFacts:
    # Peers of other degrees have units of their own, which only matter in a shared pool.
    units = _unit_tokens(config, config.page_size, model)
    fewest = unit_tokens_of(config.page_size, model.config.block_size)
    return ModelFacts(
        weights=weights_digest(config.directory, config.adapter),
        architecture=model.config.architecture,
        block_size=model.config.block_size,
        mask_token_id=model.config.mask_token_id,
        prompt_attention=model.config.prompt_attention,
        commit_rule=_COMMIT_RULE,
        deterministic=model.stores_alike,
        unit_tokens=0 if units == fewest else units,
    )


def _model_info(config: WorkerConfig, part: RankPart, algorithm: Algorithm | None) -> ModelInfo:
    directory, adapted, model = config.directory, config.adapter is not None, part.model.config
    return ModelInfo(
        name=config.served_model_name or name_of_model(directory),
        architecture=model.architecture,
        block_size=model.block_size,
        max_model_len=part.max_model_len,
        vocab_size=model.vocab_size,
        mask_token_id=model.mask_token_id,
        eos_token_ids=model.eos_token_ids,
        prompt_attention=model.prompt_attention,
        deterministic=part.model.is_deterministic,
        defaults=read_defaults(directory, model, algorithm=algorithm, adapted=adapted),
    )
