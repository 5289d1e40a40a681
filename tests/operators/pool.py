"""One layer of a pool, in the order in which engines keep pages: the cache that kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor

from effuse.kvtransfer.layout import KVLayout, PageMemory


def layer_of(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    kind: str = "unified",
) -> tuple[Tensor, Tensor]:
    """K and V of the middle one of three layers of a group, full of NaN.

    ``shape`` is [pages, page_size, heads, dim]. Views of the distinct kind are as `kernels.pages`
    says.
    """
    pages, page_size, heads, dim = shape
    name = str(dtype).removeprefix("torch.")
    layout = KVLayout(kind, 3, heads, dim, page_size, name, most_groups=1)
    memory = PageMemory(layout, pages, device)
    memory.tensor.fill_(nan)
    return memory.layer_views()[1]
