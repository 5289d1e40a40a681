"""The router's own account of the fleet: what it has placed where, whom it suspects, and channels.

The view of who is alive is placement's; choosing is `policy.py`'s; calling is `attempt.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import grpc.aio

from effuse.placement.records import WorkerRecord
from effuse.protos.rpc import connect
from effuse.protos.stubs import decode_stub, prefill_stub, worker_stub
from effuse.router.policy import (
    Candidate,
    InFlight,
    Placement,
    PrefillMode,
    WorkerLife,
    place,
    why_refused,
)

if TYPE_CHECKING:
    from effuse.v1 import worker_pb2_grpc

SUSPICION_S: Final = 6.0
"""A little longer than a lease (5 s): by then a dead worker has left the view."""


class View(Protocol):
    """Who is alive; placement.fleet.FleetView is one."""

    def workers(self) -> Sequence[WorkerRecord]:
        """Live workers, draining ones included."""


@dataclass(frozen=True, slots=True)
class WorkerChannel:
    """A channel to one address, with the stubs that calls need."""

    channel: grpc.aio.Channel
    prefill: worker_pb2_grpc.PrefillServiceAsyncStub
    decode: worker_pb2_grpc.DecodeServiceAsyncStub
    worker: worker_pb2_grpc.WorkerServiceAsyncStub


class RoutedFleet:
    """One per router, used from its event loop. `now` is a monotonic clock in seconds."""

    def __init__(self, view: View, mode: PrefillMode, now: Callable[[], float]) -> None:
        self._view = view
        self._mode: PrefillMode = mode
        self._now = now
        self._in_flight: dict[WorkerLife, InFlight] = {}
        self._suspected_until: dict[WorkerLife, float] = {}
        self._peers: dict[str, WorkerChannel] = {}
        self._addresses: dict[WorkerLife, str] = {}

    @property
    def mode(self) -> PrefillMode:
        """Who prefills."""
        return self._mode

    def candidates(self) -> list[Candidate]:
        """Every live worker with our account of it."""
        now = self._now()
        return [self._candidate(record, now) for record in self._view.workers()]

    def place(self, model: str, excluded: Collection[WorkerLife]) -> Placement | None:
        """Picks workers for an attempt; nothing is counted yet."""
        return place(self.candidates(), model, self._mode, excluded)

    def why_refused(self, model: str) -> str:
        """What keeps a prefill worker from a decode worker that fits; empty where nothing does."""
        return why_refused(self.candidates(), model)

    @contextmanager
    def counted(self, placement: Placement, prompt_len: int, max_tokens: int) -> Iterator[None]:
        """Counts an attempt on its workers as long as it lasts."""
        shares = [(placement.decode, prompt_len + max_tokens)]
        if placement.prefill is not None:
            shares.append((placement.prefill, prompt_len))
        for record, tokens in shares:
            self._count_in_flight(record, 1, tokens)
        try:
            yield
        finally:
            for record, tokens in shares:
                self._count_in_flight(record, -1, -tokens)

    def suspect(self, record: WorkerRecord) -> None:
        """It broke off: others come first until its lease must have run out."""
        self._suspected_until[_life(record)] = self._now() + SUSPICION_S

    def peer(self, address: str) -> WorkerChannel:
        """The channel to a worker; one for all of its requests."""
        peer = self._peers.get(address)
        if peer is None:
            channel = connect(address)
            peer = self._peers[address] = WorkerChannel(
                channel, prefill_stub(channel), decode_stub(channel), worker_stub(channel)
            )
        return peer

    async def forget_gone(self) -> None:
        """Drops what is kept of workers that are neither alive nor in use."""
        alive = self._view.workers()
        lives, addresses = {_life(r) for r in alive}, {r.address for r in alive}
        for life, in_flight in list(self._in_flight.items()):
            if in_flight.requests:
                addresses.add(self._addresses[life])
            elif life not in lives:
                del self._in_flight[life], self._addresses[life]
        now = self._now()
        self._suspected_until = {k: t for k, t in self._suspected_until.items() if t > now}
        for address in self._peers.keys() - addresses:
            await self._peers.pop(address).channel.close(0)

    async def close(self) -> None:
        """Closes every channel."""
        for peer in self._peers.values():
            await peer.channel.close(0)
        self._peers.clear()

    def _candidate(self, record: WorkerRecord, now: float) -> Candidate:
        life = _life(record)
        suspected = self._suspected_until.get(life, 0.0) > now
        return Candidate(record, self._in_flight.get(life, InFlight()), suspected)

    def _count_in_flight(self, record: WorkerRecord, requests: int, tokens: int) -> None:
        life = _life(record)
        self._addresses[life] = record.address
        before = self._in_flight.get(life, InFlight())
        self._in_flight[life] = InFlight(
            requests=before.requests + requests,
            tokens=before.tokens + tokens,
            placed=before.placed + max(0, requests),
        )


def _life(record: WorkerRecord) -> WorkerLife:
    return record.worker_id, record.incarnation
