"""What each rank of an engine has: its share of the model, its pages and a runner over them.

Runs only in an engine's processes; the front never imports it.
"""

import math
from dataclasses import dataclass
from itertools import product

import torch

from effuse.config.decoding import Sampling
from effuse.kernels.attention import Attend, block_attention
from effuse.kernels.pages import LayerMarks, QueuedLayers, place_on_cuda
from effuse.kvtransfer.host_pages import HostPages
from effuse.kvtransfer.layout import MOST_GROUPS, KVLayout, PageMemory, num_groups_of
from effuse.kvtransfer.messages import MAX_POOL_PAGES, KVPart
from effuse.models.config import ModelConfig
from effuse.models.group import RankPlace
from effuse.models.part import Forward, Part
from effuse.models.prompt_graphs import PromptGraphs
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer
from effuse.models.weights import load_model, measure_products, select_dtype
from effuse.placement.records import Role
from effuse.worker.config import WorkerConfig
from effuse.worker.group_parts import GroupMemory
from effuse.worker.ranks import Ranks
from effuse.worker.watchdog import Pulse

CPU_THREADS = 1
"""Threads of an engine on a CPU. With two, several engines on one machine wait for each other at
the end of every operator, and are many times slower.
"""

GIB = 1 << 30
_CPU_POOL_BYTES = 256 << 20  # if the config does not set it; touched page by page at first use


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What each rank of an engine has: its share of the model and of each page."""

    model: Transformer
    memory: PageMemory
    runner: ModelRunner
    queued: QueuedLayers | None
    max_model_len: int
    host: HostPages | None  # for kept KV without room in the pages


def read_model(config: WorkerConfig) -> ModelConfig:
    """The model's configuration. Raises ValueError."""
    return ModelConfig.from_dir(config.directory, block_size=config.block_size)


def load_shard(
    config: WorkerConfig, device: torch.device, place: RankPlace, pulse: Pulse
) -> Transformer:
    """The model, or the rank's share of it. Raises ValueError."""
    _announce_compiling(config, device, pulse)
    directory, is_exact = config.directory, config.dtype == "auto" and device.type == "cpu"
    dtype = select_dtype("float32" if is_exact else config.dtype, directory)
    if config.batch_invariant:
        check_batch_invariant(device, dtype)
    length = config.max_model_len
    # The forward that measures memory may have a longer sequence than any request.
    positions = None if length is None else max(length, config.max_num_batched_tokens)
    model = load_model(
        directory,
        adapter=config.adapter,
        device=device,
        dtype=dtype,
        block_size=config.block_size,
        most_positions=positions,
        attend=_attend(config),
        place=place,
        batch_invariant=config.batch_invariant,
    )
    if config.batch_invariant:
        measure_products(model)
    return model


def make_part(
    config: WorkerConfig,
    role: Role,
    pulse: Pulse,
    model: Transformer,
    ranks: Ranks | None = None,
    host_fd: int | None = None,
) -> RankPart:
    """Pages and a runner for a model, and a first forward; all ranks call it together.

    Only a leader has `ranks`. Raises ValueError for a config that leaves no room for pages. A
    replica's pages are its own. `host_fd` is of the memory for kept KV that ranks may share.
    """
    max_model_len = config.max_model_len or model.config.max_position_embeddings
    if model.prompts is not None:
        model.prompts.most_tokens = max_model_len
    model.group.map_peers(model.config.hidden_size, model.dtype)
    layout, device = _layout(config, model), model.device
    num_pages = _num_pages(config, model, layout, max_model_len)
    shared_by = ranks if model.replicas is None else None
    memory = _page_memory(layout, num_pages, device, shared_by)
    # Only a worker that pushes needs to know which layers are stored.
    held = len(layout.layers), len(layout.groups)
    marks = LayerMarks(*held, device) if role != "decode" else None
    begins_cached = config.enable_prefix_caching and model.config.family.is_block_causal
    most_cached = max_model_len if begins_cached or model.stage is not None else 0
    graphs = _prompt_graphs(config, model, memory, marks, pulse, most_cached)
    queued = _queued_layers(device, role, pulse)
    runner = _runner(model, memory, graphs, marks, pulse, queued)
    most, num_rows = model.config.max_position_embeddings, model.config.block_size
    warm_up(runner, most, num_rows, config.num_replicas, has_candidates=model.prompts is None)
    return RankPart(
        model=model,
        memory=memory,
        runner=runner,
        queued=queued,
        max_model_len=max_model_len,
        host=_host_pages(config, model.config, memory, host_fd),
    )


