"""A leader's memory, runner and connector, which have the other ranks of the group do the same."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import numpy as np
import torch

from effuse.kvtransfer.connector import (
    ArrivalRefused,
    Arrived,
    Cancel,
    Command,
    Connector,
    ConnectorEvent,
    Expect,
    FinishPush,
    Forget,
    Promised,
    Pushed,
    PushFailed,
    PushPages,
)
from effuse.kvtransfer.digest import DigestJob, PieceDigests
from effuse.kvtransfer.host_pages import HostPages
from effuse.kvtransfer.layout import KVLayout, PageMemory
from effuse.kvtransfer.messages import Shard
from effuse.models.part import Forward, Part, PartResult
from effuse.models.runner import ModelRunner
from effuse.worker.rank_messages import (
    Complete,
    CopyPage,
    ForReplica,
    ForwardProgress,
    MovePages,
    RunParts,
    ZeroTail,
)
from effuse.worker.ranks import Ranks

T = TypeVar("T")
FILLING: Final = 8  # requests whose rows fill a device
_FAILURES = (ArrivalRefused, PushFailed)
_SUCCESSES = (Arrived, Pushed)


@dataclass(slots=True, eq=False)
class BegunForward:
    """A forward of all ranks that the leader has perhaps not launched yet."""

    number: int
    parts: Sequence[Part]
    num_sent: int  # commands up to it
    progress: ForwardProgress | None
    own: Callable[[], list[PartResult]] | None = None  # once launched here: waits for its results


class GroupRunner:
    """A `PromptForward` of all ranks; candidates are the leader's, or of each replica its own.

    In a pipeline it is a `Pipeline`, too: forwards begin in the first stage before earlier ones
    have ended in the last, which is the leader's.
    """

    def __init__(
        self, runner: ModelRunner, ranks: Ranks, on_sign: Callable[[], None] = lambda: None
    ) -> None:
        """on_sign: called while the leader waits and other stages advance."""
        stage, device = runner.model.stage, runner.model.device
        # A device has the next forward while the host applies results, and the first stage another.
        self._is_ahead = stage is not None and device.type == "cuda"
        self._has_peers = stage is not None and stage.size > 1  # in the last stage
        self.most_begun = 1 if stage is None else stage.count + self._is_ahead
        self._runner = runner
        self._ranks = ranks
        self._on_sign = on_sign
        self._number = 0  # of the next forward
        self._progress: ForwardProgress | None = None  # of the next forward
        self._begun: deque[BegunForward] = deque()  # not launched here yet, oldest first

    def num_parts(self, num_requests: int) -> int:
        """As many as there are stages, and one more if each still has rows to fill a device."""
        has_more = num_requests >= self.most_begun * FILLING
        return self.most_begun if has_more else self.most_begun - self._is_ahead

    def progress(self) -> ForwardProgress:
        """How far the next forward is on the leader's device."""
        self._progress = ForwardProgress(self._number)
        return self._progress

    def run(self, parts: Sequence[Part]) -> list[PartResult]:
        """One forward; results once every rank has read the same parts. Raises GroupBroken, also if
        the forward fails here: the other ranks would wait for ever."""
        return self.end(self.begin(parts)) if parts else []

    def begin(self, parts: Sequence[Part]) -> BegunForward:
        """Has the other stages begin a forward. Raises GroupBroken."""
        self._ranks.check()
        num_sent = self._ranks.send(RunParts(self._number, list(parts)))
        begun = BegunForward(self._number, parts, num_sent, self._progress)
        self._begun.append(begun)
        self._number, self._progress = self._number + 1, None
        return begun

    def end(self, begun: BegunForward) -> list[PartResult]:
        """The results of a forward, after those before it. Raises GroupBroken, as `run`."""
        while begun.own is None:
            self._launch()
        # Without candidates there is no wait, and the caller marks the end of this forward.
        may_lead = self._is_ahead and any(len(part.candidates) for part in begun.parts)
        if may_lead and self._begun and self._ranks.sent_rows(self._begun[0].number):
            self._launch()
        results = self._guarded(begun.own)
        self._ranks.confirm(begun.num_sent)
        if self._runner.model.replicas is None:
            return results
        of_replica = [iter(results), *map(iter, self._ranks.computed(begun.number))]
        return [next(of_replica[part.replica]) for part in begun.parts]

    def _launch(self) -> None:
        """Launches the leader's part of the oldest forward."""
        begun, ranks = self._begun.popleft(), self._ranks
        if self.most_begun > 1:
            ranks.await_rows(begun.number, self._on_sign)
        if self._has_peers:
            ranks.send(Complete())
        if begun.progress is not None:
            begun.progress.stored = self._runner.progress()
        begun.own = self._guarded(lambda: self._runner.launch(begun.parts))

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as error:
            self._ranks.failed(error)
            raise


