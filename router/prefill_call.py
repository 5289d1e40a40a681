"""The call by which an attempt has its prompt computed.

Not here: channels, and calls that attempts leave behind (`calls.py`)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import grpc.aio

from effuse.placement.records import WorkerRecord
from effuse.protos.errors import EffuseError, EngineLost, PeerLost, Unreserved
from effuse.router.calls import PrefillStream, ignore_ended_call, read_message
from effuse.router.policy import Condition
from effuse.router.request import Request
from effuse.router.request_states import State
from effuse.v1 import worker_pb2

LOG: Final = logging.getLogger(__name__)


class PrefillCall:
    """One Prefill call: the prompt goes out, then the reservation, until pages are pushed.

    Its messages count only while the prompt's KV is on its way: how it ends after that does not
    matter. `failure` is set if it fails the attempt."""

    def __init__(
        self,
        stream: PrefillStream,
        worker: WorkerRecord,
        request: Request,
        *,
        ask: Callable[[WorkerRecord], Awaitable[Condition | None]],
        now: Callable[[], float],
    ) -> None:
        self.stream = stream
        self.worker = worker
        self.reader: asyncio.Task[None] | None = None
        self.is_pushed = False
        self.failure: EffuseError | None = None
        self._is_unheard = False  # the reservation found the call over
        self._in_pool = False
        self._is_computed = asyncio.Event()  # or the call is over
        self._request = request
        self._ask = ask
        self._now = now
        self._peer = f"prefill worker {worker.worker_id}"

    @property
    def has_ended_well(self) -> bool:
        """Whether the pages were pushed and the call is over."""
        return self.is_pushed and self.reader is not None and self.reader.done()

    async def send_prompt(
        self,
        attempt: worker_pb2.AttemptId,
        on_failure: Callable[[], None],
        on_progress: Callable[[int], Awaitable[None]] | None = None,
        *,
        to_pool: bool = False,
    ) -> None:
        """Sends the prompt, and reads from then on, to the end of the call; calls `on_failure` if
        that fails the attempt, and `on_progress` with the tokens that are computed. `to_pool`: its
        KV goes to the pool, as far as that works."""
        start = worker_pb2.PrefillStart(
            attempt=attempt,
            prompt_token_ids=self._request.prompt.token_ids,
            incarnation=self.worker.incarnation,
            cache_salt=self._request.tenant.name,
            progress=on_progress is not None,
            to_pool=to_pool,
        )
        with ignore_ended_call():
            await self.stream.write(worker_pb2.PrefillRequest(start=start))
        # Not kept here: an attempt and its call would hold each other, and all that is of a request
        # would be left to the garbage collector.
        self.reader = asyncio.create_task(self._follow_push(on_failure, on_progress))

    async def is_in_pool(self) -> bool:
        """Whether the pool has the prompt's KV, once that is computed; raises `EffuseError`. The
        request's deadline applies."""
        await self._is_computed.wait()
        if self.failure is not None:
            raise self.failure
        return self._in_pool

    async def send_reservation(self, reservation: worker_pb2.Reservation) -> None:
        """Passes on where the pages go. Nothing follows, and the worker ends the call: to close our
        half of it would be one more message, and 0.1 ms, of every request."""
        is_heard = False
        with ignore_ended_call():
            await self.stream.write(worker_pb2.PrefillRequest(reservation=reservation))
            is_heard = True
        self._is_unheard = not is_heard

    async def _follow_push(
        self,
        on_failure: Callable[[], None],
        on_progress: Callable[[int], Awaitable[None]] | None,
    ) -> None:
        try:
            await self._read_all(on_progress)
        except EffuseError as error:
            if self.is_pushed or self._request.answer.state is State.DECODING:
                LOG.info("after the pages arrived, %s failed: %s", self._peer, error.message)
                return
            # Where a message is written in the moment in which the worker ends the call, grpcio
            # puts an error of its own in the place of the worker's.
            is_suspicious = self._is_unheard and self.stream.done()
            if is_suspicious and await self.stream.code() is grpc.StatusCode.INTERNAL:
                error = await self._ask_why()
            self.failure = error
            on_failure()
        finally:
            self._is_computed.set()

    async def _ask_why(self) -> EffuseError:
        """The error that the worker probably sent, inferred from its condition now."""
        told = f"{self._peer} ended its call before the reservation arrived"
        condition = await self._ask(self.worker)
        if condition is None:
            return PeerLost(f"{told}, and it does not answer")
        if condition is Condition.STARTING:
            return EngineLost(f"{told}, and its engine is lost")
        return Unreserved(told)

    async def _read_all(self, on_progress: Callable[[int], Awaitable[None]] | None) -> None:
        while True:
            response = await read_message(self.stream, self._peer)
            if not isinstance(response, worker_pb2.PrefillResponse):
                break
            if response.HasField("progress") and on_progress is not None:
                await on_progress(response.progress.computed_tokens)
            if response.HasField("computed"):
                self._request.costs.prefilled = self._now()
                self._request.costs.compute_s = response.computed.compute_s
                self._request.costs.cached_tokens = response.computed.cached_tokens
                self._in_pool = response.computed.in_pool
                self._is_computed.set()
            self.is_pushed = self.is_pushed or response.HasField("pushed")
        if not self.is_pushed:
            raise PeerLost(f"{self._peer} ended its call before the pages were pushed")
