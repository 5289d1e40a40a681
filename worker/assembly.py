"""The parts of both engines, made from a worker's config: model, pages, connector, fingerprint.

Runs only in the engine's process; the front never imports it. Each engine's own `build.py` uses the
parts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import effuse.models
from effuse.config.checks import name_of_model
from effuse.config.decoding import Algorithm, Sampling
from effuse.kernels.attention import block_attention
from effuse.kernels.marks import LayerMarks, QueuedLayers, place_on_cuda
from effuse.kvtransfer.connector import Connector
from effuse.kvtransfer.layout import (
    MOST_GROUPS,
    Fingerprint,
    KVLayout,
    ModelFacts,
    fingerprint,
)
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import MAX_PAGE_BYTES, MAX_PAGES, MAX_POOL_PAGES
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.thread import ThreadConnector
from effuse.kvtransfer.transport import Transport
from effuse.kvtransfer.zmq_sockets import CurveKeys
from effuse.models import part as forwards
from effuse.models.config import ModelConfig
from effuse.models.defaults import read_defaults
from effuse.models.group import join_group
from effuse.models.prompt_graphs import PromptGraphs
from effuse.models.runner import ModelRunner
from effuse.models.shard import RankPlace, shard_of
from effuse.models.transformer import Attend, Transformer
from effuse.models.weights import load_model, select_dtype, weights_digest
from effuse.placement.records import ModelInfo, Role
from effuse.protos.gate import FleetSecret
from effuse.worker.config import PrefillConfig, WorkerConfig
from effuse.worker.connectors import choose_connector, why_no_nixl
from effuse.worker.group_parts import GroupConnector, GroupMemory, GroupRunner
from effuse.worker.messages import Ready
from effuse.worker.rank_messages import Open, meeting_path
from effuse.worker.ranks import Ranks, end_process, note_only, start_ranks
from effuse.worker.watchdog import Pulse

# A block's KV is stored by the forward after the one in which it settled.
COMMIT_RULE = "settled_recompute"

CPU_THREADS = 1
"""Threads of an engine on a CPU. With two, several engines on one machine wait for each other at
the end of every operator, and are many times slower.
"""

_JOIN_S = 60.0  # for processes that all wait to meet
_CPU_POOL_BYTES = 256 << 20  # where the config does not say; touched page by page as it is used


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What each rank of an engine has: its share of the model and of each page."""

    model: Transformer
    memory: PageMemory
    runner: ModelRunner
    queued: QueuedLayers | None
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """The parts of an engine. `connect` starts the connector of its pages and returns it; it raises
    ValueError if that cannot be opened. `queued` are the runner's layers if they are followed on a
    device. With other `ranks`, runner and memory send them the same commands.
    """

    model: Transformer
    memory: PageMemory
    pool: PagePool
    runner: forwards.PromptForward
    queued: QueuedLayers | None
    fingerprint: Fingerprint
    connect: Callable[[], Connector]
    max_model_len: int
    ready: Ready
    ranks: Ranks | None


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
    raises GroupBroken and does not end the process.
    """
    device = device_of(config)
    connector = choose_connector(
        config, on_gpu=device.type == "cuda", why_no_nixl=partial(why_no_nixl, config.host)
    )
    config = replace(config, connector=connector)
    directory = model_directory(config)
    ranks, place = None, RankPlace()
    if config.tensor_parallel_size > 1:
        shard_of(
            ModelConfig.from_dir(directory, block_size=config.block_size),
            *(0, config.tensor_parallel_size),
            expert_parallel=config.expert_parallel,
        )
        ranks = start_ranks(config, role, incarnation, end_process if connects else note_only)
        ranks.wait_for("present", config.startup_timeout_s)
        place = join(config, 0, device, ranks.home)
        ranks.group = place.group
    model = load_shard(config, device, place, pulse)
    if ranks is not None:
        ranks.wait_for("loaded", config.startup_timeout_s)
    part = make_part(config, role, pulse, model, ranks)
    layout = part.memory.layout
    agreed = fingerprint(layout, _facts(config, directory, model))
    if ranks is not None and connects:
        ranks.send(Open(agreed))
        ranks.wait_for("open", config.startup_timeout_s)
    return Assembly(
        model=model,
        memory=part.memory,
        pool=PagePool(part.memory.num_pages),
        runner=part.runner if ranks is None else GroupRunner(part.runner, ranks),
        queued=part.queued,
        fingerprint=agreed,
        connect=partial(_connect_all, config, part, incarnation, agreed, role, ranks),
        max_model_len=part.max_model_len,
        ready=Ready(
            model=_model_info(config, directory, model, part.max_model_len, default_algorithm),
            fingerprint=tuple((field.name, field.value) for field in agreed),
            page_size=layout.page_size,
            total_pages=part.memory.num_pages,
            connector=connector,
        ),
        ranks=ranks,
    )


def join(config: WorkerConfig, rank: int, device: torch.device, home: Path) -> RankPlace:
    """Meets the other ranks of the engine. Raises ValueError if they do not come."""
    size = config.tensor_parallel_size
    group = join_group(rank, size, device, meeting_path(home), _JOIN_S)
    return RankPlace(rank, size, config.expert_parallel, group)


def load_shard(
    config: WorkerConfig, device: torch.device, place: RankPlace, pulse: Pulse
) -> Transformer:
    """The model, or the rank's share of it. Raises ValueError."""
    _announce_compiling(config, device, pulse)
    return _load(config, model_directory(config), device, place)


