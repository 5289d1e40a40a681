"""How the ranks of an engine meet: all of them, and those that split contexts or weights together,
or pass rows on to each other.
"""

from collections.abc import Callable
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
Meet = Callable[[str, int, int], ProcessGroup]
"""Meets ranks by the name of their group, as this number of so many."""


def place_of(config: WorkerConfig, model: ModelConfig, rank: int) -> RankPlace:
    """The place of a rank that has met no other. Raises ValueError for too many stages."""
    degree, context = config.context_degree, None
    if degree > 1:
        cut = ContextCut(rank % degree, degree, config.page_size)
        context = ContextGroup(cut, ALONE, ALONE if config.cuts_rows else None)
    return RankPlace(
        *(rank, config.num_ranks, config.expert_parallel),
        data_parallel=config.num_replicas > 1,
        context=context,
        stage=stage_of(config, model, rank),
    )


def join(
    config: WorkerConfig,
    model: ModelConfig,
    rank: int,
    device: torch.device,
    meeting: Path | SharedMeeting,
) -> RankPlace:
    """Meets the other ranks of the engine. Raises ValueError if they do not come."""
    place, size = place_of(config, model, rank), config.num_ranks
    group = join_group(rank, size, device, meeting, _JOIN_S, in_order=config.batch_invariant)
    meet = meets(group, device, meeting)
    context = place.context and join_context(place.context, rank, size, group, meet)
    stage = place.stage and join_stage(place.stage, group, meet)
    return replace(place, meeting=group, context=context, stage=stage)


def meets(group: ProcessGroup, device: torch.device, meeting: Path | SharedMeeting) -> Meet:
    """How ranks of this group meet in smaller ones, which it adopts."""

    def meet(name: str, own: int, count: int) -> ProcessGroup:
        at = meeting.with_name(f"{meeting.name}{name}")
        part = join_group(own, count, device, at, _JOIN_S)
        group.adopt(part)
        return part

    return meet


def stage_of(config: WorkerConfig, model: ModelConfig, rank: int) -> PipelineStage | None:
    """The stage of a rank, if the layers are split. The leader and its neighbours have the last
    one, so that results are beside the state of requests. Raises ValueError for too many stages."""
    count, size = config.pipeline_parallel_size, config.tensor_parallel_size
    if count == 1:
        return None
    num_groups = num_groups_of(model.num_layers, MOST_GROUPS[config.connector])
    number, each = count - 1 - rank // size, model.num_layers // num_groups
    groups = stage_groups(model, num_groups, count)[number]
    layers = range(groups.start * each, groups.stop * each)
    return PipelineStage(number, count, groups, layers, rank % size, size)


def join_stage(stage: PipelineStage, group: ProcessGroup, meet: Meet) -> PipelineStage:
    """Meets the other ranks of the stage, and those of this rank's number in the stages beside it.
    Raises ValueError if they do not come."""
    own = ALONE if stage.size == 1 else meet(f"s{stage.number}", stage.rank, stage.size)
    # From the first stage to the last one: each waits for the one before it.
    before = None if stage.is_first else meet(f"p{stage.number}-{stage.rank}", 1, 2)
    after = None if stage.is_last else meet(f"p{stage.number + 1}-{stage.rank}", 0, 2)
    return replace(stage, group=own, everyone=group, before=before, after=after)


def join_context(
    context: ContextGroup, rank: int, size: int, group: ProcessGroup, meet: Meet
) -> ContextGroup:
    """Meets the other ranks of those that split the context, which are neighbours. If they compute
    different rows, those that split the weights meet too. Raises ValueError if they do not come."""
    cut = context.cut
    count = size // cut.degree
    if count == 1:
        return replace(context, group=group)
    part = meet(f"{rank // cut.degree}", cut.rank, cut.degree)
    weights = context.weights and meet(f"w{cut.rank}", rank // cut.degree, count)
    return replace(context, group=part, weights=weights)
