"""PrefillService: a prompt in, then the reservation on the same stream; computed and pushed out.

Computing begins immediately, and only the push waits for the reservation. However a stream ends,
its attempt ends in the engine.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio

from effuse.prefill_worker.rehearsals import Rehearsals
from effuse.protos.errors import EffuseError, InvalidRequest, Unreserved
from effuse.v1 import worker_pb2 as pb
from effuse.v1 import worker_pb2_grpc as pb_grpc
from effuse.worker import wire
from effuse.worker.attempts import OpenAttempt, deadline_passed, to_error
from effuse.worker.config import PrefillConfig
from effuse.worker.front import Role
from effuse.worker.messages import (
    CoreEvent,
    Failed,
    PrefillDone,
    PromptPushed,
    PushTo,
    StartPrefill,
)
from effuse.worker.shell import Shell

_Context: TypeAlias = "grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillResponse]"
_Requests: TypeAlias = AsyncIterator[pb.PrefillRequest]


@dataclass(slots=True)
class _PrefillCall:
    """State of one Prefill call while it runs."""

    attempt: OpenAttempt
    began_at: float
    is_reserved: bool = False
    reader: str = ""  # life of the decode worker that gets its pages
    limit: asyncio.TimerHandle | None = None  # of the wait for it, once the prompt is computed

    def require_reservation(self, waited_s: float) -> None:
        """Ends the attempt if its reservation has not arrived."""
        if not self.is_reserved and not self.attempt.ended.is_set():
            self.attempt.deliver(
                Unreserved(f"no reservation came within {waited_s:g} s of the computed prompt")
            )


class PrefillServicer(pb_grpc.PrefillServiceServicer):
    """Answers for one shell. A computed prompt waits `reservation_s` for its reservation."""

    def __init__(self, shell: Shell, reservation_s: float) -> None:
        self._shell = shell
        self._reservation_s = reservation_s

    async def Prefill(  # type: ignore[override]  # writes to the context: its end is never in doubt
        self, request_iterator: _Requests, context: _Context
    ) -> None:
        limit_s = self._shell.time_left(context.time_remaining())
        traced = self._shell.span("prefill", context.invocation_metadata())
        try:
            with traced:
                async with asyncio.timeout(limit_s):
                    await self._run(request_iterator, context)
        except TimeoutError:
            raise deadline_passed("the prompt was pushed") from None

    async def _run(self, requests: _Requests, context: _Context) -> None:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "start":
            raise InvalidRequest.of("start", "expected the start first, got none")
        start = StartPrefill(
            attempt=wire.attempt_id(first.start.attempt),
            prompt_token_ids=wire.prompt(first.start.prompt_token_ids),
            cache_salt=wire.label(first.start.cache_salt, "start.cache_salt"),
            progress=first.start.progress,
            to_pool=first.start.to_pool,
        )
        attempt = self._shell.begin(start.attempt, first.start.incarnation, start)
        self._shell.metrics.prompt_tokens.inc(len(start.prompt_token_ids))
        stream = _PrefillCall(attempt, time.monotonic())
        reader = self._shell.spawn(self._take_reservation(stream, requests))
        try:
            await self._relay(stream, context)
        finally:
            reader.cancel()
            if stream.limit is not None:
                stream.limit.cancel()
            self._shell.leave(attempt)

    async def _relay(self, stream: _PrefillCall, context: _Context) -> None:
        while True:
            event = await stream.attempt.next_event()
            self._note(stream, event)
            await context.write(wire.response_of(pb.PrefillResponse, event))
            if isinstance(event, PromptPushed):
                return

    def _note(self, stream: _PrefillCall, event: CoreEvent) -> None:
        metrics = self._shell.metrics
        if isinstance(event, PrefillDone):
            metrics.queue_time.observe(event.queue_s)
            metrics.prefill_time.observe(event.compute_s)
            self._shell.traces.record("compute", event.compute_s)
            if event.in_pool:
                return
            loop, wait_s = asyncio.get_running_loop(), self._reservation_s
            stream.limit = loop.call_later(wait_s, stream.require_reservation, wait_s)
        elif isinstance(event, PromptPushed):
            metrics.count_handoff(event.transport, event.bytes, event.push_s)
            self._shell.traces.record("push", event.push_s)
            if stream.is_reserved:
                self._shell.saw_handoff(stream.reader, event.bytes, event.moved_s)
            metrics.succeeded.labels("pushed").inc()
            metrics.latency.observe(time.monotonic() - stream.began_at)
            self._shell.attempts.close(stream.attempt)
        elif isinstance(event, Failed):
            metrics.failed.labels(event.code).inc()
            if event.field == "reservation":
                raise Unreserved(event.message)
            raise to_error(event)

    async def _take_reservation(self, stream: _PrefillCall, requests: _Requests) -> None:
        """Reads the messages after the start; the call's deadline applies."""
        try:
            async for message in requests:
                if stream.is_reserved or message.WhichOneof("message") != "reservation":
                    raise InvalidRequest.of("reservation", "expected one after the start")
                reservation = wire.reservation(message.reservation)
                if reservation.attempt != stream.attempt.id:
                    raise InvalidRequest.of(
                        "reservation.attempt",
                        f"expected {stream.attempt.id}, got {reservation.attempt}",
                    )
                stream.is_reserved, stream.reader = True, reservation.incarnation
                self._shell.send(stream.attempt, PushTo(reservation=reservation))
            if not stream.is_reserved:
                raise InvalidRequest.of("reservation", "the stream ended before it")
        except EffuseError as error:
            stream.attempt.deliver(error)


def make_role(config: PrefillConfig) -> Role:
    """The parts of a front that belong to a prefill worker."""

    def add(shell: Shell, server: grpc.aio.Server) -> None:
        shell.min_handoff_gbps = config.min_handoff_gbps
        servicer = PrefillServicer(shell, config.reservation_s)
        pb_grpc.add_PrefillServiceServicer_to_server(servicer, server)

    return Role(
        name="prefill",
        engine_module="effuse.prefill_worker.build",
        services={"prefill": "effuse.v1.PrefillService"},
        add=add,
        beside=lambda shell, view, changed: Rehearsals(
            shell, view.workers, changed, view.look
        ).run(),
    )