def make_part(
    config: WorkerConfig,
    role: Role,
    pulse: Pulse,
    model: Transformer,
    ranks: Ranks | None = None,
) -> RankPart:
    """Pages and a runner for a model, and a first forward; all ranks call it together.

    Only a leader has `ranks`. Raises ValueError for a config that leaves no room for pages.
    """
    max_model_len = _max_model_len(config, model)
    layout, device = _layout(config, model), model.device
    num_pages = _num_pages(config, model, layout, max_model_len)
    memory = (
        PageMemory(layout, num_pages, device)
        if ranks is None
        else GroupMemory(layout, num_pages, device, ranks)
    )
    # Only a worker that pushes needs to know which layers are stored.
    marks = LayerMarks(layout.num_layers, layout.num_groups, device) if role == "prefill" else None
    most_cached = max_model_len if caches_prefixes(config, model) else 0
    graphs = _prompt_graphs(config, model, memory, marks, pulse, most_cached)
    queued = _queued_layers(device, role, pulse)
    runner = _runner(model, memory, graphs, marks, pulse, queued)
    warm_up(runner, model.config.max_position_embeddings, model.config.block_size)
    return RankPart(
        model=model, memory=memory, runner=runner, queued=queued, max_model_len=max_model_len
    )


def model_directory(config: WorkerConfig) -> Path:
    """Directory of the checkpoint; without one in the config the bundled model's."""
    return config.model or Path(next(iter(effuse.models.__path__))) / "bundled"


def warm_up(runner: forwards.Forward, most: int, num_rows: int) -> None:
    """Runs a forward of `num_rows` rows, nearly all of which want a candidate; writes to page 0.

    A sequence has at most `most` of them, the model's positions: tables end there.
    """
    parts = []
    for begin in range(0, num_rows, most):
        length = min(most, num_rows - begin)
        wanted = range(1, length)  # position 0 has no row before it, which shifting models need
        part = forwards.Part(
            token_ids=[0] * length,
            start=0,
            pages=[0],
            num_stored=int(begin == 0),
            block_origin=0,
            candidates=wanted,
            denoise_counts=[0] * len(wanted),
            sampling=Sampling(temperature=1.0, top_p=0.9, top_k=8),
        )
        parts.append(part)
    runner.run(parts)


