"""Requests by their ids: those that run here, for a while those that ended, and other routers'.

The other routers know a request as claimed before it runs, placed, and ended with its answer. A
client whose router died repeats its id at another one. That router returns the answer that
is kept, or runs the request again, which gives the same answer, unless a live router still runs it.
Only ids that clients choose are claimed, because no client can repeat other ids. A request waits
for Redis only here, and one that is asked for the first time goes on without it. Of a request that
ended only its description is kept here. Redis knows those that ended badly here before."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError
from msgspec import structs

from effuse.client.answer import WholeAnswer
from effuse.placement.records import (
    MalformedRecord,
    PlacedOn,
    PlacementRecord,
    PlacementState,
    WorkerRecord,
    decode_placement,
)
from effuse.placement.store import Claim, Store, StoreFull, StoreUnavailable
from effuse.placement.writer import RUNNING_S, PlacementWriter
from effuse.protos.errors import AlreadyRunning, NotFound, Unavailable
from effuse.router.client import STATES, Listener, Send, describe
from effuse.router.policy import Placement
from effuse.router.request import AnyRequest, Request
from effuse.router.request_states import State
from effuse.v1 import generation_pb2 as pb

LOG: Final = logging.getLogger(__name__)
LOOK_S: Final = 0.1
REMEMBERED_S: Final = 300.0
MOST_REMEMBERED: Final = 4096
MOST_BYTES: Final = 1 << 20
"""Of one answer that is kept."""

_STATES: Final[dict[State, PlacementState]] = {
    State.FINISHED: "finished",
    State.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How a router shares requests with the others."""

    router_id: str
    store: Store
    placements: PlacementWriter
    address_of: Callable[[str], str]  # of another router; empty if it is not known
    keep_answers_s: float  # 0 keeps none

    async def kept(self, request_id: str, digest: str) -> pb.GenerateResponse | None:
        """The answer that is kept to the request of `digest`: from here until Redis has it, then
        from Redis. Raises `StoreUnavailable`."""
        found = self.placements.unwritten_answer(request_id, digest)
        if found is None:
            found = await self.store.answer(request_id, digest)
        return read_kept(request_id, found)


def read_kept(request_id: str, response: bytes | None) -> pb.GenerateResponse | None:
    """A kept answer from its stored form; None, and a warning, if that is malformed."""
    try:
        return None if response is None else pb.GenerateResponse.FromString(response)
    except DecodeError:
        LOG.warning("the kept answer of %s is malformed", request_id)
        return None


