"""The prefill leg of an attempt: the prompt goes out, then the reservation, until pages are pushed.

What it says counts only while the prompt's KV is on its way: once pages are pushed or verified, how
its call ends concerns nobody. Not here: opening and ending calls (`attempt.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import grpc
import grpc.aio

from effuse.placement.records import WorkerRecord
from effuse.protos.errors import EffuseError, PeerLost, Unreserved
from effuse.router.cleanup import ReaderTask
from effuse.router.job import Job
from effuse.router.legs import LegFailed, read, tell
from effuse.router.request import State
from effuse.v1 import worker_pb2

LOG: Final = logging.getLogger(__name__)
PrefillCall = grpc.aio.StreamStreamCall[worker_pb2.PrefillRequest, worker_pb2.PrefillResponse]


class PrefillLeg:
    """Follows one Prefill call. `failure` is set, and `on_failure` called, where it fails the
    attempt."""

    def __init__(
        self,
        call: PrefillCall,
        worker: WorkerRecord,
        job: Job,
        *,
        on_failure: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self.call = call
        self.worker = worker
        self.task: ReaderTask | None = None
        self.is_pushed = False
        self.failure: LegFailed | None = None
        self._is_unheard = False  # the reservation found the call over
        self._job = job
        self._on_failure = on_failure
        self._now = now
        self._peer = f"prefill worker {worker.worker_id}"

    async def begin(self, attempt: worker_pb2.AttemptId) -> None:
        """Sends the prompt, and listens from then on, to the end of the call."""
        start = worker_pb2.PrefillStart(
            attempt=attempt,
            prompt_token_ids=self._job.prompt_token_ids,
            incarnation=self.worker.incarnation,
        )
        await tell(self.call, worker_pb2.PrefillRequest(start=start))
        self.task = asyncio.create_task(self._listen())

    async def push_to(self, reservation: worker_pb2.Reservation) -> None:
        """Passes on where the pages go."""
        self._is_unheard = not await tell(
            self.call, worker_pb2.PrefillRequest(reservation=reservation)
        )
        if not self._is_unheard:
            # A call that ends meanwhile says why to who reads it.
            with suppress(grpc.aio.InternalError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self.call.done_writing()

    async def _listen(self) -> None:
        try:
            await self._read_all()
        except EffuseError as error:
            if self.is_pushed or self._job.life.state is State.DECODING:
                LOG.info("after its pages had arrived, %s failed: %s", self._peer, error.message)
                return
            if self._is_unheard and await self._has_lost_its_status():
                error = Unreserved(f"{self._peer} had ended its call when the reservation came")
            self.failure = LegFailed(error, on_prefill=True)
            self._on_failure()

    async def _has_lost_its_status(self) -> bool:
        """Whether grpcio has put an error of its own in the place of the worker's: it does where a
        message is written in the moment in which the worker ends the call."""
        return self.call.done() and await self.call.code() is grpc.StatusCode.INTERNAL

    async def _read_all(self) -> None:
        while True:
            response = await read(self.call, self._peer)
            if not isinstance(response, worker_pb2.PrefillResponse):
                break
            if response.HasField("computed"):
                self._job.costs.prefilled = self._now()
            self.is_pushed = self.is_pushed or response.HasField("pushed")
        if not self.is_pushed:
            raise PeerLost(f"{self._peer} ended its call before the pages were pushed")
