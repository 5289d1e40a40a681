"""DecodeService: a request in; its reservation, commits and drafts out, to the end or an error.

This file checks the form of requests, and the engine checks whether they fit. However a stream
ends, its attempt ends in the engine, and no prefill worker writes for it any more before its pages
are reused.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio

from effuse.config.decoding import LOGPROBS, WITHIN
from effuse.protos.errors import InvalidRequest
from effuse.v1 import worker_pb2 as pb
from effuse.v1 import worker_pb2_grpc as pb_grpc
from effuse.worker import peer, wire
from effuse.worker.attempts import OpenAttempt, deadline_passed, to_error
from effuse.worker.front import Role
from effuse.worker.messages import (
    Committed,
    CoreEvent,
    Failed,
    Finished,
    Reserved,
    StartDecode,
    StartRehearsal,
    Verified,
    WriterGone,
)
from effuse.worker.shell import Shell

_Context: TypeAlias = "grpc.aio.ServicerContext[pb.DecodeRequest, pb.DecodeResponse]"
_RehearseContext: TypeAlias = "grpc.aio.ServicerContext[pb.RehearseRequest, pb.RehearseResponse]"
_REHEARSAL_S = 30.0  # longest loan of pages
_MOST_TOGETHER = 64  # events in one message


@dataclass(slots=True)
class _DecodeCall:
    """State of one Decode call while it runs."""

    attempt: OpenAttempt
    writer: pb.WorkerRef | None  # the prefill worker that pushes; None prefills here
    began_at: float
    # Pages that an outside writer knows and may write into by itself.
    num_exposed: int = 0
    connector: str = ""  # of a writer's pages
    is_verified: bool = False  # the writer has finished
    committed_at: float | None = None  # the last time
    num_tokens: int = 0  # of this attempt


class DecodeServicer(pb_grpc.DecodeServiceServicer):
    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    async def Decode(  # type: ignore[override]  # writes to the context: its end is never in doubt
        self, request: pb.DecodeRequest, context: _Context
    ) -> None:
        with self._shell.span("decode", context.invocation_metadata()):
            await self._decode(request, context)

    async def _decode(self, request: pb.DecodeRequest, context: _Context) -> None:
        life = self._shell.admit(request.incarnation, "decode")
        writer = writer_of(request)
        start = start_of(request, writer, life.ready.model.block_size)
        if writer is not None:
            self._shell.quarantines.check(writer)
        attempt = self._shell.begin(start.attempt, life.incarnation, start)
        stream = _DecodeCall(attempt, writer, time.monotonic())
        self._shell.metrics.prompt_tokens.inc(len(start.prompt_token_ids))
        try:
            async with asyncio.timeout(self._shell.time_left(context.time_remaining())):
                await self._relay(stream, context)
        except TimeoutError:
            raise deadline_passed("the answer is complete") from None
        finally:
            self._leave(stream)

    async def Rehearse(  # type: ignore[override]  # as Decode
        self, request: pb.RehearseRequest, context: _RehearseContext
    ) -> None:
        """Lends pages to a prefill worker that measures its link to this worker."""
        writer = wire.writer(request.writer, "writer")
        if request.most_pages < 1:
            raise InvalidRequest.of("most_pages", "expected 1 or more, got 0")
        start = StartRehearsal(
            attempt=wire.attempt_id(request.attempt),
            writer=writer.incarnation,
            most_pages=request.most_pages,
        )
        self._shell.quarantines.check(writer)
        attempt = self._shell.begin(start.attempt, request.incarnation, start)
        stream = _DecodeCall(attempt, writer, time.monotonic())
        remaining_s = self._shell.time_left(context.time_remaining())
        try:
            async with asyncio.timeout(min(_REHEARSAL_S, remaining_s)):
                await self._relay_rehearsal(stream, context)
        except TimeoutError:
            raise deadline_passed("the pages arrived") from None
        finally:
            self._leave(stream)

    async def _relay_rehearsal(self, stream: _DecodeCall, context: _RehearseContext) -> None:
        while not stream.is_verified:
            event = await stream.attempt.next_event()
            if isinstance(event, Failed):
                raise to_error(event)
            if isinstance(event, Reserved):
                stream.num_exposed = _num_exposed(event)
            stream.is_verified = isinstance(event, Verified)
            if stream.is_verified:
                self._shell.attempts.close(stream.attempt)
            await context.write(wire.response_of(pb.RehearseResponse, event))

    def _leave(self, stream: _DecodeCall) -> None:
        self._shell.leave(stream.attempt, lambda: self._end_writer(stream))

    async def _relay(self, stream: _DecodeCall, context: _Context) -> None:
        while True:
            event = await stream.attempt.next_event()
            response = self._handle_event(stream, event)
            # A message costs each side more than an event, so one step's events go in one message.
            while len(response.then) < _MOST_TOGETHER and (more := stream.attempt.next_ready()):
                event = more
                response.then.append(self._handle_event(stream, more))
            await context.write(response)
            if isinstance(event, Finished):
                return

    def _handle_event(self, stream: _DecodeCall, event: CoreEvent) -> pb.DecodeResponse:
        self._note(stream, event)
        return wire.response_of(pb.DecodeResponse, event)

    def _note(self, stream: _DecodeCall, event: CoreEvent) -> None:
        metrics, now = self._shell.metrics, time.monotonic()
        match event:
            case Reserved():
                stream.num_exposed = _num_exposed(event)
                stream.connector = event.reservation.connector
                metrics.queue_time.observe(now - stream.began_at)
            case Verified():
                stream.is_verified = True
                if stream.writer is not None:
                    self._shell.traces.record("handoff", event.handoff_s)
                    metrics.count_handoff(stream.connector, event.bytes, event.handoff_s)
            case Committed():
                metrics.generation_tokens.inc(len(event.token_ids))
                since = stream.began_at if stream.committed_at is None else stream.committed_at
                is_first = stream.committed_at is None
                (metrics.first_block if is_first else metrics.inter_block).observe(now - since)
                stream.committed_at = now
                stream.num_tokens += len(event.token_ids)
            case Finished():
                metrics.succeeded.labels("stop" if event.stopped else "length").inc()
                metrics.latency.observe(now - stream.began_at)
                if event.forward_passes:
                    per_forward = stream.num_tokens / event.forward_passes
                    metrics.tokens_per_forward.observe(per_forward)
                self._shell.attempts.close(stream.attempt)
            case Failed():
                metrics.failed.labels(event.code).inc()
                raise to_error(event)

    async def _end_writer(self, stream: _DecodeCall) -> None:
        """Tells the engine when the writer of a prompt that did not arrive writes no more."""
        if stream.writer is not None and not stream.is_verified:
            has_drained = await self._wait_for_writer(stream, stream.writer)
            transfer_id = stream.attempt.id.transfer_id
            message = WriterGone(transfer_id=transfer_id, has_drained=has_drained)
            self._shell.send(stream.attempt, message)

    async def _wait_for_writer(self, stream: _DecodeCall, writer: pb.WorkerRef) -> bool:
        """Returns once the writer cannot interfere; True if none of its writes is left."""
        if not stream.num_exposed or stream.attempt.engine_ended:
            return True
        with self._shell.quarantines.holding(writer, stream.num_exposed) as report:

            def goes_on() -> bool:
                report()
                return not stream.attempt.engine_ended

            return await peer.until_ended(
                writer,
                stream.attempt.id,
                "its decode ended",
                access=self._shell.access,
                goes_on=goes_on,
            )


def start_of(
    request: pb.DecodeRequest, writer: pb.WorkerRef | None, block_size: int
) -> StartDecode:
    """Reads a request with this writer; raises `InvalidRequest` that names the bad field."""
    return StartDecode(
        attempt=wire.attempt_id(request.attempt),
        prompt_token_ids=wire.prompt(request.prompt_token_ids),
        stopping=wire.stopping(request),
        sampling=wire.sampling(request.sampling),
        settings=wire.settings(request.settings),
        writer=None if writer is None else writer.incarnation,
        drafts=request.drafts,
        progress=request.progress,
        num_logprobs=wire.bounded(request, "num_logprobs", LOGPROBS),
        resume=wire.resume(request.resume, block_size) if request.HasField("resume") else None,
        group=wire.label(request.group, "group"),
        gap_s=wire.bounded(request, "gap_s", WITHIN),
        cache_salt=wire.label(request.cache_salt, "cache_salt"),
        in_pool=request.local.in_pool,
    )


def writer_of(request: pb.DecodeRequest) -> pb.WorkerRef | None:
    """Reads the prefill worker; None means this worker itself."""
    which = request.WhichOneof("prefill")
    if which is None:
        raise InvalidRequest.of("prefill", "expected remote or local, got neither")
    if which == "local":
        return None
    return wire.writer(request.remote, "remote")


def _num_exposed(event: Reserved) -> int:
    """Pages that the writer itself writes into; over ZMQ this worker places arriving bytes."""
    reservation = event.reservation
    return 0 if reservation.connector == "zmq" else len(reservation.pages)


def make_role() -> Role:
    """The parts of a front that belong to a decode worker."""

    def add(shell: Shell, server: grpc.aio.Server) -> None:
        pb_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(shell), server)

    return Role(
        name="decode",
        engine_module="effuse.decode_worker.build",
        services={"decode": "effuse.v1.DecodeService"},
        add=add,
    )