class SharedRequest(Listener):
    """One per request that is served. It passes the answer on with `send`."""

    def __init__(self, sharing: Sharing, request: Request, send: Send) -> None:
        self._sharing = sharing
        self._request = request
        self._send = send
        self._record: PlacementRecord | None = None  # of the claim, then of the last attempt
        # Redis has had the claim, or may have had it unheard: what another router has put there
        # since then stays.
        self._is_claimed = False
        is_kept = request.asked_digest and sharing.keep_answers_s
        self._whole = WholeAnswer() if is_kept else None

    async def claim(self) -> pb.GenerateResponse | None:
        """Claims the id, or returns the answer that is kept under it.

        Raises `AlreadyRunning` if another live router runs the request, and `Unavailable` if it was
        asked before and its fate cannot be looked up."""
        request = self._request
        if not request.asked_digest:
            return None
        unwritten = self._sharing.placements.unwritten_answer(request.id, request.asked_digest)
        if unwritten is not None:
            return pb.GenerateResponse.FromString(unwritten)
        record, last_s = self._first_record(), -1.0
        while True:
            # Redis may hold it from now on, whatever becomes of the call.
            self._record, self._is_claimed = record, True
            try:
                claim = await self._sharing.store.claim(record, request.asked_digest, RUNNING_S)
            except StoreUnavailable as error:
                is_full = isinstance(error, StoreFull)
                self._is_claimed = not is_full
                if is_full:  # it refuses claims and can still be read
                    with contextlib.suppress(StoreUnavailable):
                        kept = await self._sharing.kept(request.id, request.asked_digest)
                        if kept is not None:
                            self._record = None
                            return kept
                if not request.is_repeated and last_s < 0:
                    return None
                request.is_anothers = True  # for all that we know
                why = f"Redis is {'full' if is_full else 'not reachable'}"
                text = f"the state of this request cannot be looked up now, because {why}"
                raise Unavailable(text, retry_after_s=1.0) from error
            self._record = None  # another's, or kept; else written once more below
            if claim.elsewhere is None:
                break
            if last_s >= 0 and claim.lease_s > last_s:  # renewed since: that router lives
                request.is_anothers = True
                raise self._runs_elsewhere(claim.elsewhere)
            last_s = claim.lease_s
            await asyncio.sleep(LOOK_S)
        return self._settle(claim)

    def _settle(self, claim: Claim) -> pb.GenerateResponse | None:
        if (kept := read_kept(self._request.id, claim.response)) is not None:
            return kept
        if claim.earlier is not None:
            # The router that ran it before may have sent a part of its answer: this one draws the
            # same.
            with contextlib.suppress(MalformedRecord):
                seed = decode_placement(claim.earlier).seed
                self._request.asked = self._request.asked.seeded(seed)
        self._record = self._first_record()
        self._write(self._record)
        return None

    def _runs_elsewhere(self, value: bytes) -> AlreadyRunning:
        router_id = "unknown"
        with contextlib.suppress(MalformedRecord):
            router_id = decode_placement(value).router_id
        address = self._sharing.address_of(router_id)
        return AlreadyRunning(
            f"the request {self._request.id!r} is running at {router_id} ({address or 'unknown'})",
            labels={"router": router_id, "address": address, "field": "request_id"},
        )

    def begin_attempt(self, placement: Placement, transfer_id: str) -> None:
        """Records the workers of another attempt; of several answers, only those of the first."""
        self._record = structs.replace(
            self._first_record(),
            attempt=self._request.parts[0].attempts.count,
            transfer_id=transfer_id,
            decode=_placed_on(placement.decode),
            prefill=placement.prefill and _placed_on(placement.prefill),
            prompt_tokens=len(self._request.prompt.token_ids),
        )
        self._write(self._record)

    def send(self, event: pb.GenerateStreamResponse) -> Awaitable[None]:
        """Sends an event to the client, and keeps final parts for other routers."""
        if self._whole is not None:
            self._whole.take(event)
        return self._send(event)

    def end(self, last: pb.GenerateStreamResponse | None) -> None:
        """The request is over; `last` is the client's last event at a good end."""
        if self._record is None:
            return
        request = self._request
        record = structs.replace(
            self._record,
            state=_STATES.get(request.answer.state, "failed"),
            num_tokens=request.num_tokens,
        )
        self._record = None
        if last is None or self._whole is None:
            self._write(record)
            return
        self._whole.take(last)
        response = self._whole.response(request.id)
        self._write(record, response if response.ByteSize() <= MOST_BYTES else None)

    def _first_record(self) -> PlacementRecord:
        return PlacementRecord(
            request_id=self._request.id,
            attempt=0,
            transfer_id="",
            router_id=self._sharing.router_id,
            state="running",
            model=self._request.asked.model.name,
            seed=self._request.asked.sampling.seed,
            tenant=self._request.tenant.name,
            asked=self._request.asked_digest,
        )

    def _write(self, record: PlacementRecord, answer: pb.GenerateResponse | None = None) -> None:
        """In the order of calls, once the request has gone on its way."""

        def put() -> None:
            placements = self._sharing.placements
            if answer is not None:
                digest, keep_s = self._request.asked_digest, self._sharing.keep_answers_s
                placements.keep(record.request_id, digest, answer.SerializeToString(), keep_s)
            placements.put(record, is_claimed=self._is_claimed)

        asyncio.get_running_loop().call_soon(put)


