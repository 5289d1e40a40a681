"""PrefillService: a prompt in, then the reservation on the same stream; computed and pushed out.

Computing begins immediately, and only the push waits for the reservation. However a stream ends,
its attempt ends in the engine.

Beside the requests, rehearsals warm up the link to every decode worker and measure it: handoffs of
free pages. The first ones connect and initialise everything that prompts use: a link carries
prompts after them. Another one is timed, and repeated when both ends are idle. A peer that refuses
or leaves is tried again later, at no cost to this worker. `links.py` describes links.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio

from effuse.placement.records import FEW_PAGES, WorkerRecord
from effuse.prefill_worker.links import Links, LinkState, is_idle, line_of
from effuse.protos.channels import calling, decode_stub, filled
from effuse.protos.errors import (
    Bug,
    EffuseError,
    InvalidRequest,
    Overloaded,
    PeerLost,
    Unreserved,
)
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
    PushRehearsal,
    PushTo,
    ReceiverGone,
    StartPrefill,
)
from effuse.worker.shell import Shell

LOG = logging.getLogger(__name__)

LOOK_S = 0.2  # seconds between lookups of the live workers
PUBLISH_S = 1.0  # seconds between looks at what is known of all links
CALL_S = 20.0  # time limit of one rehearsal
LEAST_SHARE = 8  # of our pool: at most one page in this many
AT_ONCE = 4  # cold links that are warmed up in parallel, because a peer may stall

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


class Rehearsals:
    """Rehearsals of one front. Writes results to `shell.links`, and then calls `changed`."""

    def __init__(
        self,
        shell: Shell,
        workers: Callable[[], Sequence[WorkerRecord]],
        changed: Callable[[], None],
        look: Callable[[str], Awaitable[WorkerRecord | None]] | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`workers` returns all live workers, including draining ones, and the same list as long as
        none changes. `look` returns one with its load, if those have none."""
        self._shell = shell
        self._workers = workers
        self._changed = changed
        self._look = look
        self._now = now
        self._publish_at = 0.0
        self._links = Links(random.random, shell.min_handoff_gbps)
        shell.warms_links = True
        shell.saw_handoff = self._saw_handoff

    async def run(self) -> None:
        """Rehearses until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(AT_ONCE):
                tasks.create_task(self._run(only_cold=number > 0))

    async def _run(self, *, only_cold: bool) -> None:
        while True:
            while await self.turn(only_cold=only_cold):
                pass
            await asyncio.sleep(LOOK_S)

    async def turn(self, *, only_cold: bool = False) -> bool:
        """Rehearses with a decode worker that is due; False if none is."""
        own = self._shell.record()
        if own is None or own.state != "ready":
            return False
        for one in self._links.follow(own, self._workers(), self._now()):
            self._shell.supervisor.send(ReceiverGone(incarnation=one.incarnation), own.incarnation)
        if own.incarnation not in self._shell.links or self._now() >= self._publish_at:
            self._publish(own)  # also what was too long ago
        link = self._links.next(self._now(), only_cold=only_cold, may_measure=is_idle(own))
        if link is None:
            return False
        link.is_under_way = True
        try:
            if await self._may_visit(link):
                await self._visit(own, link)
            else:
                link.put_off(self._now())
        except (EffuseError, TimeoutError) as error:
            pause_s = link.failed(self._now())
            text = "it took too long" if isinstance(error, TimeoutError) else str(error)
            LOG.info(
                "handoff %s to %s: not measured, next try in %.1f s: %s",
                *(own.worker_id, link.peer.worker_id, pause_s, text),
            )
        finally:
            link.is_under_way = False
        self._publish(own)
        return True

    async def _may_visit(self, link: LinkState) -> bool:
        """Whether the link has to be rehearsed, or its other end is idle."""
        if self._look is None or not link.is_fine(self._now()):
            return True
        peer = await self._look(link.peer.worker_id)
        return peer is not None and is_idle(peer)

    def _saw_handoff(self, incarnation: str, num_bytes: int, seconds: float) -> None:
        if self._links.proven(incarnation, num_bytes, seconds, self._now()):
            self._publish_at = 0.0

    def _publish(self, own: WorkerRecord) -> None:
        self._publish_at = self._now() + PUBLISH_S
        before = self._shell.links.get(own.incarnation, ())
        known = self._links.known(self._now())
        self._shell.links = {own.incarnation: known}
        if known != before:
            self._changed()

    async def _visit(self, own: WorkerRecord, link: LinkState) -> None:
        """Warms a cold link up, then measures it. Raises EffuseError or TimeoutError."""
        peer, is_fallback = link.peer, False
        if own.has_connector_of(peer):
            most_pages = max(1, own.capacity.total_pages // LEAST_SHARE)
            async with self._shell.access.connect(peer.address) as channel:
                await channel.prove()
                stub = decode_stub(channel)
                if not link.transport:
                    await self._warm_up(stub, own, link, most_pages)
                pushed = await self._rehearse(stub, own, peer, most_pages)
            rate, is_fallback = pushed.bytes / max(pushed.push_s, 1e-9), pushed.is_fallback
            link.measured(pushed.transport, rate, pushed.bytes, self._now())
        else:
            link.refused(f"{own.connector} here, {peer.connector} there", self._now())
        if (news := link.news(self._now())) is not None:
            LOG.log(*line_of(own.worker_id, news, own.min_handoff_gbps, is_fallback=is_fallback))

    async def _warm_up(
        self,
        stub: pb_grpc.DecodeServiceAsyncStub,
        own: WorkerRecord,
        link: LinkState,
        most_pages: int,
    ) -> None:
        """Few pages, whole and by groups of layers, then as many as possible, like large prompts.

        Few pages go as often as the peer has ranks, each of which may be a replica with its own
        pool: these take turns. A peer lends many only while nothing waits there; prompts do not
        wait for that.
        """
        peer, few = link.peer, min(FEW_PAGES, most_pages)
        for number in range(2 * peer.capacity.ranks):
            in_groups = number >= peer.capacity.ranks
            pushed = await self._rehearse(stub, own, peer, few, in_groups=in_groups)
        try:
            if few < most_pages:
                pushed = await self._rehearse(stub, own, peer, most_pages, in_groups=True)
        except Overloaded as error:
            LOG.debug("%s cannot lend enough pages now: %s", peer.worker_id, error)
        rate = pushed.bytes / max(pushed.moved_s, pushed.push_s, 1e-9)
        link.warmed(pushed.transport, rate, self._now())
        self._publish(own)

    async def _rehearse(
        self,
        stub: pb_grpc.DecodeServiceAsyncStub,
        own: WorkerRecord,
        peer: WorkerRecord,
        most_pages: int,
        *,
        in_groups: bool = False,
    ) -> PromptPushed:
        """One handoff of free pages. Raises EffuseError or TimeoutError."""
        name = secrets.token_hex(16)
        request = pb.RehearseRequest(
            attempt=pb.AttemptId(request_id=f"rehearsal-{name}", attempt=1, transfer_id=name),
            incarnation=peer.incarnation,
            writer=filled(pb.WorkerRef, own),
            most_pages=most_pages,
        )
        call = stub.Rehearse(request, timeout=CALL_S)
        try:
            async with asyncio.timeout(CALL_S):
                first = await _next(call, peer.worker_id)
                reserved = wire.reservation(first.reservation)
                if reserved.transfer_id != name or len(reserved.pages) > request.most_pages:
                    raise InvalidRequest.of("reservation", "not the answer to this rehearsal")
                push = PushRehearsal(reservation=reserved, in_groups=in_groups)
                pushed = await self._push(push, own.incarnation)
                await _next(call, peer.worker_id)
                if self._links.own != own.incarnation:
                    raise PeerLost("another engine runs at this address now")
                return pushed
        finally:
            call.cancel()

    async def _push(self, push: PushRehearsal, incarnation: str) -> PromptPushed:
        shell = self._shell
        attempt = shell.begin(push.reservation.attempt, incarnation, push)
        try:
            event = await attempt.next_event()
            if isinstance(event, Failed):
                raise to_error(event)
            if not isinstance(event, PromptPushed):
                raise Bug(f"a rehearsal sent {type(event).__name__}")
            shell.attempts.close(attempt)
            return event
        finally:
            shell.leave(attempt)


async def _next(
    call: grpc.aio.UnaryStreamCall[pb.RehearseRequest, pb.RehearseResponse], peer: str
) -> pb.RehearseResponse:
    with calling(peer):
        response = await call.read()
    if not isinstance(response, pb.RehearseResponse):
        raise PeerLost(f"{peer} ended its call before the pages were checked")
    return response


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
