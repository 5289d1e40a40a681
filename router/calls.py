"""Channels to workers, their answers about themselves, the call by which an attempt has its prompt
computed, and the end of calls that attempts leave behind.

An answer is given as soon as its last token is known. Later messages of its calls do not matter,
but none of the calls may stay open: all of them end beside the requests. A worker also learns of an
attempt's end from its broken call. It answers an abort only once nothing reads or writes KV memory
any more; here that answer is counted and not needed. Not here: the moments at which calls are
opened and cancelled (`attempt.py`)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from effuse.placement.records import Role, WorkerRecord
from effuse.protos.channels import (
    OPEN,
    FleetAccess,
    FleetChannel,
    calling,
    prefill_stub,
    worker_stub,
)
from effuse.protos.errors import EffuseError, EngineLost, PeerLost, Unreserved
from effuse.protos.rpc import is_task_cancelled
from effuse.router.policy import Condition
from effuse.router.request import Request
from effuse.router.request_states import State
from effuse.v1 import worker_pb2, worker_pb2_grpc

LOG: Final = logging.getLogger(__name__)

DecodeCall = grpc.aio.UnaryStreamCall[bytes, worker_pb2.DecodeResponse]
DECODE: Final = "/effuse.v1.DecodeService/Decode"
PrefillStream = grpc.aio.StreamStreamCall[worker_pb2.PrefillRequest, worker_pb2.PrefillResponse]
OnProgress = Callable[[int], Awaitable[None]] | None
"""Takes the number of a prompt's computed tokens."""
ABORT_S: Final = 5.0
SETTLE_S: Final = 0.25
"""How long calls of an attempt that is over may take to end by themselves."""
ASK_S: Final = 1.0
"""Longest that a worker may take to answer how it is."""

EMPTY_S: Final = 5.0
EMPTY_LOOK_S: Final = 0.1
"""How long a request waits until a worker of its own is empty, which is longer than a hang takes to
be noticed, and how often it asks."""

MOST_OLD: Final = 4
"""How often certificates may change before channels that still show older ones are closed, although
a call may run over them."""


