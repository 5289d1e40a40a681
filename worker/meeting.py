"""How the ranks of an engine meet: all of them, and those that cut contexts or weights together."""

from pathlib import Path

import torch

from effuse.kernels.attention_batch import ContextCut
from effuse.models.group import ALONE, ContextGroup, ProcessGroup, RankPlace, join_group
from effuse.worker.config import WorkerConfig
from effuse.worker.rank_messages import meeting_path

_JOIN_S = 60.0  # for processes that all wait to meet


def join(config: WorkerConfig, rank: int, device: torch.device, home: Path) -> RankPlace:
    """Meets the other ranks of the engine. Raises ValueError if they do not come."""
    size, meeting = config.num_ranks, meeting_path(home)
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
    return RankPlace(rank, size, config.expert_parallel, group, config.num_replicas > 1, context)


def join_context(
    rank: int,
    size: int,
    degree: int,
    page_size: int,
    group: ProcessGroup,
    device: torch.device,
    meeting: Path,
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
