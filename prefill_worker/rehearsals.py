"""Measures the way to every decode worker by a rehearsal: a handoff of free pages, twice.

The first one connects, the second one is timed. Runs beside the requests, one rehearsal at a time;
a peer that refuses, or goes away, is tried again later and costs nothing here. Which ways are known
and which is next is a table of values, with the time and the jitter handed in.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import grpc.aio

from effuse.placement.records import MOST_LINKS, Link, WorkerRecord
from effuse.protos.errors import Bug, EffuseError, InvalidRequest, PeerLost, from_rpc_error
from effuse.protos.stubs import decode_stub
from effuse.v1 import worker_pb2 as pb
from effuse.v1 import worker_pb2_grpc as pb_grpc
from effuse.worker import wire
from effuse.worker.attempts import OpenAttempt, to_error
from effuse.worker.messages import Failed, PromptPushed, PushRehearsal
from effuse.worker.shell import Shell

LOG = logging.getLogger(__name__)

FIRST_S = 1.0  # to the next try after one that failed, or that found the link too slow
MOST_S = 60.0
LOOK_S = 0.5  # between looks at who is there
CALL_S = 20.0  # longest that one of both handoffs may take
LEAST_SHARE = 8  # of our pool: no more than one page in so many


@dataclass(frozen=True, slots=True)
class LinkState:
    """What is known of the way to one life of a decode worker."""

    peer: WorkerRecord
    due_at: float  # when it is measured; infinite where that was done
    link: Link | None = None
    tries: int = 0  # that failed or found it too slow


class Links:
    """All ways of one prefill worker. Times are seconds of any one monotonic clock."""

    def __init__(self, jitter: Callable[[], float], min_gbps: float = 0.0) -> None:
        """`jitter` gives numbers in [0, 1); a link below `min_gbps` is measured again."""
        self._jitter = jitter
        self._min_gbps = min_gbps
        self._own = ""  # the life that measures
        self._links: dict[str, LinkState] = {}  # by worker id

    def follow(self, own: WorkerRecord, seen: Sequence[WorkerRecord], now: float) -> None:
        """Takes in who is there: `seen` are all workers, at most MOST_LINKS of whom are followed.

        Decode workers of our fingerprint are due at once; what another life of ours or of theirs
        was measured at is forgotten.
        """
        before = self._links if self._own == own.incarnation else {}
        self._own, self._links = own.incarnation, {}
        fitting = [r for r in seen if r.role == "decode" and r.fingerprint == own.fingerprint]
        for peer in fitting[:MOST_LINKS]:
            way = before.get(peer.worker_id)
            if way is None or way.peer.incarnation != peer.incarnation:
                way = LinkState(peer, now)
            self._links[peer.worker_id] = replace(way, peer=peer)

    def next(self, now: float) -> WorkerRecord | None:
        """Whom to measure now; None while nobody is due."""
        due = [
            way for way in self._links.values() if way.peer.state == "ready" and way.due_at <= now
        ]
        return min(due, key=self._turn).peer if due else None

    def link_to(self, peer: WorkerRecord) -> Link | None:
        """What is known of the way to this life of a decode worker."""
        way = self._find(peer)
        return None if way is None else way.link

    def known(self) -> tuple[Link, ...]:
        """All that was measured."""
        return tuple(way.link for way in self._links.values() if way.link is not None)

    def measured(self, peer: WorkerRecord, link: Link, now: float) -> None:
        """Takes note of a rate. One that is too slow may have had a bad moment: it is due again."""
        way = self._find(peer)
        if way is None:
            return
        if link.gigabytes_per_second < self._min_gbps:
            self._links[peer.worker_id] = replace(self._later(way, now), link=link)
        else:
            self._links[peer.worker_id] = LinkState(way.peer, float("inf"), link)

    def failed(self, peer: WorkerRecord, now: float) -> float:
        """Takes note of a try that gave no rate; seconds until the next one."""
        way = self._find(peer)
        if way is None:
            return 0.0
        later = self._links[peer.worker_id] = self._later(way, now)
        return later.due_at - now

    def _find(self, peer: WorkerRecord) -> LinkState | None:
        way = self._links.get(peer.worker_id)
        return way if way is not None and way.peer.incarnation == peer.incarnation else None

    def _later(self, way: LinkState, now: float) -> LinkState:
        pause_s = min(FIRST_S * 2.0 ** min(way.tries, 32), MOST_S)
        return replace(way, due_at=now + pause_s * (0.5 + self._jitter()), tries=way.tries + 1)

    def _turn(self, way: LinkState) -> tuple[float, int]:
        """Workers that start together begin with different peers."""
        return way.due_at, zlib.crc32(f"{self._own} {way.peer.worker_id}".encode())


class LiveWorkers(Protocol):
    """Who is alive; placement.fleet.FleetView is one."""

    def workers(self) -> Sequence[WorkerRecord]:
        """Live workers, draining ones included."""


class Rehearsals:
    """Those of one front. Writes what it finds to `shell.links`, and calls `changed` then."""

    def __init__(
        self,
        shell: Shell,
        view: LiveWorkers,
        changed: Callable[[], None],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shell = shell
        self._view = view
        self._changed = changed
        self._now = now
        self._links = Links(random.random, shell.min_handoff_gbps)

    async def run(self) -> None:
        """Measures until cancelled."""
        while True:
            while await self.turn():
                pass
            await asyncio.sleep(LOOK_S)

    async def turn(self) -> bool:
        """Measures whoever is due; False where nobody is."""
        own = self._shell.record()
        if own is None or own.state != "ready":
            return False
        self._links.follow(own, self._view.workers(), self._now())
        self._publish(own)
        peer = self._links.next(self._now())
        if peer is None:
            return False
        try:
            found = await self._measure(own, peer)
        except (EffuseError, TimeoutError) as error:
            pause_s = self._links.failed(peer, self._now())
            text = "it took too long" if isinstance(error, TimeoutError) else str(error)
            LOG.info(
                "handoff %s to %s: not measured, next try in %.0f s: %s",
                *(own.worker_id, peer.worker_id, pause_s, text),
            )
        else:
            self._note_link(own, peer, *found)
            self._publish(own)
            self._changed()
        return True

    def _note_link(
        self, own: WorkerRecord, peer: WorkerRecord, link: Link, is_fallback: bool
    ) -> None:
        before = self._links.link_to(peer)
        self._links.measured(peer, link, self._now())
        least = own.min_handoff_gbps
        was_slow = before is not None and before.gigabytes_per_second < least
        is_slow = link.gigabytes_per_second < least
        if before is None or was_slow != is_slow:
            tell(own.worker_id, link, least, is_fallback=is_fallback)

    def _publish(self, own: WorkerRecord) -> None:
        self._shell.links = {own.incarnation: self._links.known()}

    async def _measure(self, own: WorkerRecord, peer: WorkerRecord) -> tuple[Link, bool]:
        """The link, and whether it is slow by nobody's wish. Raises EffuseError or TimeoutError."""
        if not own.has_connector_of(peer):
            ways = f"{own.connector} here, {peer.connector} there"
            return Link(peer.worker_id, peer.incarnation, ways, 0.0), False
        async with self._shell.access.connect(peer.address) as channel:
            await channel.prove()
            stub = decode_stub(channel)
            await self._rehearse(stub, own, peer)
            pushed = await self._rehearse(stub, own, peer)
        rate = pushed.bytes / max(pushed.push_s, 1e-9)
        link = Link(peer.worker_id, peer.incarnation, pushed.transport, rate)
        return link, pushed.is_fallback

    async def _rehearse(
        self, stub: pb_grpc.DecodeServiceAsyncStub, own: WorkerRecord, peer: WorkerRecord
    ) -> PromptPushed:
        """One handoff of free pages. Raises EffuseError or TimeoutError."""
        name = secrets.token_hex(16)
        request = pb.RehearseRequest(
            attempt=pb.AttemptId(request_id=f"rehearsal-{name}", attempt=1, transfer_id=name),
            incarnation=peer.incarnation,
            writer=pb.WorkerRef(
                worker_id=own.worker_id,
                incarnation=own.incarnation,
                address=own.address,
                engine_port=own.engine_port,
                place=own.place,
            ),
            most_pages=max(1, own.capacity.total_pages // LEAST_SHARE),
        )
        call = stub.Rehearse(request, timeout=CALL_S)
        try:
            async with asyncio.timeout(CALL_S):
                first = await _next(call, peer.worker_id)
                reserved = wire.reservation(first.reservation)
                if reserved.transfer_id != name or len(reserved.pages) > request.most_pages:
                    raise InvalidRequest.of("reservation", "not what was asked for")
                push = PushRehearsal(reservation=reserved)
                pushed = await self._push(push, own.incarnation)
                await _next(call, peer.worker_id)
                return pushed
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, peer.worker_id) from error
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
                raise Bug(f"a rehearsal gave {type(event).__name__}")
            shell.attempts.close(attempt)
            return event
        finally:
            if attempt.engine_gone:
                shell.attempts.close(attempt)
            elif not attempt.ended.is_set():
                shell.spawn(self._end(attempt))

    async def _end(self, attempt: OpenAttempt) -> None:
        try:
            await self._shell.end_in_engine(attempt, "the rehearsal ended")
        finally:
            self._shell.attempts.close(attempt)


