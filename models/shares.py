"""How ranks that hold parts of the vocabulary share the work of drawing tokens from whole rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from effuse.kernels.values import Candidates, RowSampling
from effuse.models.group import Group
from effuse.models.tensors import ModelShard


def draw_shares(
    own: Tensor,
    sampling: RowSampling,
    draw: Callable[[Tensor, RowSampling], Candidates],
    shard: ModelShard,
    group: Group,
) -> Candidates:
    """The candidates of all rows on every rank, of which each draws a share; own: as of
    `whole_rows`."""
    rows = own_rows(len(own), shard, own.device)
    drawn = draw(whole_rows(own, shard, group), sampling.of_rows(rows))
    # One exchange: fp64 holds token ids and fp32 values exactly.
    columns = torch.stack([drawn.token.double(), drawn.confidence.double(), drawn.score.double()])
    of_all = group.gather(columns, [columns.shape[1]] * shard.size)[:, : len(own)]
    return Candidates(of_all[0].long(), of_all[1].float(), of_all[2].float())


def whole_rows(own: Tensor, shard: ModelShard, group: Group) -> Tensor:
    """Logits [S, V] of this rank's share of rows; own: [R, its vocabulary], of all rows.

    Rank n gets rows n * S to n * S + S, with S = R / N rounded up; a row beyond the last one is the
    last one again. Each logit moves once, so that N ranks move 1 / N of a gather's bytes.
    """
    widths = shard.vocabularies
    if len(own) % shard.size:
        own = own[_shares(len(own), shard.size, own.device).flatten()]
    if own.shape[1] < max(widths):
        own = torch.nn.functional.pad(own, (0, max(widths) - own.shape[1]))
    dealt = group.deal(own.view(shard.size, -1, max(widths)))
    return torch.cat([part[:, :width] for part, width in zip(dealt, widths, strict=True)], dim=1)


def own_rows(count: int, shard: ModelShard, device: torch.device) -> Tensor | slice:
    """This rank's share S of `count` rows, see `whole_rows`."""
    share, left = divmod(count, shard.size)
    if left:
        return _shares(count, shard.size, device)[shard.rank]
    return slice(shard.rank * share, (shard.rank + 1) * share)


def _shares(count: int, size: int, device: torch.device) -> Tensor:
    share = -(-count // size)
    return torch.arange(size * share, device=device).clamp_(max=count - 1).view(size, share)
