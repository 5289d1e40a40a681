"""Ends attempts on workers, beside the requests: nobody waits for it, and it ends by itself.

A worker also learns of the end from its broken call; the abort is what it answers to only once
nothing reads or writes KV memory any more. Here an answer is counted, not needed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import grpc.aio

from effuse.placement.records import WorkerRecord
from effuse.router.fleet import Fleet
from effuse.router.legs import is_cancelled
from effuse.v1 import worker_pb2 as pb

LOG: Final = logging.getLogger(__name__)
ABORT_S: Final = 5.0


class Aborts:
    """Use: `async with Aborts(fleet) as aborts`; leaving waits for those that run, `ABORT_S` at
    most."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._group = asyncio.TaskGroup()
        self._is_open = False
        self.num_sent = 0
        self.num_unanswered = 0

    async def __aenter__(self) -> Aborts:
        await self._group.__aenter__()
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._is_open = False
        await self._group.__aexit__(kind, error, None)

    def send(self, worker: WorkerRecord, attempt: pb.AttemptId, reason: str) -> None:
        """Tells `worker` to end `attempt`, unless the router itself is at its very end."""
        if not self._is_open:
            return
        self.num_sent += 1
        request = pb.AbortRequest(attempt=attempt, reason=reason)
        self._group.create_task(self._send(worker, request))

    async def _send(self, worker: WorkerRecord, request: pb.AbortRequest) -> None:
        try:
            await self._fleet.peer(worker.address).worker.Abort(request, timeout=ABORT_S)
        except grpc.aio.AioRpcError as error:
            self.num_unanswered += 1
            LOG.info("%s did not answer an abort: %s", worker.worker_id, error.code().name)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self.num_unanswered += 1
