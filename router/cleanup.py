"""What attempts leave behind is ended beside the requests: nobody waits for it, and all of it ends.

An answer is given as soon as its last token is known; what its calls still say concerns nobody, but
none of them may be left. A worker also learns of an attempt's end from its broken call; it answers
an abort only once nothing reads or writes KV memory any more. Here that answer is counted, not
needed. Not here: which calls are cancelled at once (`attempt.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

import grpc.aio

from effuse.placement.records import WorkerRecord
from effuse.router.calls import is_task_cancelled
from effuse.router.fleet import RoutedFleet
from effuse.v1 import worker_pb2 as pb

LOG: Final = logging.getLogger(__name__)
ABORT_S: Final = 5.0
SETTLE_S: Final = 0.25
"""What calls of an attempt that is over have to end by themselves."""


class OpenCall(Protocol):
    """A call of ours that has not ended yet."""

    async def code(self) -> grpc.StatusCode:
        """Its status, once it has ended."""


class Cleanup:
    """One per router. Works within `async with cleanup.running()`."""

    def __init__(self, fleet: RoutedFleet, settle_s: float = SETTLE_S) -> None:
        self._fleet = fleet
        self._settle_s = settle_s
        self._aborts: asyncio.TaskGroup | None = None
        self._settling: asyncio.TaskGroup | None = None
        self.num_open = 0  # attempts whose calls are still to end
        self.num_late = 0  # those that had to be cut off, ever
        self.num_aborts = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving waits for calls that are open, `SETTLE_S` at most, then for aborts, `ABORT_S` at
        most."""
        async with asyncio.TaskGroup() as aborts:
            self._aborts = aborts
            try:
                async with asyncio.TaskGroup() as settling:
                    self._settling = settling
                    try:
                        yield
                    finally:
                        self._settling = None
            finally:
                self._aborts = None

    def send_abort(self, worker: WorkerRecord, attempt: pb.AttemptId, reason: str) -> None:
        """Tells `worker` to end `attempt`, unless the router itself is at its very end."""
        if self._aborts is None:
            return
        self.num_aborts += 1
        request = pb.AbortRequest(attempt=attempt, reason=reason)
        self._aborts.create_task(self._abort(worker, request))

    def settle_calls(
        self,
        calls: Sequence[OpenCall],
        readers: Sequence[asyncio.Task[None]],
        end_calls: Callable[[], None] | None = None,
    ) -> None:
        """Takes over what an attempt leaves. `end_calls` makes every call of it end; it is called
        where that has not happened in time."""
        if self._settling is None:
            _cut_off(readers, end_calls)
            return
        self.num_open += 1
        self._settling.create_task(self._settle(calls, readers, end_calls))

    async def _abort(self, worker: WorkerRecord, request: pb.AbortRequest) -> None:
        try:
            await self._fleet.peer(worker.address).worker.Abort(request, timeout=ABORT_S)
        except grpc.aio.AioRpcError as error:
            LOG.info("%s did not answer an abort: %s", worker.worker_id, error.code().name)
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise

    async def _settle(
        self,
        calls: Sequence[OpenCall],
        readers: Sequence[asyncio.Task[None]],
        end_calls: Callable[[], None] | None,
    ) -> None:
        try:
            async with asyncio.timeout(self._settle_s):
                for call in calls:
                    await call.code()
                if readers:
                    await asyncio.wait(readers)
        except TimeoutError:
            self.num_late += 1
            _cut_off(readers, end_calls)
            if readers:
                await asyncio.wait(readers)
        finally:
            self.num_open -= 1


def _cut_off(readers: Sequence[asyncio.Task[None]], end_calls: Callable[[], None] | None) -> None:
    if end_calls is not None:
        end_calls()
    for reader in readers:
        reader.cancel()
