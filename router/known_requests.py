"""Requests by their ids: those that run here, for a while those that ended, and other routers'.

Refuses an id that is running. Of a request that ended only its description is kept. Redis knows the
requests of other routers, also those that ended badly here before."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from effuse.placement.records import MalformedRecord, PlacementRecord, decode_placement
from effuse.placement.store import StoreUnavailable
from effuse.protos.errors import AlreadyRunning, NotFound, Unavailable
from effuse.router.client import describe
from effuse.router.request import AnyRequest, Request
from effuse.router.shared_request import Sharing
from effuse.v1 import generation_pb2 as pb

LOG: Final = logging.getLogger(__name__)
REMEMBERED_S: Final = 300.0
MOST_REMEMBERED: Final = 4096

_STORED_STATES: Final = {
    "running": pb.REQUEST_STATE_RUNNING,
    "finished": pb.REQUEST_STATE_FINISHED,
    "failed": pb.REQUEST_STATE_FAILED,
    "cancelled": pb.REQUEST_STATE_CANCELLED,
}


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The description of a request that ended."""

    until: float
    tenant: str
    described: pb.GetRequestResponse
    asked_digest: str


class KnownRequests:
    """One per router. `now` is a monotonic clock in seconds."""

    def __init__(self, sharing: Sharing, now: Callable[[], float]) -> None:
        self.sharing = sharing
        self._now = now
        self._running: dict[str, AnyRequest] = {}
        self._limits: dict[str, asyncio.Timeout] = {}  # by request id
        self.is_cut_off = False
        self.idle = asyncio.Event()
        """Set while no request is queued or on workers."""
        self.idle.set()
        self._ended: OrderedDict[str, EndedRequest] = OrderedDict()

    @property
    def num_running(self) -> int:
        """Requests that are queued or on workers."""
        return len(self._running)

    def running_now(self) -> list[Request]:
        """Those of them that were checked, oldest first."""
        return [one for one in self._running.values() if isinstance(one, Request)]

    def age_s(self, request: Request) -> float:
        """Seconds since a request came."""
        return self._now() - request.arrived

    def check_id(self, request_id: str) -> None:
        """Raises `AlreadyRunning` where a request has this id."""
        if request_id in self._running:
            raise AlreadyRunning(
                f"a request with id {request_id!r} is already running; choose another id"
            )

    @contextmanager
    def running(self, request: AnyRequest) -> Iterator[None]:
        """Holds the id of `request`; raises `AlreadyRunning` where another request has it."""
        self.check_id(request.id)
        self._running[request.id] = request
        self.idle.clear()
        try:
            yield
        finally:
            del self._running[request.id]
            if not self._running:
                self.idle.set()
            if isinstance(request, Request) and not request.is_anothers:
                self._remember(request)

    @contextmanager
    def limited_by(self, request: AnyRequest, limit: asyncio.Timeout) -> Iterator[None]:
        """`cut_off` and `cancel` end a request that runs here by its own limit."""
        self._limits[request.id] = limit
        if self.is_cut_off:
            self._end(limit)
        try:
            yield
        finally:
            del self._limits[request.id]

    def cut_off(self) -> None:
        """Ends the time of all requests now, and of those that may come."""
        self.is_cut_off = True
        for limit in self._limits.values():
            self._end(limit)

    def cancel(self, request_id: str, tenant: str = "") -> bool:
        """Ends the time of a tenant's request now; False if none of this id runs here."""
        limit = self._limits.get(request_id)
        if limit is None or self._running[request_id].tenant.name != tenant:
            return False
        self._running[request_id].is_ended_by_id = True
        self._end(limit)
        return True

    def find(self, request_id: str, tenant: str = "") -> pb.GetRequestResponse | None:
        """A tenant's request that runs here or ended a short while ago."""
        request = self._running.get(request_id)
        if request is not None:
            return describe(request) if request.tenant.name == tenant else None
        self._forget_old()
        held = self._ended.get(request_id)
        return None if held is None or held.tenant != tenant else held.described

    async def look_up(self, request_id: str, tenant: str = "") -> pb.GetRequestResponse:
        """A tenant's request, with its answer if it is kept; raises `NotFound` or `Unavailable`."""
        if (described := self.find(request_id, tenant)) is None:
            record = await self._stored(request_id, tenant)
            return await self._add_answer(_describe_stored(record), record.asked)
        ended = None if request_id in self._running else self._ended.get(request_id)
        digest = "" if ended is None else ended.asked_digest
        if digest and described.state != pb.REQUEST_STATE_FINISHED:
            with suppress(NotFound, Unavailable):
                record = await self._stored(request_id, tenant)
                if self._was_asked_elsewhere(record, digest):
                    described = _describe_stored(record)
        return await self._add_answer(described, digest)

    async def _stored(self, request_id: str, tenant: str) -> PlacementRecord:
        try:
            stored = await self.sharing.store.placement(request_id)
            if stored is not None and (record := decode_placement(stored)).tenant == tenant:
                return record
        except StoreUnavailable as error:
            text = "requests of other routers cannot be looked up now"
            raise Unavailable(text, retry_after_s=1.0) from error
        except MalformedRecord:
            LOG.warning("the stored placement of %s is malformed", request_id)
        raise NotFound(f"no request {request_id!r} is running or ended recently")

    def _was_asked_elsewhere(self, record: PlacementRecord, digest: str) -> bool:
        """Whether another router runs, or has answered, what ended badly here: its client may have
        asked there again."""
        is_theirs = record.router_id != self.sharing.router_id and record.asked == digest
        return is_theirs and record.state in ("running", "finished")

    async def _add_answer(
        self, described: pb.GetRequestResponse, digest: str
    ) -> pb.GetRequestResponse:
        """Adds the kept answer of a request that ended well."""
        if described.state != pb.REQUEST_STATE_FINISHED or not digest:
            return described
        try:
            kept = await self.sharing.kept(described.request_id, digest)
        except StoreUnavailable as error:
            LOG.debug("kept answers cannot be looked up: %s", error)
            return described
        found = pb.GetRequestResponse(answer=kept)
        found.MergeFrom(described)
        return found

    def _end(self, limit: asyncio.Timeout) -> None:
        if not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())

    def _remember(self, request: Request) -> None:
        self._ended.pop(request.id, None)
        until = self._now() + REMEMBERED_S
        self._ended[request.id] = EndedRequest(
            until, request.tenant.name, describe(request), request.asked_digest
        )
        self._forget_old()

    def _forget_old(self) -> None:
        now = self._now()
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if oldest.until > now and len(self._ended) <= MOST_REMEMBERED:
                return
            del self._ended[oldest.described.request_id]


def _describe_stored(record: PlacementRecord) -> pb.GetRequestResponse:
    state = _STORED_STATES[record.state]
    if record.state == "running" and record.decode is None:
        state = pb.REQUEST_STATE_QUEUED
    return pb.GetRequestResponse(
        request_id=record.request_id,
        state=state,
        attempt=record.attempt,
        prefill_worker=record.prefill.worker_id if record.prefill else "",
        decode_worker=record.decode.worker_id if record.decode else "",
        status="OK" if record.state == "finished" else "",
        router=record.router_id if record.state == "running" else "",
    )