def device_of(config: WorkerConfig, rank: int = 0) -> torch.device:
    """Device of a rank: the CPU, or the visible GPU of its number. Raises ValueError if fewer GPUs
    are visible than there are ranks.

    Every rank sees all GPUs of its worker, which is the form in which NCCL is used most.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no CUDA device is available here")
    if config.device == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(CPU_THREADS)
        return torch.device("cpu")
    size, count = config.tensor_parallel_size, torch.cuda.device_count()
    if count < size:
        raise ValueError(f"--tensor-parallel-size {size}: this worker sees {count} GPUs")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _announce_compiling(config: WorkerConfig, device: torch.device, pulse: Pulse) -> None:
    """A kernel is compiled at its first launch with a new kind of arguments, at any time."""
    if device.type != "cuda" or not pulse.is_watched:  # hooks are global to the process
        return
    from triton import knobs  # a CPU needs none

    knobs.runtime.jit_cache_hook = lambda **_: pulse.begin("compiling")
    knobs.runtime.jit_post_compile_hook = lambda **_: pulse.end()
    if config.attention == "flex":
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(lambda _: pulse.begin("compiling"))
        callback_handler.register_end_callback(lambda _: pulse.end())


def _queued_layers(device: torch.device, role: Role, pulse: Pulse) -> QueuedLayers | None:
    """How a decode worker's own forwards show progress: it waits for those of a canvas but not for
    those of a prompt. A prefill worker follows the forwards whose pages it pushes.
    """
    if device.type != "cuda" or role != "decode" or not pulse.is_watched:
        return None
    return QueuedLayers(place_on_cuda, pulse.mark)


def _load(
    config: WorkerConfig, directory: Path, device: torch.device, place: RankPlace
) -> Transformer:
    on_cpu = device.type == "cpu"
    name = "float32" if config.dtype == "auto" and on_cpu else config.dtype
    return load_model(
        directory,
        adapter=config.adapter,
        device=device,
        dtype=select_dtype(name, directory),
        block_size=config.block_size,
        attend=_attend(config),
        place=place,
    )


def _attend(config: WorkerConfig) -> Attend:
    """Imports FlexAttention only for its use, because it loads all of torch's compiler."""
    if config.attention == "flex":
        from effuse.kernels.attention_flex import FlexAttention

        return FlexAttention()
    return block_attention


def _max_model_len(config: WorkerConfig, model: Transformer) -> int:
    most = model.config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > most:
        raise ValueError(
            f"--max-model-len: expected at most the model's {most} positions, "
            f"got {config.max_model_len}"
        )
    return config.max_model_len or most


def _layout(config: WorkerConfig, model: Transformer) -> KVLayout:
    return KVLayout(
        kind=config.kv_layout,
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        page_size=config.page_size,
        dtype=str(model.dtype).removeprefix("torch."),
        most_groups=MOST_GROUPS[config.connector],
        rank=model.shard.rank,
        degree=model.shard.size,
    )


