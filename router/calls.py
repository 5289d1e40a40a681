"""Calls to workers: what an attempt says on them, and how their outcomes are told apart.

A call has its worker's error, its silence, or our own cancellation: grpcio raises CancelledError
both where our task is cancelled and where the call is, and only the first may pass. Not here: when
calls are opened and ended (`attempt.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol, TypeVar

import grpc
import grpc.aio

from effuse.placement.records import WorkerRecord
from effuse.protos.errors import EffuseError, PeerLost, Unreserved, from_rpc_error
from effuse.router.request import Request
from effuse.router.request_states import State
from effuse.v1 import worker_pb2

LOG: Final = logging.getLogger(__name__)

Message = TypeVar("Message", covariant=True)
DecodeCall = grpc.aio.UnaryStreamCall[worker_pb2.DecodeRequest, worker_pb2.DecodeResponse]
PrefillStream = grpc.aio.StreamStreamCall[worker_pb2.PrefillRequest, worker_pb2.PrefillResponse]


class AttemptFailed(Exception):
    """One of an attempt's two calls failed; `worker` is to blame."""

    def __init__(self, error: EffuseError, worker: WorkerRecord) -> None:
        super().__init__(error.message)
        self.error = error
        self.worker = worker


class Readable(Protocol[Message]):
    """A call that answers with a stream."""

    async def read(self) -> Message:
        """The next message, or grpc.aio.EOF."""


async def read_message(call: Readable[Message], peer: str) -> Message:
    """The next message of a stream, or grpc.aio.EOF at its good end; raises `EffuseError`."""
    try:
        return await call.read()
    except grpc.aio.AioRpcError as error:
        LOG.info("%s ended its call with %s: %s", peer, error.code().name, error.details())
        raise from_rpc_error(error, peer) from error
    except asyncio.CancelledError:
        if is_task_cancelled():
            raise
        raise PeerLost(f"{peer} broke off the call") from None


@contextmanager
def ignore_ended_call() -> Iterator[None]:
    """For a write: where the call is over it is left out, and the call's reader learns why."""
    try:
        yield
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return
    except asyncio.CancelledError:
        if is_task_cancelled():
            raise


def is_task_cancelled() -> bool:
    """Whether it is the current task that somebody cancels."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class PrefillCall:
    """One Prefill call: the prompt goes out, then the reservation, until pages are pushed.

    What it says counts only while the prompt's KV is on its way: once pages are pushed or verified,
    how it ends concerns nobody. `failure` is set, and `on_failure` called, where it fails the
    attempt."""

    def __init__(
        self,
        stream: PrefillStream,
        worker: WorkerRecord,
        request: Request,
        *,
        on_failure: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self.stream = stream
        self.worker = worker
        self.reader: asyncio.Task[None] | None = None
        self.is_pushed = False
        self.failure: AttemptFailed | None = None
        self._is_unheard = False  # the reservation found the call over
        self._request = request
        self._on_failure = on_failure
        self._now = now
        self._peer = f"prefill worker {worker.worker_id}"

    async def send_prompt(self, attempt: worker_pb2.AttemptId) -> None:
        """Sends the prompt, and listens from then on, to the end of the call."""
        start = worker_pb2.PrefillStart(
            attempt=attempt,
            prompt_token_ids=self._request.prompt_token_ids,
            incarnation=self.worker.incarnation,
        )
        with ignore_ended_call():
            await self.stream.write(worker_pb2.PrefillRequest(start=start))
        self.reader = asyncio.create_task(self._follow_push())

    async def send_reservation(self, reservation: worker_pb2.Reservation) -> None:
        """Passes on where the pages go."""
        is_heard = False
        with ignore_ended_call():
            await self.stream.write(worker_pb2.PrefillRequest(reservation=reservation))
            is_heard = True
        self._is_unheard = not is_heard
        if is_heard:
            # A call that ends meanwhile says why to who reads it.
            with suppress(grpc.aio.InternalError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self.stream.done_writing()

    async def _follow_push(self) -> None:
        try:
            await self._read_all()
        except EffuseError as error:
            if self.is_pushed or self._request.state is State.DECODING:
                LOG.info("after its pages had arrived, %s failed: %s", self._peer, error.message)
                return
            if self._is_unheard and await self._has_lost_its_status():
                error = Unreserved(f"{self._peer} had ended its call when the reservation came")
            self.failure = AttemptFailed(error, self.worker)
            self._on_failure()

    async def _has_lost_its_status(self) -> bool:
        """Whether grpcio has put an error of its own in the place of the worker's: it does where a
        message is written in the moment in which the worker ends the call."""
        return self.stream.done() and await self.stream.code() is grpc.StatusCode.INTERNAL

    async def _read_all(self) -> None:
        while True:
            response = await read_message(self.stream, self._peer)
            if not isinstance(response, worker_pb2.PrefillResponse):
                break
            if response.HasField("computed"):
                self._request.prefilled = self._now()
            self.is_pushed = self.is_pushed or response.HasField("pushed")
        if not self.is_pushed:
            raise PeerLost(f"{self._peer} ended its call before the pages were pushed")
