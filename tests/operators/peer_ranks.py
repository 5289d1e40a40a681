"""A rank that sums rows over the memory of other GPUs: `python -m operators.peer_ranks RANK SIZE
MEETING JOB...`. Each job prints a line once it has passed; all ranks are given the same jobs."""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from effuse.kernels import peers_triton
from effuse.kernels.peers import MOST_BYTES, PeerSums, buffer_bytes, bytes_at, map_peers
from effuse.models.group import ProcessGroup, join_group
from operators.peers import EPS, Inputs, assert_same_bits, check_sum, in_parts

WIDTH, DTYPE = 3584, torch.bfloat16
MOST = MOST_BYTES // (WIDTH * DTYPE.itemsize)
NUM_SUMS, NUM_REPLAYS = 200, 4000
SLEEP = 300_000  # cycles, more than a sum takes
HUNG_S = 40.0  # after so long its threads' places are printed


class Rank:
    """One rank; the jobs are its methods."""

    def __init__(self, rank: int, size: int, meeting: Path) -> None:
        torch.cuda.set_device(rank)
        self.rank, self.size = rank, size
        self.device = torch.device("cuda", rank)
        self.group: ProcessGroup = join_group(rank, size, self.device, meeting, 60.0)
        self.peers = self.mapped()

    def mapped(self) -> PeerSums:
        args = self.rank, self.size, WIDTH, DTYPE, self.device
        return map_peers(*args, self.group.collect)

    def eager(self) -> None:
        """Rows of every number, one rank late at times, compared with fp64 and between ranks."""
        self.sums(self.peers, NUM_SUMS)

    def sums(self, peers: PeerSums, count: int) -> None:
        chosen = random.Random(self.size)
        for number in range(count):
            rows = chosen.choice(
                [1, 2, 32, 132, 133, 512, MOST, 2 * MOST + 5, chosen.randrange(1, MOST)]
            )
            given, shares = self.inputs(number, rows), chosen.random() < 0.5
            if chosen.randrange(self.size) == self.rank:
                torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
            own = in_parts(given.x[self.rank]) if number % 3 == 1 else given.x[self.rank]
            found = peers.sum_norm(own, given.residual, given.weight, EPS, shares=shares)
            if chosen.random() < 0.3:
                self.group.sum(given.residual.clone())
            if number % 4 == 0 and number // 4 % self.size == self.rank:
                check_sum(given, *found)
            assert_same_bits(self.group.collect(torch.stack(found)))

    def replays(self) -> None:
        """Graphs of several sums, in a random order, each reading what the one before left. The
        same bits on all ranks, and however late a rank is: each replay has its own sum of bits."""
        draw = torch.Generator(self.device).manual_seed(3)
        state = torch.randn(2 * MOST, WIDTH, generator=draw, device=self.device).to(DTYPE)
        own = torch.randn(WIDTH, generator=draw.manual_seed(100 + self.rank), device=self.device)
        own, weight = own.to(DTYPE), torch.ones_like(own, dtype=DTYPE)
        graphs = [
            self.captured(state, own, weight, rows)
            for rows in (
                [132] * 5,
                [32],
                [MOST, 1, 512, MOST + 9],
                [1] * 3,
                [512, 132, 64, 300],
                [64, 65],
            )
        ]
        begin = state.clone()
        timely = self.replayed(graphs, state, NUM_REPLAYS, late=False)
        assert state.isfinite().all()
        assert len(set(timely.tolist())) > NUM_REPLAYS // 2, "the state stays as it is"
        state.copy_(begin)
        late = self.replayed(graphs, state, NUM_REPLAYS, late=True)
        assert torch.equal(timely, late), int((timely != late).nonzero()[0])
        of_all = self.group.collect(late.to(self.device))
        assert (of_all == of_all[0]).all()
        assert_same_bits(self.group.collect(state))

    def captured(
        self, state: Tensor, own: Tensor, weight: Tensor, counts: list[int]
    ) -> torch.cuda.CUDAGraph:
        """Sums of the first rows of state, which each replaces; NCCL's between them at times. The
        caller keeps the tensors while it replays the graph."""

        def run() -> None:
            for number, rows in enumerate(counts):
                x = torch.sin(5 * state[:rows].roll(1, 1)) * own  # it never settles
                shares = None if number == 0 else number % 2 == 0
                normed, _ = self.peers.sum_norm(x, state[:rows], weight, EPS, shares=shares)
                state[:rows] = normed
            if len(counts) % 2 == 0:
                state[:2] = self.group.sum(state[:2].clone()) / self.size

        kept = state.clone()
        run()
        state.copy_(kept)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        return graph

    def replayed(
        self, graphs: list[torch.cuda.CUDAGraph], state: Tensor, count: int, *, late: bool
    ) -> Tensor:
        """The sums of the state's bits after each replay [count]."""
        chosen, sums = random.Random(7), torch.zeros(count, dtype=torch.int64, device=self.device)
        for number in range(count):
            graph, slow = chosen.choice(graphs), chosen.randrange(3 * self.size)
            if late and slow == self.rank:
                torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
            graph.replay()
            sums[number] = state.view(torch.int16).sum(dtype=torch.int64)
        return sums.cpu()

    def planted(self) -> None:
        """Sums that do not wait, because zeros lie in every place, are found out. Ranks meet after
        each sum: one that ran ahead would overwrite what another then waits for."""
        peers = self.mapped()
        own = int(peers._buffers[self.rank])
        bytes_at(own, buffer_bytes(self.size), self.device).zero_()
        torch.cuda.synchronize()
        self.group.least(0)
        num_wrong = 0
        for number in range(20):
            given = self.inputs(3 * number + 1, 132)  # without a NaN
            if number % self.size == self.rank:
                torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
            _, total = peers.sum_norm(given.x[self.rank], given.residual, given.weight, EPS)
            exact = given.x.float().sum(0) + given.residual.float()
            num_wrong += not torch.allclose(total.float(), exact, atol=0.1, rtol=0.02)
            self.group.least(0)
        assert self.group.least(-num_wrong) < 0, "sums that do not wait are right"

    def alone(self) -> None:
        """Waits on the device for a rank that never comes."""
        self.eager_one()
        if self.rank == 0:
            self.eager_one()
            print("queued", flush=True)
        time.sleep(3600)

    def eager_one(self) -> None:
        given = self.inputs(0, 132)
        self.peers.sum_norm(given.x[self.rank], given.residual, given.weight, EPS)

    def inputs(self, number: int, rows: int) -> Inputs:
        draw = torch.Generator(self.device).manual_seed(number)

        def random_rows(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, device=self.device).to(DTYPE)

        x = random_rows(self.size, rows, WIDTH)
        if number % 3 == 0:
            bits = x.view(peers_triton.BITS[x.element_size()])
            bits[number % self.size, -1, 5] = -1
        return Inputs(x, random_rows(rows, WIDTH), random_rows(WIDTH))


def main() -> None:
    rank, size, meeting, *jobs = sys.argv[1:]
    faulthandler.dump_traceback_later(HUNG_S, repeat=True)
    own = Rank(int(rank), int(size), Path(meeting))
    for job in jobs:
        run: Callable[[], None] = getattr(own, job)
        begin = time.monotonic()
        run()
        torch.cuda.synchronize()
        print(f"{job} passed in {time.monotonic() - begin:.1f} s", flush=True)
    os._exit(0)  # NCCL's teardown waits for the slowest rank, and is not what is tested here


if __name__ == "__main__":
    main()
