"""The ranks of a model, and their exchanges of hidden rows and logits.

Over torch.distributed: Gloo on CPUs, NCCL between GPUs. GPUs sum rows over each other's memory.
Ranks of one host meet through a file in a private directory, so that no port is open while they do.
Ranks of several hosts meet at a store that rank 0 serves.
A group is a value of its own and not the process's default group: a process may be in several.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from effuse.kernels.attention_batch import ContextCut
from effuse.kernels.peers import PeerSums, map_peers
from effuse.kernels.rowwise import rms_norm_residual, total_of
from effuse.kernels.values import WeightedParts
from effuse.models.config import ModelConfig
from effuse.models.shared_meeting import SharedMeeting
from effuse.models.tensors import ModelShard, replica_of, shard_of

LOG = logging.getLogger(__name__)

_LOOPBACK = "lo"
_MOST_PASSING: Final = 32  # tensors; there are fewer forwards under way
_PASSED_WITHIN: Final = timedelta(seconds=600)  # a whole stage of a long prompt comes before


class Group:
    """The ranks of one model. All of them call the same methods in the same order. This one has a
    single rank, so that nothing is exchanged.
    """

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors of this shape, in a fixed order of ranks; may overwrite
        ``x``."""
        return x

    def sum_norm(
        self, x: Tensor | WeightedParts, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`rms_norm_residual` of the sum of all ranks' ``x``; the residual is the same on all."""
        own = total_of(x) if isinstance(x, WeightedParts) else x
        return rms_norm_residual(self.sum(own), residual, weight, eps)

    def map_peers(self, width: int, dtype: torch.dtype) -> None:
        """Lets `sum_norm` use the memory of other GPUs, if they can map it; all its rows have this
        width and dtype. Raises ValueError if a group that sums in order cannot."""

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """All ranks' ``x`` [R, sizes[rank]] side by side: [R, sum of sizes]."""
        return x

    def collect(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """All ranks' ``x`` [R, ...], in their order: [N, R, ...]; in `into` [N * R, ...] if it is
        given."""
        return x[None] if into is None else into.copy_(x)[None]

    def deal(self, x: Tensor) -> Tensor:
        """From each rank its part for this rank; x: [N, ...], part n for rank n: [N, ...]."""
        return x

    def share(self, x: Tensor) -> Tensor:
        """Rank 0's tensor; the others give one of the same shape, which is overwritten."""
        return x

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        return number

    def hold(self, graph: torch.cuda.CUDAGraph) -> None:
        """Takes a graph that contains exchanges; `close` resets it."""

    def close(self) -> None:
        """Ends its threads, if it has any, and the graphs that it holds."""


class _Alone(Group):
    """A single rank; its norm adds up parts."""

    def sum_norm(
        self, x: Tensor | WeightedParts, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return rms_norm_residual(x, residual, weight, eps)


ALONE: Final = _Alone()


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The rows of each replica in one forward, in the order of replicas."""

    rows: tuple[int, ...]
    wanted: tuple[int, ...]  # the rows that the last layer computes after its attention


class Replicas:
    """Ranks that compute requests of their own, and each layer's experts together.

    All of them run the same forwards. One that has no rows in a forward only computes its experts
    for the rows of the others. (Data-parallel attention, as in DeepSeek-V3, arXiv 2412.19437.)
    """

    def __init__(self, rank: int, group: Group, size: int) -> None:
        self.rank = rank
        self.size = size
        self.group = group

    def gather_rows(self, own: Tensor, counts: tuple[int, ...] | None) -> Tensor:
        """The rows of all replicas: [N * M, H]; own: [R, H].

        Each has M places, the most of `counts`, and zeros after its rows. Without counts all
        replicas have R rows.
        """
        most = len(own) if counts is None else max(counts)
        padded = torch.nn.functional.pad(own, (0, 0, 0, most - len(own)))
        return self.group.collect(padded).flatten(0, 1)

    def reduce_rows(self, results: Tensor, num_own: int) -> Tensor:
        """The sum over replicas of this one's `num_own` rows; results: of `gather_rows`."""
        most = len(results) // self.size
        return self.group.sum(results)[self.rank * most :][:num_own]


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """Ranks of a model that hold the same KV heads for different tokens, and this one's share."""

    cut: ContextCut
    group: Group
    weights: Group | None = None  # if its ranks compute different rows: those that cut the weights


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One rank's stage of a pipeline, and its ways to the ranks of its number beside it. The first
    stage has the embedding, the last one the final norm and the head."""

    number: int  # 0 is the first one
    count: int
    groups: range  # of layers in a page, in the model's numbers
    layers: range  # in these groups
    rank: int = 0  # among the ranks of the stage
    size: int = 1
    group: Group = ALONE  # of these ranks
    everyone: Group = ALONE  # of all stages
    before: ProcessGroup | None = None
    after: ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def receive(self, into: Tensor) -> Tensor:
        """The rows [T, H] of the stage before, in `into`."""
        assert self.before is not None, "the first stage embeds its rows"
        return self.before.take_over(into)

    def send(self, rows: Tensor) -> None:
        """Passes rows to the next stage; never waits for it."""
        assert self.after is not None, "the last stage has the head"
        self.after.pass_on(rows)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a process stands in the group that serves a model together."""

    rank: int = 0
    size: int = 1
    expert_parallel: bool = False
    meeting: Group = ALONE
    data_parallel: bool = False
    context: ContextGroup | None = None  # if a sequence's cached tokens are split over ranks
    stage: PipelineStage | None = None  # if layers are

    @property
    def group(self) -> Group:
        """The ranks that compute the same rows of the same layers."""
        if self.stage is not None:
            return self.stage.group
        if self.context is not None and self.context.weights is not None:
            return self.context.weights
        return ALONE if self.data_parallel else self.meeting

    @property
    def replicas(self) -> Replicas | None:
        """The ranks that compute other rows, with the same experts."""
        return Replicas(self.rank, self.meeting, self.size) if self.data_parallel else None

    def shard(self, config: ModelConfig) -> ModelShard:
        """Its part of a model. Raises ValueError naming what does not divide."""
        if self.data_parallel:
            return replica_of(config, self.rank, self.size)
        if (stage := self.stage) is not None:
            return shard_of(
                config,
                stage.rank,
                stage.size,
                expert_parallel=self.expert_parallel,
                layers=stage.layers,
            )
        degree = 1 if self.context is None else self.context.cut.degree
        if self.context is not None and self.context.weights is not None:
            place = self.rank // degree, self.size // degree
            return shard_of(config, *place, expert_parallel=self.expert_parallel)
        return shard_of(
            config,
            self.rank,
            self.size,
            expert_parallel=self.expert_parallel,
            context_degree=degree,
        )


ALL: Final = RankPlace()
"""The place of a process that serves a model by itself."""


class ProcessGroup(Group):
    """A `Group` of processes; its methods wait for the other ranks on a CPU, and are queued on a
    GPU's current stream. They raise RuntimeError if another rank has ended."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        collectives: Any,
        *,
        in_order: bool = False,
        spans_hosts: bool = False,
    ) -> None:
        """collectives: a process group of torch's for tensors of this device. in_order: GPUs too
        add ranks in order, because the order of NCCL's sums depends on the number of rows.
        spans_hosts: no GPU maps the memory of another host's."""
        self.rank = rank
        self.size = size
        self.device = device
        self._collectives = collectives
        self._in_order = in_order
        self._spans_hosts = spans_hosts
        self._peers: PeerSums | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._parts: list[Group] = []
        self._passing: deque[tuple[Any, Tensor]] = deque()  # until they have arrived

    def adopt(self, part: Group) -> None:
        """Takes a group of some of its ranks, with exchanges in the same graphs; `close` closes
        it."""
        self._parts.append(part)

    def sum_norm(
        self, x: Tensor | WeightedParts, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if self._peers is not None:
            return self._peers.sum_norm(x, residual, weight, eps, is_alike=self._in_order)
        return super().sum_norm(x, residual, weight, eps)

    def map_peers(self, width: int, dtype: torch.dtype) -> None:
        if self.device.type != "cuda":
            return
        try:
            if self._spans_hosts:
                raise OSError("ranks are on several hosts")
            self._peers = map_peers(self.rank, self.size, width, dtype, self.device, self.collect)
        except OSError as error:
            if self._in_order:
                raise ValueError(
                    f"--batch-invariant: expected GPUs that map each other's memory, but {error}"
                ) from error
            LOG.warning("rank %d: NCCL sums all rows, because %s", self.rank, error)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``. Over Gloo ranks are added in order, because the order of its
        own sums depends on an element's place, and so on other rows."""
        if self.size == 2 or (x.is_cuda and not self._in_order):
            self._collectives.allreduce(x).wait()
            return x
        total, *others = self.collect(x).unbind()
        for other in others:
            total += other
        return total

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        widest = max(sizes)
        own = x if x.shape[1] == widest else torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        parts = zip(self.collect(own), sizes, strict=True)
        return torch.cat([part[:, :size] for part, size in parts], dim=1)

    def collect(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        parts: Tensor = x.new_empty(self.size * len(x), *x.shape[1:]) if into is None else into
        self._collectives._allgather_base(parts, x.contiguous()).wait()
        return parts.view(self.size, *x.shape)

    def deal(self, x: Tensor) -> Tensor:
        dealt = torch.empty_like(x)
        options = dist.AllToAllOptions()
        self._collectives.alltoall_base(dealt, x.contiguous(), [], [], options).wait()
        return dealt

    def share(self, x: Tensor) -> Tensor:
        self._collectives.broadcast([x], dist.BroadcastOptions()).wait()
        return x

    def least(self, number: int) -> int:
        own = torch.tensor([number], dtype=torch.int64, device=self.device)
        return min(int(one) for one in self.collect(own).flatten().tolist())

    def hold(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graphs.append(graph)

    def pass_on(self, x: Tensor) -> None:
        """Sends a tensor to the other one of two ranks, which knows its shape; never waits."""
        while self._passing and self._passing[0][0].is_completed():  # as NCCL knows by itself
            self._passing.popleft()
        self._passing.append((self._collectives.send([x], 1 - self.rank, 0), x))
        while len(self._passing) > _MOST_PASSING:
            self._passing.popleft()[0].wait()

    def take_over(self, into: Tensor) -> Tensor:
        """The next tensor that the other one of two ranks passes on, in `into`."""
        work = self._collectives.recv([into], 1 - self.rank, 0)
        if into.is_cuda:
            work.wait()  # its stream does
        else:
            work.wait(_PASSED_WITHIN)
        return into

    def close(self) -> None:
        for graph in self._graphs:
            graph.reset()  # NCCL ends a group only after all graphs with its exchanges
        self._graphs.clear()
        self._passing.clear()
        for part in self._parts:
            part.close()
        if self._peers is not None:
            self._peers.close()
        self._peers = self._collectives = None


def join_group(
    rank: int,
    size: int,
    device: torch.device,
    meeting: Path | SharedMeeting,
    timeout_s: float,
    *,
    in_order: bool = False,
) -> ProcessGroup:
    """Waits for all ranks of the group at `meeting`, which none may have used before. in_order: as
    in `ProcessGroup`. Raises ConnectionError if they cannot be reached within `timeout_s`."""
    store: Any
    if isinstance(meeting, SharedMeeting):
        interface = meeting.interface
        store = dist.PrefixStore(meeting.name, meeting.store)  # type: ignore[attr-defined]
    else:
        interface, store = _LOOPBACK, dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout_s))
    make = _nccl if device.type == "cuda" else _gloo
    try:
        collectives = make(store, rank, size, timeout_s, interface)
        spans = isinstance(meeting, SharedMeeting)
        group = ProcessGroup(rank, size, device, collectives, in_order=in_order, spans_hosts=spans)
        group.least(0)  # connects all of them
    except (RuntimeError, ValueError) as error:
        LOG.error("rank %d of %d cannot reach its group: %s", rank, size, error)
        raise ConnectionError(f"rank {rank} of {size} cannot reach its group: {error}") from error
    return group


def _gloo(store: Any, rank: int, size: int, timeout_s: float, interface: str) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options, named = gloo._Options(), os.environ.get("GLOO_SOCKET_IFNAME", interface)
    options._devices = [gloo.create_device(interface=one) for one in named.split(",")]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout_s: float, interface: str) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)
