"""Channels of a router to its workers, and their answers about themselves.

Not here: requests on workers (`calls.py`), the account of them (`fleet.py`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc.aio

from effuse.placement.records import WorkerRecord
from effuse.protos.channels import OPEN, FleetAccess, FleetChannel
from effuse.protos.errors import PeerLost
from effuse.protos.rpc import is_task_cancelled
from effuse.protos.stubs import decode_stub, prefill_stub, worker_stub
from effuse.router.policy import Condition
from effuse.v1 import worker_pb2

if TYPE_CHECKING:
    from effuse.v1 import worker_pb2_grpc

ASK_S: Final = 1.0
"""Longest that a worker may take to answer how it is."""

MOST_OLD: Final = 4
"""How often certificates may change before channels that still show older ones are closed, although
a call may run over them."""


@dataclass(frozen=True, slots=True)
class WorkerChannel:
    """A channel to one address, with the stubs that calls need."""

    channel: FleetChannel
    prefill: worker_pb2_grpc.PrefillServiceAsyncStub
    decode: worker_pb2_grpc.DecodeServiceAsyncStub
    worker: worker_pb2_grpc.WorkerServiceAsyncStub


class Peers:
    """One per router. `now` is a monotonic clock in seconds; `access`: the credentials of router
    and workers for each other; `longest_call_s`: of our calls to them."""

    def __init__(
        self,
        now: Callable[[], float],
        access: FleetAccess = OPEN,
        longest_call_s: float = 3600.0,
    ) -> None:
        self._now = now
        self._access = access
        self._longest_call_s = longest_call_s
        self._certificates = access.look()  # the version that channels have
        # Channels that calls may still run on, and since when new calls have others.
        self._old: deque[tuple[float, list[FleetChannel]]] = deque()
        self._channels: dict[str, WorkerChannel] = {}

    def at(self, address: str) -> WorkerChannel:
        """The channel to a worker; one for all of its requests."""
        peer = self._channels.get(address)
        if peer is None:
            channel = self._access.connect(address)
            peer = self._channels[address] = WorkerChannel(
                channel, prefill_stub(channel), decode_stub(channel), worker_stub(channel)
            )
        return peer

    async def condition_of(self, record: WorkerRecord) -> Condition | None:
        """A worker's condition by its own answer, `STARTING` if the engine of `record` is not there
        any more; None if it does not answer."""
        load = await self._load_of(record)
        if load is None or load.worker.worker_id != record.worker_id:
            return None  # another one has its address now
        if load.draining:
            return Condition.DRAINING
        if load.worker.incarnation != record.incarnation:
            return Condition.STARTING
        return Condition.READY

    async def is_empty(self, record: WorkerRecord) -> bool:
        """Whether nothing runs or waits in a worker, or it does not answer."""
        load = await self._load_of(record)
        return load is None or load.running + load.waiting == 0

    async def _load_of(self, record: WorkerRecord) -> worker_pb2.GetLoadResponse | None:
        """The load by the worker's front; None if it does not answer."""
        peer = self.at(record.address)
        try:
            await peer.channel.prove()
            return await peer.worker.GetLoad(worker_pb2.GetLoadRequest(), timeout=ASK_S)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, PeerLost):  # its channel is closed
            return None
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            return None

    async def keep(self, addresses: Collection[str]) -> None:
        """Closes channels to other addresses, and those with old certificates once they may go."""
        gone = [self._channels.pop(address) for address in self._channels.keys() - set(addresses)]
        for peer in gone:  # a call that needs one meanwhile gets another
            await peer.channel.close(0)
        if (newest := self._access.look()) != self._certificates:
            self._certificates = newest
            self._renew()
        over = self._now() - self._longest_call_s
        while (old := self._old) and (old[0][0] < over or len(old) > MOST_OLD):
            for channel in old.popleft()[1]:
                await channel.close(0)

    async def close(self) -> None:
        """Closes every channel."""
        self._renew()
        while self._old:
            for channel in self._old.popleft()[1]:
                await channel.close(0)

    def _renew(self) -> None:
        """New calls show new certificates; those that run end over the channels that they have."""
        self._old.append((self._now(), [one.channel for one in self._channels.values()]))
        self._channels.clear()