@dataclass(frozen=True, slots=True)
class WorkerChannel:
    """A channel to one address, with the stubs that calls need."""

    channel: FleetChannel
    prefill: worker_pb2_grpc.PrefillServiceAsyncStub
    decode: Callable[..., DecodeCall]  # takes serialized requests
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
            decode = channel.unary_stream(
                DECODE, response_deserializer=worker_pb2.DecodeResponse.FromString
            )
            peer = self._channels[address] = WorkerChannel(
                channel, prefill_stub(channel), decode, worker_stub(channel)
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

    async def until_empty(self, records: Sequence[WorkerRecord], most_s: float) -> None:
        """Returns once these workers report that they are empty, or after `most_s` seconds, at most
        `EMPTY_S`. Only they know the requests of other routers, and those that clients left
        behind."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(EMPTY_S, most_s)):
                while not all(  # noqa: ASYNC110  # no worker reports it by itself
                    await asyncio.gather(*map(self.is_empty, records))
                ):
                    await asyncio.sleep(EMPTY_LOOK_S)

    async def _load_of(self, record: WorkerRecord) -> worker_pb2.GetLoadResponse | None:
        """The load by the worker's front; None if it does not answer."""
        peer = self.at(record.address)
        try:
            with calling(record.worker_id):
                await peer.channel.prove()
                return await peer.worker.GetLoad(worker_pb2.GetLoadRequest(), timeout=ASK_S)
        except EffuseError:
            return None

    async def set_role(self, record: WorkerRecord, role: Role) -> None:
        """Gives a worker the role that a plan has for it; raises `EffuseError`."""
        peer = self.at(record.address)
        request = worker_pb2.SetRoleRequest(role=role, planned=True)
        with calling(f"worker {record.worker_id}"):
            async with asyncio.timeout(ASK_S):
                await peer.channel.prove()
                await peer.worker.SetRole(request, timeout=ASK_S)

    async def keep(self, addresses: Collection[str]) -> None:
        """Closes channels to other addresses, and those with old certificates once they may go."""
        closed = [self._channels.pop(address) for address in self._channels.keys() - set(addresses)]
        for peer in closed:  # a call that needs one meanwhile gets another
            await peer.channel.close(0)
        if (newest := self._access.look()) != self._certificates:
            self._certificates = newest
            self._renew()
        await self._close_old(self._now() - self._longest_call_s, MOST_OLD)

    async def close(self) -> None:
        self._renew()
        await self._close_old(0.0, 0)

    async def _close_old(self, before: float, most: int) -> None:
        while (old := self._old) and (old[0][0] < before or len(old) > most):
            for channel in old.popleft()[1]:
                await channel.close(0)

    def _renew(self) -> None:
        """New calls show new certificates; those that run end over the channels that they have."""
        self._old.append((self._now(), [one.channel for one in self._channels.values()]))
        self._channels.clear()


async def read_message(call: DecodeCall | PrefillStream, peer: str) -> Any:
    """The next message of a stream, or grpc.aio.EOF at its good end; raises `EffuseError`."""
    with calling(peer, logs=True):
        return await call.read()


@contextmanager
def ignore_ended_call() -> Iterator[None]:
    """For a write: if the call is over it is left out, and the call's reader learns why."""
    try:
        yield
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return
    except asyncio.CancelledError:
        if is_task_cancelled():
            raise


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
        self._is_unsent = False  # the reservation found the call over
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
        on_progress: OnProgress = None,
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
        is_sent = False
        with ignore_ended_call():
            await self.stream.write(worker_pb2.PrefillRequest(reservation=reservation))
            is_sent = True
        self._is_unsent = not is_sent

    async def _follow_push(self, on_failure: Callable[[], None], on_progress: OnProgress) -> None:
        try:
            await self._read_all(on_progress)
        except EffuseError as error:
            if self.is_pushed or self._request.answer.state is State.DECODING:
                LOG.info("after the pages arrived, %s failed: %s", self._peer, error.message)
                return
            # If a message is written in the moment in which the worker ends the call, grpcio
            # puts an error of its own in the place of the worker's.
            is_suspicious = self._is_unsent and self.stream.done()
            if is_suspicious and await self.stream.code() is grpc.StatusCode.INTERNAL:
                error = await self._ask_why()
            self.failure = error
            on_failure()
        finally:
            self._is_computed.set()

    async def _ask_why(self) -> EffuseError:
        """The error that the worker probably sent, inferred from its condition now."""
        text = f"{self._peer} ended its call before the reservation arrived"
        condition = await self._ask(self.worker)
        if condition is None:
            return PeerLost(f"{text}, and it does not answer")
        if condition is Condition.STARTING:
            return EngineLost(f"{text}, and its engine is lost")
        return Unreserved(text)

    async def _read_all(self, on_progress: OnProgress) -> None:
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


class Cleanup:
    """One per router. Works within `async with cleanup.running()`."""

    def __init__(self, peers: Peers, settle_s: float = SETTLE_S) -> None:
        self._peers = peers
        self._settle_s = settle_s
        self._aborts: asyncio.TaskGroup | None = None
        self._all_settled = asyncio.Event()
        self._all_settled.set()
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
                yield
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settle_s + ABORT_S):  # long cut off by then
                        await self._all_settled.wait()
            finally:
                self._aborts = None

    def send_abort(self, worker: WorkerRecord, attempt: worker_pb2.AttemptId, reason: str) -> None:
        """Sends `worker` an abort of `attempt`, unless the router itself is at its very end."""
        if self._aborts is None:
            return
        self.num_aborts += 1
        request = worker_pb2.AbortRequest(attempt=attempt, reason=reason)
        self._aborts.create_task(self._abort(worker, request))

    def settle_calls(
        self,
        ending: Sequence[grpc.aio.Call | asyncio.Task[Any]],
        cut_off: Callable[[], object],
    ) -> None:
        """Takes over the calls, and the tasks that read them, that an attempt leaves. `cut_off`
        ends every one of them; it is called if they have not ended in time."""
        if self._aborts is None:
            cut_off()
            return
        num_left = len(ending)
        self.num_open += 1
        self._all_settled.clear()
        loop = asyncio.get_running_loop()

        def end_late() -> None:
            self.num_late += 1
            cut_off()

        def watch() -> None:
            # A timer and no task: every request passes here, and hardly one is late.
            late = loop.call_later(self._settle_s, end_late)

            def note_end(_: object) -> None:
                nonlocal num_left
                num_left -= 1
                if not num_left:
                    late.cancel()
                    self.num_open -= 1
                    if not self.num_open:
                        self._all_settled.set()

            for one in ending:
                one.add_done_callback(note_end)

        loop.call_soon(watch)  # once the answer is on its way

    async def _abort(self, worker: WorkerRecord, request: worker_pb2.AbortRequest) -> None:
        peer = self._peers.at(worker.address)
        try:
            with calling(worker.worker_id):
                async with asyncio.timeout(ABORT_S):
                    await peer.channel.prove()  # it may be gone, and another process have its port
                    await peer.worker.Abort(request, timeout=ABORT_S)
        except EffuseError as error:
            LOG.info("an abort was not answered: %s", error.message)