def pipeline_of(forward: Forward) -> GroupRunner | None:
    """The forward as a `Pipeline`, if it is one."""
    return forward if isinstance(forward, GroupRunner) and forward.most_begun > 1 else None


class ReplicaConnector:
    """A `Connector` of the pages of another rank, which is a replica."""

    def __init__(self, ranks: Ranks, replica: int, name: str) -> None:
        """name: as of `Connector`. The other rank's connector is open."""
        self.name = name
        self._ranks = ranks
        self._replica = replica

    def close(self) -> None:
        """It ends with its rank."""

    def describe(self) -> tuple[Shard, ...]:
        """How peers reach the replica's pool."""
        return (self._ranks.shards()[self._replica - 1],)

    def send(self, command: Command) -> None:
        """Has the replica carry out a command. A writer may begin once `Expect` is sent."""
        self._ranks.send(ForReplica(self._replica, command))
        if isinstance(command, Expect):
            self._ranks.confirm()

    def poll(self) -> list[ConnectorEvent]:
        """Events since the last call. Raises GroupBroken if a rank has ended."""
        self._ranks.check()
        return list(self._ranks.events(self._replica))

    def fileno(self) -> int:
        """Readable while poll() of some replica has something."""
        return self._ranks.event_signal


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


class GroupHost:
    """The leader's host memory; slots of the same numbers on the other ranks have the other parts
    of each page. If it is shared, each rank copies its heads, and stores get whole pages from the
    leader.
    """

    def __init__(self, own: HostPages, ranks: Ranks) -> None:
        self.num_slots = own.num_slots
        self.page_bytes = own.page_bytes * (1 if own.is_shared else ranks.size)
        self._own = own
        self._ranks = ranks
        self._number = 0  # of the next copy

    def save(self, page_ids: Sequence[int], slots: Sequence[int]) -> DigestJob:
        """As of `HostPages`, on every rank."""
        return self._move(page_ids, slots, loads=False)

    def load(self, slots: Sequence[int], page_ids: Sequence[int]) -> DigestJob:
        """As of `HostPages`, on every rank."""
        return self._move(page_ids, slots, loads=True)

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """As of `HostPages`; it is shared if there are stores."""
        return self._own.views(slots)

    def _move(self, page_ids: Sequence[int], slots: Sequence[int], *, loads: bool) -> DigestJob:
        number, self._number = self._number, self._number + 1
        self._ranks.send(MovePages(number, tuple(page_ids), tuple(slots), loads))
        own = self._own.load(slots, page_ids) if loads else self._own.save(page_ids, slots)
        return partial(self._agreed, own, number)

    def _agreed(self, begun: DigestJob, number: int) -> PieceDigests | None:
        """[pages, pieces] in the order of one rank's pages, whatever the number of ranks. Pieces of
        which ranks have different bytes are wrong."""
        own = begun()
        others = None if own is None else self._ranks.moved(number)
        if own is None or others is None:
            return None
        layout = self._own.layout
        rows = np.stack([own, *(np.frombuffer(one, np.int64).reshape(own.shape) for one in others)])
        ranks, groups = (layout.copies, layout.context_degree), len(layout.groups)
        found = rows.reshape(-1, *ranks, len(own), groups, own.shape[1] // groups)
        first = found[:, 0]
        agreed = np.where((found == first[:, None]).all(1), first, ~first)
        return agreed.transpose(2, 1, 3, 0, 4).reshape(len(own), -1)


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
        self._unfinished: dict[str, FinishPush] = {}
        self._signals = select.epoll()
        for signal in (own.fileno(), ranks.event_signal):
            self._signals.register(signal, select.EPOLLIN)

    def close(self) -> None:
        """Ends the leader's own connector; the others end with their ranks."""
        self._own.close()
        self._signals.close()

    def describe(self) -> tuple[Shard, ...]:
        """How peers reach each rank's pool."""
        return (*self._own.describe(), *self._ranks.shards())

    def send(self, command: Command) -> None:
        """Has every rank carry out a command. A writer may begin once `Expect` is sent."""
        theirs = command
        match command:
            case Expect(reservation) | FinishPush(reservation):
                self._events.begin(reservation.transfer_id)
            case PushPages(reservation, pages, first, num_final):
                self._events.begin(reservation.transfer_id)
                if not isinstance(num_final, ForwardProgress):
                    theirs = PushPages(reservation, pages, first)
            case Cancel(transfer_id) | Forget(transfer_id):
                self._events.give_up(transfer_id)
                self._unfinished.pop(transfer_id, None)
            case _:
                pass
        if isinstance(command, FinishPush):
            self._unfinished[command.reservation.transfer_id] = command
            self._finish_others()
        else:
            self._ranks.send(theirs)
        self._own.send(command)
        if isinstance(command, Expect):
            self._ranks.confirm()

    def poll(self) -> list[ConnectorEvent]:
        """Events of all ranks together since the last call. Raises ConnectorDied if the leader's
        connector has ended, and GroupBroken if a rank has."""
        self._ranks.check()
        self._finish_others()
        events = [(0, event) for event in self._own.poll()]
        for rank in range(1, self._ranks.size):
            events += [(rank, event) for event in self._ranks.events(rank)]
        return [merged for rank, event in events for merged in self._events.take(rank, event)]

    def fileno(self) -> int:
        """Readable while poll() has something."""
        return self._signals.fileno()

    def _finish_others(self) -> None:
        for transfer_id, command in list(self._unfinished.items()):
            if command.boundary() is not None:
                self._ranks.send(command)
                del self._unfinished[transfer_id]


@dataclass(slots=True)
class _Transfer:
    """The events of one transfer so far, by kind and rank."""

    events: dict[type[ConnectorEvent], dict[int, ConnectorEvent]] = field(default_factory=dict)
    has_failed: bool = False
    is_given_up: bool = False  # so that PushCancelled or Fenced ends it


class RankEvents:
    """Merges the events of all ranks into those of one connector. Does no I/O.

    A transfer has arrived, was pushed, was cancelled or is fenced once that holds on every rank,
    and has failed once it has on one.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._transfers: dict[str, _Transfer] = {}

    def begin(self, transfer_id: str) -> None:
        """Accepts events of this transfer until it has ended on all ranks; ignores later ones."""
        self._transfers.setdefault(transfer_id, _Transfer())

    def give_up(self, transfer_id: str) -> None:
        """The same of a transfer that is abandoned. Ranks may have succeeded already, which ends it
        no more: the caller waits until all have stopped."""
        self._transfers.setdefault(transfer_id, _Transfer()).is_given_up = True

    def take(self, rank: int, event: ConnectorEvent) -> list[ConnectorEvent]:
        """The merged event after this one; none while other ranks are awaited. A rank may send the
        same event twice."""
        transfer = self._transfers.get(event.transfer_id)
        if transfer is None:
            return []
        if isinstance(event, Promised):
            return [event]
        if isinstance(event, _FAILURES):
            is_first, transfer.has_failed = not transfer.has_failed, True
            return [event] if is_first else []
        by_rank = transfer.events.setdefault(type(event), {})
        by_rank.setdefault(rank, event)
        if len(by_rank) < self._num_ranks:
            return []
        if not (transfer.is_given_up and isinstance(event, _SUCCESSES)):
            del self._transfers[event.transfer_id]
        return [_merged([by_rank[one] for one in range(self._num_ranks)])]


def _merged(events: Sequence[ConnectorEvent]) -> ConnectorEvent:
    """One event of all ranks, in their order."""
    first = events[0]
    match first:
        case Arrived(transfer_id, manifest):
            arrived = [event for event in events if isinstance(event, Arrived)]
            seconds = max(event.seconds for event in arrived)
            num_bytes = sum(event.num_bytes for event in arrived)
            return Arrived(transfer_id, manifest, seconds, num_bytes)
        case Pushed(transfer_id, pages):
            pushed = [event for event in events if isinstance(event, Pushed)]
            return Pushed(
                transfer_id,
                pages,
                sum(event.num_bytes for event in pushed),
                max(event.seconds for event in pushed),
                next((event.route for event in pushed if event.num_bytes), pushed[-1].route),
                max(event.moved_s for event in pushed),
            )
        case _:
            return first
