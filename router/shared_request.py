"""One request as the other routers know it: claimed before it runs, placed, ended with its answer.

A client whose router died asks another one under the same id. That router returns the answer that
is kept, or runs the request again, which gives the same answer, unless a live router still runs it.
Only ids that clients choose are claimed, because no client can repeat other ids. A request waits
for Redis only here, and one that is asked for the first time goes on without it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from google.protobuf.message import DecodeError

from effuse.placement.records import (
    MalformedRecord,
    PlacedOn,
    PlacementRecord,
    PlacementState,
    WorkerRecord,
    decode_placement,
)
from effuse.placement.store import Claim, Store, StoreFull, StoreUnavailable
from effuse.placement.writer import PlacementWriter
from effuse.protos.errors import AlreadyRunning, Unavailable
from effuse.router.client import Listener, Recipient, WholeAnswer
from effuse.router.policy import Placement
from effuse.router.request import Request
from effuse.router.request_states import State
from effuse.router.tenants import Tenant
from effuse.v1 import generation_pb2 as pb

LOG: Final = logging.getLogger(__name__)
LOOK_S: Final = 0.1
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
    """One per request that is served. It passes the answer on to `client`."""

    def __init__(self, sharing: Sharing, request: Request, client: Recipient) -> None:
        self._sharing = sharing
        self._request = request
        self._client = client
        self._record: PlacementRecord | None = None  # of the claim, then of the last attempt
        # Redis has had the claim, or may have had it unheard: what another router has put there
        # since then stays.
        self._is_claimed = False
        self._said = WholeAnswer()

    # Its owner.

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
                claim = await self._sharing.store.claim(
                    record, request.asked_digest, self._sharing.placements.times.running_s
                )
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
        try:
            router_id = decode_placement(value).router_id
        except MalformedRecord:
            router_id = "unknown"
        address = self._sharing.address_of(router_id)
        return AlreadyRunning(
            f"the request {self._request.id!r} is running at {router_id} ({address or 'unknown'})",
            labels={"router": router_id, "address": address},
        )

    # Its place.

    def begin_attempt(self, placement: Placement, transfer_id: str) -> None:
        """Records the workers of another attempt; of several answers, only those of the first."""
        prefill = placement.prefill
        self._record = msgspec.structs.replace(
            self._first_record(),
            attempt=self._request.parts[0].attempts.count,
            transfer_id=transfer_id,
            decode=_placed_on(placement.decode),
            prefill=None if prefill is None else _placed_on(prefill),
            prompt_tokens=len(self._request.prompt.token_ids),
        )
        self._write(self._record)

    def send(self, event: pb.GenerateStreamResponse) -> Awaitable[None]:
        """Sends an event to the client, and keeps final parts for other routers."""
        if self._is_kept:
            self._said.take(event)
        return self._client.send(event)

    # Its end.

    def end(self, last: pb.GenerateStreamResponse | None) -> None:
        """The request is over; `last` is the client's last event at a good end."""
        if self._record is None:
            return
        request = self._request
        record = msgspec.structs.replace(
            self._record,
            state=_STATES.get(request.answer.state, "failed"),
            num_tokens=request.num_tokens,
        )
        self._record = None
        if last is None or not self._is_kept:
            self._write(record)
            return
        self._said.take(last)
        said = self._said.response(request.id)
        self._write(record, said if said.ByteSize() <= MOST_BYTES else None)

    @property
    def _is_kept(self) -> bool:
        return bool(self._request.asked_digest and self._sharing.keep_answers_s)

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


def digest_of_asked(message: pb.GenerateRequest, tenant: Tenant) -> str:
    """A digest of a request as it was sent: the same only if its own tenant sends it again."""
    owner = tenant.name.encode() + b"\0"
    return hashlib.sha256(owner + message.SerializeToString(deterministic=True)).hexdigest()