def _page_memory(
    layout: KVLayout, num_pages: int, device: torch.device, ranks: Ranks | None
) -> PageMemory:
    """Raises ValueError if the host has no memory for so many pages."""
    try:
        if ranks is None:
            return PageMemory(layout, num_pages, device)
        return GroupMemory(layout, num_pages, device, ranks)
    except (OSError, OverflowError) as error:
        text = f"--num-pages: {num_pages} pages of {layout.page_bytes} bytes: {error}"
        raise ValueError(text) from error


def _host_pages(
    config: WorkerConfig, model: ModelConfig, memory: PageMemory, descriptor: int | None
) -> HostPages | None:
    """This rank's share of the host memory for kept KV, which ranks with stores have in common.
    Raises ValueError if it holds no unit, or if the machine refuses it."""
    size, has_ranks = config.kv_offloading_size, config.num_ranks > 1
    if not size:
        return None
    is_shared = config.kv_pool is not None or (has_ranks and config.kv_offloading_dir is not None)
    all_bytes = memory.layout.span_bytes if is_shared else memory.page_bytes * config.num_ranks
    num_slots = int(size * GIB) // all_bytes
    span = memory.layout.span
    is_causal = model.prompt_attention == "causal_blocks"
    unit_tokens = max(math.lcm(span, model.block_size), config.kv_unit_tokens or 0)
    least = -(-unit_tokens // span) if is_causal else 1  # pages of a unit
    if num_slots < least:
        raise ValueError(
            f"--kv-offloading-size: expected room for {least} pages of {memory.page_bytes} bytes "
            f"on each device, got {size:g} GiB"
        )
    try:
        return HostPages(memory, num_slots, is_shared=is_shared, descriptor=descriptor)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--kv-offloading-size {size:g}: {error}") from error


def warm_up(
    runner: Forward,
    most: int,
    num_rows: int,
    num_replicas: int = 1,
    *,
    has_candidates: bool = True,
) -> None:
    """Runs a forward of `num_rows` rows of each replica, nearly all of which want a candidate;
    writes to page 0. Without candidates it is one of prompts.

    A sequence has at most `most` of them, the model's positions: tables end there.
    """
    parts = []
    for replica, begin in product(range(num_replicas), range(0, num_rows, most)):
        length = min(most, num_rows - begin)
        # Position 0 has no row before it, which shifting models need.
        wanted = range(1, length if has_candidates else 1)
        part = Part(
            token_ids=[0] * length,
            start=0,
            pages=[0],
            num_stored=int(begin == 0),
            block_origin=0,
            keep_boundary=not has_candidates,
            candidates=wanted,
            denoise_counts=[0] * len(wanted),
            sampling=Sampling(temperature=1.0, top_p=0.9, top_k=8),
            replica=replica,
        )
        parts.append(part)
    runner.run(parts)


def device_of(config: WorkerConfig, rank: int = 0) -> torch.device:
    """Device of a rank: the CPU, or the visible GPU of its number on its host. Raises ValueError if
    fewer GPUs are visible than the host has ranks.

    Every rank sees all GPUs of its worker, which is the form in which NCCL is used most.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no CUDA device is available here")
    if config.device == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(CPU_THREADS)
        return torch.device("cpu")
    size, count = config.ranks_per_node, torch.cuda.device_count()
    if count < size:
        where = "" if config.nnodes == 1 else " on each host"
        raise ValueError(f"a worker of {size} ranks{where} needs as many GPUs, and sees {count}")
    torch.cuda.set_device(rank % size)
    return torch.device("cuda", rank % size)


def check_batch_invariant(device: torch.device, dtype: torch.dtype) -> None:
    """ValueError if no kernel keeps rows independent of each other."""
    name = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        if dtype != torch.float32:
            raise ValueError(f"--batch-invariant: expected float32 on a CPU, got {name}")
        return
    from effuse.kernels import products_hopper  # imports Triton, which a CPU does not need

    if not products_hopper.is_supported(device, dtype):
        gpu = torch.cuda.get_device_name(device)
        raise ValueError(
            f"--batch-invariant: expected bfloat16 or float16 on a Hopper GPU, got {name} on {gpu}"
        )


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
    if device.type != "cuda" or role == "prefill" or not pulse.is_watched:
        return None
    return QueuedLayers(place_on_cuda, pulse.mark)


def _attend(config: WorkerConfig) -> Attend:
    """Imports FlexAttention only for its use, because it loads all of torch's compiler."""
    if config.attention == "flex":
        from effuse.kernels.attention_flex import FlexAttention

        return FlexAttention()
    return block_attention


def _layout(config: WorkerConfig, model: Transformer) -> KVLayout:
    shard, stage, degree = model.shard, model.stage, config.context_degree
    rank, apart = shard.rank, degree  # the latter: ranks of the shard with the same heads
    if model.prompts is not None:
        rank, apart = rank * degree + model.prompts.cut.rank, 1
    if stage is not None:
        rank += (stage.count - 1 - stage.number) * shard.size
    most, num_kv_heads = MOST_GROUPS[config.connector], model.config.num_kv_heads
    groups = range(num_groups_of(model.config.num_layers, most)) if stage is None else stage.groups
    copies = max(1, shard.size // apart // num_kv_heads)
    return KVLayout(
        kind=config.kv_layout,
        num_layers=model.config.num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=model.config.head_dim,
        page_size=config.page_size,
        dtype=str(model.dtype).removeprefix("torch."),
        most_groups=most,
        rank=rank,
        held=KVPart(
            *(shard.kv_heads.start, shard.kv_heads.stop, groups.start, groups.stop),
            *(rank % degree, degree),
        ),
        copies=copies,
        copy=shard.rank // apart % copies,
    )


def _num_pages(
    config: WorkerConfig, model: Transformer, layout: KVLayout, max_model_len: int
) -> int:
    """Pages from the config, or as many as fit: at least one whole request."""
    if config.num_pages is not None:
        return config.num_pages
    least = layout.pages_for(max_model_len)
    everyone = model.group if model.replicas is None else model.replicas.group
    if model.stage is not None:
        everyone = model.stage.everyone
    if model.device.type == "cpu":
        found = max(least, _CPU_POOL_BYTES // layout.page_bytes)
        return found if model.stage is None else everyone.least(found)
    least = everyone.least(_device_pages(config, model, layout, max_model_len))
    return least if model.prompts is None else model.prompts.group.least(least)


def _device_pages(
    config: WorkerConfig, model: Transformer, layout: KVLayout, max_model_len: int
) -> int:
    """Pages in the device memory that the largest forward leaves of the configured share."""
    probe = PageMemory(layout, 1, model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    most = model.config.max_position_embeddings
    warm_up(
        _runner(model, probe),
        most,
        config.max_num_batched_tokens,
        config.num_replicas,
        has_candidates=model.prompts is None,
    )
    total = torch.cuda.get_device_properties(model.device).total_memory
    share = int(total * config.gpu_memory_utilization)
    room = share - torch.cuda.max_memory_allocated(model.device)
    if model.prompts is not None:  # which gathers one layer of the longest prompt
        pages = layout.pages_for(max_model_len) * (layout.context_degree + 2)
        room -= pages * layout.page_bytes // layout.num_layers
    if room < layout.page_bytes:
        raise ValueError(
            f"--gpu-memory-utilization: {share} of {total} bytes leave no room for KV pages next "
            f"to the weights and a forward pass of {config.max_num_batched_tokens} tokens"
        )
    torch.cuda.empty_cache()
    return min(room // layout.page_bytes, MAX_POOL_PAGES)


def _prompt_graphs(
    config: WorkerConfig,
    model: Transformer,
    memory: PageMemory,
    marks: LayerMarks | None,
    pulse: Pulse,
    max_context: int,
) -> PromptGraphs | None:
    """Graphs captured before serving; None if they are not used."""
    # A graph of replicas would need rows of all of them, and ranks of a prompt plan each forward.
    is_apart = model.replicas is not None or model.prompts is not None
    if model.device.type != "cuda" or not config.runs_graphs or is_apart:
        return None
    graphs = PromptGraphs(
        model,
        memory.layer_views(),
        page_size=memory.layout.span,
        block_size=model.config.block_size,
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
        page_size=memory.layout.span,
        block_size=model.config.block_size,
        graphs=graphs,
        marks=marks,
        on_layer=at_launch if queued is None else queued.add,
        wait=None if queued is None else queued.wait,
    )