def _num_pages(
    config: WorkerConfig, model: Transformer, layout: KVLayout, max_model_len: int
) -> int:
    """Pages from the config, or as many as fit: at least one whole request."""
    if config.num_pages is not None:
        return config.num_pages
    least = layout.pages_for(max_model_len)
    if model.device.type == "cpu":
        return max(least, _CPU_POOL_BYTES // layout.page_bytes)
    return model.group.least(_device_pages(config, model, layout))


def _device_pages(config: WorkerConfig, model: Transformer, layout: KVLayout) -> int:
    """Pages in the device memory that the largest forward leaves of the configured share."""
    probe = PageMemory(layout, 1, model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    most = model.config.max_position_embeddings
    warm_up(_runner(model, probe), most, config.max_num_batched_tokens)
    total = torch.cuda.get_device_properties(model.device).total_memory
    share = int(total * config.gpu_memory_utilization)
    room = share - torch.cuda.max_memory_allocated(model.device)
    if room < layout.page_bytes:
        raise ValueError(
            f"--gpu-memory-utilization: {share} of {total} bytes leave no room for KV pages next "
            f"to the weights and a forward pass of {config.max_num_batched_tokens} tokens"
        )
    torch.cuda.empty_cache()
    return min(room // layout.page_bytes, MAX_POOL_PAGES)


def caches_prefixes(config: WorkerConfig, model: Transformer) -> bool:
    """Whether prompts may begin with cached tokens."""
    is_on = isinstance(config, PrefillConfig) and config.enable_prefix_caching
    return is_on and model.config.prompt_attention == "causal_blocks"


def _prompt_graphs(
    config: WorkerConfig,
    model: Transformer,
    memory: PageMemory,
    marks: LayerMarks | None,
    pulse: Pulse,
    max_context: int,
) -> PromptGraphs | None:
    """Graphs captured before serving; None if they are not used."""
    if model.device.type != "cuda" or not config.runs_graphs:
        return None
    graphs = PromptGraphs(
        model,
        memory.layer_views(),
        page_size=memory.layout.page_size,
        block_size=model.config.block_size,
        uses_graphs=True,
        marks=marks,
        max_context=max_context,
    )
    with pulse.during("capturing"):
        graphs.prepare()
    return graphs


def _runner(
    model: Transformer,
    memory: PageMemory,
    graphs: PromptGraphs | None = None,
    marks: LayerMarks | None = None,
    pulse: Pulse | None = None,
    queued: QueuedLayers | None = None,
) -> ModelRunner:
    """Layers are signs of life at their launch, or at their end if they are queued."""
    at_launch = None if pulse is None else pulse.mark
    return ModelRunner(
        model,
        memory.layer_views(),
        page_size=memory.layout.page_size,
        block_size=model.config.block_size,
        graphs=graphs,
        marks=marks,
        on_layer=at_launch if queued is None else queued.add,
        wait=None if queued is None else queued.wait,
    )


def _facts(config: WorkerConfig, directory: Path, model: Transformer) -> ModelFacts:
    return ModelFacts(
        weights=weights_digest(directory, config.adapter),
        architecture=model.config.architecture,
        block_size=model.config.block_size,
        mask_token_id=model.config.mask_token_id,
        prompt_attention=model.config.prompt_attention,
        commit_rule=COMMIT_RULE,
    )


def _model_info(
    config: WorkerConfig,
    directory: Path,
    model: Transformer,
    max_model_len: int,
    default_algorithm: Algorithm | None,
) -> ModelInfo:
    return ModelInfo(
        name=config.served_model_name or name_of_model(directory),
        architecture=model.config.architecture,
        block_size=model.config.block_size,
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        mask_token_id=model.config.mask_token_id,
        eos_token_ids=model.config.eos_token_ids,
        prompt_attention=model.config.prompt_attention,
        defaults=read_defaults(
            directory,
            model.config,
            algorithm=default_algorithm,
            adapted=config.adapter is not None,
        ),
    )


def connect(
    config: WorkerConfig, part: RankPart, incarnation: str, agreed: Fingerprint, role: Role
) -> Connector:
    """Starts the connector of a rank's pages. Raises ValueError if it cannot be opened."""
    _check_reservable(part.memory.layout, part.max_model_len)
    transport = _transport(config, part.memory, incarnation, role)
    connector = ThreadConnector(transport, part.memory, incarnation, agreed)
    connector.start()
    return connector


def _connect_all(
    config: WorkerConfig,
    part: RankPart,
    incarnation: str,
    agreed: Fingerprint,
    role: Role,
    ranks: Ranks | None,
) -> Connector:
    """The connector of all ranks, of which the others have opened theirs."""
    own = connect(config, part, incarnation, agreed, role)
    return own if ranks is None else GroupConnector(own, ranks)


def _check_reservable(layout: KVLayout, max_model_len: int) -> None:
    """Raises ValueError if a reservation could not name a page, or all pages of a prompt."""
    size, page_bytes = layout.page_size, layout.page_bytes
    if page_bytes > MAX_PAGE_BYTES:
        most = MAX_PAGE_BYTES * size // page_bytes
        raise ValueError(
            f"--page-size: expected at most {most}, because the limit is {MAX_PAGE_BYTES} bytes a "
            f"page and a page of {size} tokens takes {page_bytes}"
        )
    if layout.pages_for(max_model_len) > MAX_PAGES:
        raise ValueError(
            f"--page-size: expected at least {-(-max_model_len // MAX_PAGES)}, because a handoff "
            f"has at most {MAX_PAGES} pages and a prompt may have {max_model_len} tokens, got "
            f"{size}; a lower --max-model-len also helps"
        )


def _transport(config: WorkerConfig, memory: PageMemory, incarnation: str, role: Role) -> Transport:
    """Imports only the chosen one, because NIXL needs a library that ZMQ does not."""
    if config.connector == "nixl":
        from effuse.kvtransfer.nixl_transport import NixlTransport

        return NixlTransport(memory, incarnation, role=role, host=config.host)
    from effuse.kvtransfer.zmq_transport import ZmqTransport

    return ZmqTransport(
        memory,
        host=config.host,
        advertised_host=config.connector_host or config.reachable_host(),
        keys=_curve_keys(config),
    )


def _curve_keys(config: WorkerConfig) -> CurveKeys | None:
    if not config.encrypt_pages:
        return None
    if config.fleet_secret is None:
        raise ValueError("--encrypt-pages: expected --fleet-secret with it")
    return CurveKeys.of(FleetSecret.read(config.fleet_secret).derive("pages"))