def tell(own: str, link: Link, min_gbps: float, *, is_fallback: bool) -> None:
    """Logs what a link is; loudly where it is slow by nobody's wish, or refused."""
    found = f"handoff {own} to {link.peer}: {link.transport}, {link.gigabytes_per_second:.4g} GB/s"
    if not link.bytes_per_second:
        LOG.warning("%s: REFUSED, --connector has to be the same at both", found)
    elif link.gigabytes_per_second < min_gbps:
        LOG.warning("%s: REFUSED, --min-handoff-gbps asks for %.10g", found, min_gbps)
    elif is_fallback:
        LOG.warning(
            "%s: SLOW, pages of GPUs go over TCP or through the host's memory. Look at UCX_TLS; "
            "--min-handoff-gbps refuses such a link, --connector zmq says that it is meant so",
            found,
        )
    else:
        LOG.info("%s", found)


async def _next(
    call: grpc.aio.UnaryStreamCall[pb.RehearseRequest, pb.RehearseResponse], peer: str
) -> pb.RehearseResponse:
    try:
        response = await call.read()
    except asyncio.CancelledError:  # of the call, where nobody cancels us
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PeerLost(f"{peer} broke off the call") from None
    if not isinstance(response, pb.RehearseResponse):
        raise PeerLost(f"{peer} ended its call before the pages were checked")
    return response