def _placed_on(record: WorkerRecord) -> PlacedOn:
    return PlacedOn(worker_id=record.worker_id, incarnation=record.incarnation)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    until: float
    tenant: str
    described: pb.GetRequestResponse
    asked_digest: str


class RunningRequest:
    """Holds the id of a request within `with`. A generator would be larger."""

    __slots__ = ("_known", "limit", "request")

    def __init__(self, known: KnownRequests, request: AnyRequest) -> None:
        self._known = known
        self.request = request
        self.limit: asyncio.Timeout | None = None  # of its time

    def __enter__(self) -> RunningRequest:
        self._known.begin(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._known.end(self.request)

    def limit_by(self, limit: asyncio.Timeout) -> None:
        """`cut_off` and `cancel` end the request by this limit, until nothing more is awaited."""
        self.limit = limit
        if self._known.is_cut_off:
            self.end_time()

    def end_time(self) -> None:
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())


class KnownRequests:
    """One per router. `now` is a monotonic clock in seconds."""

    def __init__(self, sharing: Sharing, now: Callable[[], float]) -> None:
        self.sharing = sharing
        self._now = now
        self._running: dict[str, RunningRequest] = {}
        self.is_cut_off = False
        self.idle = asyncio.Event()
        """Set while no request is queued or on workers."""
        self.idle.set()
        self._ended: OrderedDict[str, EndedRequest] = OrderedDict()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def running_now(self) -> list[Request]:
        """Those of them that were checked, oldest first."""
        requests = (one.request for one in self._running.values())
        return [one for one in requests if isinstance(one, Request)]

    def check_id(self, request_id: str) -> None:
        """Raises `AlreadyRunning` if a request has this id."""
        if request_id in self._running:
            raise AlreadyRunning(
                f"a request with id {request_id!r} is already running; choose another id",
                labels={"field": "request_id"},
            )

    def running(self, request: AnyRequest) -> RunningRequest:
        """Raises `AlreadyRunning` on entering if another request has its id."""
        return RunningRequest(self, request)

    def begin(self, one: RunningRequest) -> None:
        self.check_id(one.request.id)
        self._running[one.request.id] = one
        self.idle.clear()

    def end(self, request: AnyRequest) -> None:
        del self._running[request.id]
        if not self._running:
            self.idle.set()
        if isinstance(request, Request) and not request.is_anothers:
            self._ended.pop(request.id, None)
            until = self._now() + REMEMBERED_S
            self._ended[request.id] = EndedRequest(
                until, request.tenant.name, describe(request), request.asked_digest
            )
            self._forget_old()

    def cut_off(self) -> None:
        """Ends the time of all requests now, and of those that may come."""
        self.is_cut_off = True
        for one in self._running.values():
            one.end_time()

    def cancel(self, request_id: str, tenant: str = "") -> bool:
        """Ends the time of a tenant's request now; False if none of this id runs here."""
        one = self._running.get(request_id)
        if one is None or one.limit is None or one.request.tenant.name != tenant:
            return False
        one.request.is_ended_by_id = True
        one.end_time()
        return True

    def find(self, request_id: str, tenant: str = "") -> pb.GetRequestResponse | None:
        if (running := self._running.get(request_id)) is not None:
            return describe(running.request) if running.request.tenant.name == tenant else None
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
            with contextlib.suppress(NotFound, Unavailable):
                record = await self._stored(request_id, tenant)
                # Another router runs, or has answered, what ended badly here.
                is_theirs = record.router_id != self.sharing.router_id and record.asked == digest
                if is_theirs and record.state in ("running", "finished"):
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

    def _forget_old(self) -> None:
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if oldest.until > self._now() and len(self._ended) <= MOST_REMEMBERED:
                return
            del self._ended[oldest.described.request_id]


def _describe_stored(record: PlacementRecord) -> pb.GetRequestResponse:
    state = STATES[record.state]
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
