"""Workers of several ranks in one process: pools that share a model's heads, and one connector over
those of all ranks."""

from __future__ import annotations

import itertools
import select
from collections.abc import Sequence
from dataclasses import replace

import torch
from kvtransfer.fixtures import SEED, SHARED, filled, print_of
from kvtransfer.loopback import Hub, LoopbackConnector
from kvtransfer.receiver_process import transport

from effuse.kvtransfer.connector import (
    Cancel,
    Command,
    ConnectorEvent,
    Expect,
    FinishPush,
    Forget,
    PushPages,
)
from effuse.kvtransfer.layout import KVLayout, PageMemory
from effuse.kvtransfer.messages import AttemptId, KVPart, PageRef, Reservation, Shard
from effuse.kvtransfer.thread import ThreadConnector
from effuse.worker.group_parts import RankEvents

LAYOUT = SHARED
NUM_PAGES = 8
FULL = filled(LAYOUT, NUM_PAGES)
LEASE_S = 30.0
_numbers = itertools.count(1)


class RankConnectors:
    """A Connector over those of all ranks, in the order of ranks, in one process."""

    def __init__(self, connectors: Sequence[LoopbackConnector | ThreadConnector]) -> None:
        self.name = connectors[0].name
        self._ranks = connectors
        self._events = RankEvents(len(connectors))
        self._poll = select.epoll()

    def start(self) -> None:
        """Starts every rank."""
        for connector in self._ranks:
            connector.start()
            self._poll.register(connector.fileno(), select.EPOLLIN)

    def close(self) -> None:
        """Ends every rank."""
        for connector in self._ranks:
            connector.close()
        self._poll.close()

    def describe(self) -> tuple[Shard, ...]:
        """How peers reach each rank."""
        return tuple(shard for connector in self._ranks for shard in connector.describe())

    def send(self, command: Command) -> None:
        """Has every rank carry out a command."""
        if isinstance(command, Expect | PushPages | FinishPush):
            self._events.begin(command.reservation.transfer_id)
        elif isinstance(command, Cancel | Forget):
            self._events.give_up(command.transfer_id)
        for connector in self._ranks:
            connector.send(command)

    def poll(self) -> list[ConnectorEvent]:
        """Events of all ranks together since the last call. Raises ConnectorDied if the connector
        of any rank has ended."""
        return [
            merged
            for number, connector in enumerate(self._ranks)
            for event in connector.poll()
            for merged in self._events.take(number, event)
        ]

    def fileno(self) -> int:
        """Readable while a rank has something."""
        return self._poll.fileno()


class Group:
    """One worker. Its pools hold the heads of `FULL` if it `has_pages`, and zeros otherwise."""

    def __init__(
        self,
        kind: str,
        incarnation: str,
        degree: int,
        *,
        has_pages: bool = False,
        hub: Hub | None = None,
        layout: KVLayout = LAYOUT,
        device: str = "cpu",
        context: int = 1,
        stages: int = 1,
    ) -> None:
        layouts = layouts_of(layout, degree, context, stages)
        self.full = FULL if layout is LAYOUT else filled(layout, NUM_PAGES)
        self.incarnation = incarnation
        self.memories = [PageMemory(one, NUM_PAGES, device) for one in layouts]
        if has_pages:  # a page of ranks that cut the context has as many of these
            for memory in self.memories:
                own, pages = memory.layout, self.full.tensor[memory.layout.context_rank :: context]
                memory.tensor[: len(pages)] = heads_of(pages, own)
        self.ranks: list[LoopbackConnector | ThreadConnector] = []
        for memory in self.memories:
            if hub is not None:
                self.ranks.append(
                    LoopbackConnector(hub, memory, incarnation, print_of(layout), lambda: 0.0)
                )
            else:
                carrier = transport(kind, memory, incarnation)
                self.ranks.append(
                    ThreadConnector(carrier, memory, incarnation, print_of(memory.layout))
                )
        self.all = RankConnectors(self.ranks)
        self.all.start()

    def reserve(
        self,
        pages: Sequence[int],
        writer: str = "prefill-1",
        num_written: int = 0,
        num_held: int = 0,
    ) -> Reservation:
        """Has every rank expect these pages from the writer."""
        number = next(_numbers)
        reserved = Reservation(
            attempt=AttemptId(f"request-{number}", 1, f"transfer-{number}"),
            incarnation=self.incarnation,
            shards=self.all.describe(),
            num_pool_pages=NUM_PAGES,
            pages=tuple(PageRef(page, number) for page in pages),
            fingerprint=print_of(self.full.layout),
            digest_seed=SEED,
            lease_s=LEASE_S,
            num_written=num_written,
            num_held=num_held,
        )
        self.all.send(Expect(reserved, writer))
        return reserved

    def check_holds(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """These pages of every rank are its heads of those of `FULL`, and no other was touched. Of
        ranks that cut the context, each has every so manieth of the sources."""
        for memory in self.memories:
            layout = memory.layout
            own = sources[layout.context_rank :: layout.context_degree]
            filled_here = targets[: len(own)]
            expected = heads_of(self.full.tensor[list(own)], layout)
            assert torch.equal(memory.tensor[list(filled_here)].cpu(), expected)
            others = [page for page in range(NUM_PAGES) if page not in filled_here]
            assert not memory.tensor[others].any()

    def fill(self, value: float) -> None:
        """Overwrites all pages of all ranks."""
        for memory in self.memories:
            memory.tensor.fill_(value)

    def num_spoilt(self, value: float) -> list[int]:
        """Of each rank, the pages that do not hold this value everywhere."""
        return [int((memory.tensor.flatten(1) != value).any(1).sum()) for memory in self.memories]

    def close(self) -> None:
        """Ends all ranks."""
        self.all.close()


def heads_of(pages: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """What a rank holds of pages [pages, groups, all heads, ...]."""
    groups, heads = layout.groups, layout.heads
    return pages[:, groups.start : groups.stop, heads.start : heads.stop]


def layouts_of(layout: KVLayout, degree: int, context: int = 1, stages: int = 1) -> list[KVLayout]:
    """The layouts of a worker's ranks. Neighbours cut the context. The first ones hold the last
    layers; larger stages come first. If there are more of the others than heads, some are equal.
    """
    each, more = divmod(layout.num_groups, stages)
    ends = [at * each + min(at, more) for at in range(stages + 1)]
    sharers = degree // context // stages
    count, copies = max(1, layout.num_kv_heads // sharers), max(1, sharers // layout.num_kv_heads)
    layouts = []
    for rank in range(degree):
        sharer, stage = rank // context % sharers, stages - 1 - rank * stages // degree
        head = sharer // copies * count
        groups = ends[stage], ends[stage + 1]
        held = KVPart(head, head + count, *groups, rank % context, context)
        layouts.append(replace(layout, rank=rank, held=held, copies=copies, copy=sharer % copies))
    return layouts
