"""A leader's memory, runner and connector, which have the other ranks of the group do the same."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from effuse.kvtransfer.connector import Connector, ConnectorEvent, Pending
from effuse.kvtransfer.layout import KVLayout
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import BoundaryState, Reservation, Shard
from effuse.kvtransfer.ranks import RankEvents
from effuse.models.part import Part, PartResult
from effuse.models.runner import ModelRunner
from effuse.worker.rank_messages import (
    Cancel,
    CopyPage,
    Expect,
    Fence,
    FinishPush,
    Forget,
    ForgetLife,
    PushPages,
    RunParts,
    ZeroTail,
)
from effuse.worker.ranks import Ranks


@dataclass(frozen=True, slots=True)
class ForwardProgress:
    """Groups of layers that a forward has stored, by its number in the group."""

    number: int
    stored: Callable[[], int]

    def __call__(self) -> int:
        return self.stored()


class GroupRunner:
    """A `PromptForward` of all ranks; candidates are the leader's."""

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks
        self._number = 0  # of the next forward

    def progress(self) -> ForwardProgress:
        """How far the next forward is on the leader's device."""
        return ForwardProgress(self._number, self._runner.progress())

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        """One forward; results once every rank has read the same parts. Raises GroupBroken, also if
        the forward fails here: the other ranks would wait for ever."""
        if not parts:
            return []
        self._ranks.check()
        self._ranks.send(RunParts(self._number, list(parts)))
        self._number += 1
        try:
            results = self._runner.run(parts)
        except Exception as error:
            self._ranks.failed(error)
            raise
        self._ranks.confirm()
        return results


class GroupMemory(PageMemory):
    """The leader's pages; pages of the same ids on the other ranks change with them."""

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device, ranks: Ranks
    ) -> None:
        super().__init__(layout, num_pages, device)
        self._ranks = ranks

    def copy_page(self, source: int, target: int) -> None:
        """Copies all of a page to another one, on every rank."""
        self._ranks.send(CopyPage(source, target))
        super().copy_page(source, target)

    def zero_tail(self, page_id: int, num_used: int) -> None:
        """Zeroes the slots of a page from `num_used` on, on every rank."""
        self._ranks.send(ZeroTail(page_id, num_used))
        super().zero_tail(page_id, num_used)


class GroupConnector:
    """A `Connector` of all ranks: the leader's own, and commands to the others.

    A boundary state goes to the other ranks once it is there, because only the leader waits for
    the forward that it comes from.
    """

    def __init__(self, own: Connector, ranks: Ranks) -> None:
        """`own` has been started, and the other ranks' connectors are open."""
        self.name = own.name
        self._own = own
        self._ranks = ranks
        self._events = RankEvents(ranks.size)
        self._unfinished: dict[str, tuple[Reservation, Pending[BoundaryState]]] = {}
        self._signals = select.epoll()
        for signal in (own.fileno(), ranks.event_signal):
            self._signals.register(signal, select.EPOLLIN)

    def start(self) -> None:
        """All ranks have begun."""

    def close(self) -> None:
        """Ends the leader's own connector; the others end with their ranks."""
        self._own.close()
        self._signals.close()

    def describe(self) -> tuple[Shard, ...]:
        """How peers reach each rank's pool."""
        return (*self._own.describe(), *self._ranks.shards())

    def expect(self, reservation: Reservation, writer: str | None) -> None:
        """Accepts this transfer on every rank from now on: a writer may begin once this returns."""
        self._events.begin(reservation.transfer_id)
        self._ranks.send(Expect(reservation, writer))
        self._own.expect(reservation, writer)
        self._ranks.confirm()

    def forget(self, transfer_id: str) -> None:
        """Refuses this transfer from now on."""
        self._ranks.send(Forget(transfer_id))
        self._own.forget(transfer_id)

    def fence(self, transfer_id: str, *, has_drained: bool) -> None:
        """The writing ranks of a forgotten transfer write no more."""
        self._ranks.send(Fence(transfer_id, has_drained))
        self._own.fence(transfer_id, has_drained=has_drained)

    def push_pages(
        self,
        reservation: Reservation,
        source_pages: Sequence[int],
        first: int,
        num_final: Pending[int] | None = None,
    ) -> None:
        """Pages of a reservation; every rank sends its heads of them."""
        self._events.begin(reservation.transfer_id)
        number = num_final.number if isinstance(num_final, ForwardProgress) else None
        self._ranks.send(PushPages(reservation, tuple(source_pages), first, number))
        self._own.push_pages(reservation, source_pages, first, num_final)

    def finish(self, reservation: Reservation, boundary: Pending[BoundaryState]) -> None:
        """No more pages follow."""
        self._events.begin(reservation.transfer_id)
        self._own.finish(reservation, boundary)
        self._unfinished[reservation.transfer_id] = (reservation, boundary)
        self._finish_others()

    def cancel(self, transfer_id: str) -> None:
        """Stops a push on every rank."""
        self._events.begin(transfer_id)
        self._unfinished.pop(transfer_id, None)
        self._ranks.send(Cancel(transfer_id))
        self._own.cancel(transfer_id)

    def forget_life(self, incarnation: str) -> None:
        """A receiver's life is over."""
        self._ranks.send(ForgetLife(incarnation))
        self._own.forget_life(incarnation)

    def poll(self) -> list[ConnectorEvent]:
        """Events of all ranks together since the last call. Raises ConnectorDied if the leader's
        connector has ended, and GroupBroken if a rank has."""
        self._ranks.check()
        self._finish_others()
        events = [(0, event) for event in self._own.poll()]
        events += self._ranks.events()
        return [merged for rank, event in events for merged in self._events.take(rank, event)]

    def fileno(self) -> int:
        """Readable while poll() has something."""
        return self._signals.fileno()

    def _finish_others(self) -> None:
        for transfer_id, (reservation, boundary) in list(self._unfinished.items()):
            if (state := boundary()) is not None:
                self._ranks.send(FinishPush(reservation, state))
                del self._unfinished[transfer_id]
