"""The ranks of a tensor-parallel group over torch.distributed: Gloo on CPUs, NCCL between GPUs.

Ranks of one host meet through a file in a private directory, so that no port is open while they do.
A group is a value of its own and not the process's default group: a process may be in several.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOG = logging.getLogger(__name__)

_LOOPBACK = "lo"


class ProcessGroup:
    """A `Group` of processes; its methods wait for the other ranks on a CPU, and are queued on a
    GPU's current stream. They raise RuntimeError if another rank has ended."""

    def __init__(self, rank: int, size: int, device: torch.device, collectives: Any) -> None:
        """collectives: a process group of torch's for tensors of this device."""
        self.rank = rank
        self.size = size
        self.device = device
        self._collectives = collectives

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``. Over Gloo ranks are added in order, because the order of its
        own sums depends on an element's place, and so on other rows."""
        if self.size == 2 or x.is_cuda:
            self._collectives.allreduce(x).wait()
            return x
        total, *others = self._of_all(x)
        for other in others:
            total += other
        return total

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """All ranks' ``x`` [R, sizes[rank]] side by side."""
        widest = max(sizes)
        own = x if x.shape[1] == widest else torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        parts = zip(self._of_all(own), sizes, strict=True)
        return torch.cat([part[:, :size] for part, size in parts], dim=1)

    def deal(self, x: Tensor) -> Tensor:
        """From each rank its part of ``x`` [N, ...] for this rank."""
        dealt = torch.empty_like(x)
        options = dist.AllToAllOptions()
        self._collectives.alltoall_base(dealt, x.contiguous(), [], [], options).wait()
        return dealt

    def share(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``."""
        self._collectives.broadcast([x], dist.BroadcastOptions()).wait()
        return x

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        own = torch.tensor([number], dtype=torch.int64, device=self.device)
        return min(int(one) for one in torch.cat(self._of_all(own)).tolist())

    def close(self) -> None:
        """Ends the threads of its collectives."""
        self._collectives = None

    def _of_all(self, x: Tensor) -> list[Tensor]:
        """Every rank's ``x`` [R, ...]."""
        parts = x.new_empty(self.size, len(x), *x.shape[1:])
        self._collectives._allgather_base(parts.flatten(0, 1), x.contiguous()).wait()
        return list(parts)


def join_group(
    rank: int, size: int, device: torch.device, meeting: Path, timeout_s: float
) -> ProcessGroup:
    """Waits for all ranks of the group at the file `meeting`, which none may have used before.

    Raises ValueError if they do not come within `timeout_s`.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, _LOOPBACK)
    store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout_s))
    make = _nccl if device.type == "cuda" else _gloo
    try:
        group = ProcessGroup(rank, size, device, make(store, rank, size, timeout_s))
        group.least(0)  # connects all of them
    except (RuntimeError, ValueError) as error:
        LOG.error("rank %d of %d cannot reach its group: %s", rank, size, error)
        raise ValueError(f"rank {rank} of {size} cannot reach its group: {error}") from error
    return group


def _gloo(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))


def _nccl(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)
