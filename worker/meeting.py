"""How the ranks of an engine meet: all of them, and those that cut contexts or weights together,
or pass rows on to each other.
"""

from dataclasses import replace
from pathlib import Path

import torch

from effuse.kernels.attention_batch import ContextCut
from effuse.kvtransfer.layout import MOST_GROUPS, num_groups_of
from effuse.models.config import ModelConfig
from effuse.models.group import (
    ALONE,
    ContextGroup,
    PipelineStage,
    ProcessGroup,
    RankPlace,
    join_group,
)
from effuse.models.shared_meeting import SharedMeeting
from effuse.models.stages import stage_groups
from effuse.worker.config import WorkerConfig

_JOIN_S = 60.0  # for processes that all wait to meet


def join(
    config: WorkerConfig,
    model: ModelConfig,
    rank: int,
    device: torch.device,
    meeting: Path | SharedMeeting,
) -> RankPlace:
    """Meets the other ranks of the engine. Raises ValueError if they do not come."""
    size = config.num_ranks
    group = join_group(rank, size, device, meeting, _JOIN_S, in_order=config.batch_invariant)
    context = join_context(
        rank,
        size,
        config.context_degree,
        config.page_size,
        group,
        device,
        meeting,
        cuts_rows=config.cuts_rows,
    )
    stage = join_stage(config, model, rank, group, device, meeting)
    has_replicas = config.num_replicas > 1
    return RankPlace(rank, size, config.expert_parallel, group, has_replicas, context, stage)


def stage_of(config: WorkerConfig, model: ModelConfig, rank: int) -> PipelineStage | None:
    """The stage of a rank, if the layers are cut. The leader and its neighbours have the last one,
    so that results are where the books are. Raises ValueError for too many stages."""
    count, size = config.pipeline_parallel_size, config.tensor_parallel_size
    if count == 1:
        return None
    num_groups = num_groups_of(model.num_layers, MOST_GROUPS[config.connector])
    number, each = count - 1 - rank // size, model.num_layers // num_groups
    groups = stage_groups(model, num_groups, count)[number]
    layers = range(groups.start * each, groups.stop * each)
    return PipelineStage(number, count, groups, layers, rank % size, size)


def join_stage(
    config: WorkerConfig,
    model: ModelConfig,
    rank: int,
    group: ProcessGroup,
    device: torch.device,
    meeting: Path | SharedMeeting,
) -> PipelineStage | None:
    """Meets the other ranks of the stage, and those of this rank's number in the stages beside it.
    Raises ValueError if they do not come."""
    stage = stage_of(config, model, rank)
    if stage is None:
        return None

    def meet(name: str, own: int, size: int) -> ProcessGroup:
        at = meeting.with_name(f"{meeting.name}{name}")
        part = join_group(own, size, device, at, _JOIN_S)
        group.adopt(part)
        return part

    own = ALONE if stage.size == 1 else meet(f"s{stage.number}", stage.rank, stage.size)
    # From the first stage to the last one: each waits for the one before it.
    before = None if stage.is_first else meet(f"p{stage.number}-{stage.rank}", 1, 2)
    after = None if stage.is_last else meet(f"p{stage.number + 1}-{stage.rank}", 0, 2)
    return replace(stage, group=own, everyone=group, before=before, after=after)


def join_context(
    rank: int,
    size: int,
    degree: int,
    page_size: int,
    group: ProcessGroup,
    device: torch.device,
    meeting: Path | SharedMeeting,
    *,
    cuts_rows: bool = False,
) -> ContextGroup | None:
    """Meets the other ranks of those that cut the context, if any do; they are neighbours. If they
    compute different rows, those that cut the weights meet too. Raises ValueError if they do not
    come."""
    if degree == 1:
        return None
    cut, count = ContextCut(rank % degree, degree, page_size), size // degree
    if count == 1:
        return ContextGroup(cut, group, ALONE if cuts_rows else None)
    at = meeting.with_name(f"{meeting.name}{rank // degree}")
    part = join_group(cut.rank, degree, device, at, _JOIN_S)
    group.adopt(part)
    if not cuts_rows:
        return ContextGroup(cut, part)
    at = meeting.with_name(f"{meeting.name}w{cut.rank}")
    weights = join_group(rank // degree, count, device, at, _JOIN_S)
    group.adopt(weights)
    return ContextGroup(cut, part, weights)
