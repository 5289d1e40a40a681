"""Redis's records of requests: their routers, and kept answers.

As placement/claim.lua, place.lua and keep.lua have it; lists and limits are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from effuse.placement.records import PlacementRecord, encode
from effuse.placement.store import Claim, Placing, StoreUnavailable
from effuse.router.seats import LEASE_S

from .fleet import REDIS, Registry
from .network import LATENCY_S

PATIENCE_S = 0.3  # for an answer of Redis


@dataclass(slots=True)
class Held:
    """A placement."""

    record: PlacementRecord
    until: float


@dataclass(slots=True)
class Claims:
    """One per fleet."""

    registry: Registry
    placements: dict[str, Held] = field(default_factory=dict)
    answers: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)  # of routers: until when

    def forget(self) -> None:
        """Redis was emptied."""
        for held in (self.placements, self.answers, self.leases):
            held.clear()

    def other(self, request_id: str, router_id: str) -> Held | None:
        """Another router's placement of a running request, with a valid lease."""
        now, held = self.registry.clock.now, self.placements.get(request_id)
        if held is None or held.until <= now or held.record.state != "running":
            return None
        is_live = self.leases.get(held.record.router_id, 0.0) > now
        return held if is_live and held.record.router_id != router_id else None


class ClaimStore:
    """One router's way to it; replaces a placement.store.Store."""

    def __init__(self, claims: Claims, host: str) -> None:
        self._claims = claims
        self._host = host

    async def claim(self, record: PlacementRecord, digest: str, lifetime_s: float) -> Claim:
        """The id, its answer, or its router. Raises StoreUnavailable."""
        await self._trip()
        claim = self._claim(record, digest, lifetime_s)
        await self._trip()
        return claim

    async def place(
        self, placements: Sequence[tuple[PlacementRecord, float]], held: Collection[str] = ()
    ) -> list[Placing]:
        """Writes placements. Raises StoreUnavailable."""
        await self._trip()
        told = [
            self._place(one, lifetime_s, one.request_id in held) for one, lifetime_s in placements
        ]
        await self._trip()
        return told

    def _place(self, record: PlacementRecord, lifetime_s: float, is_held: bool) -> Placing:
        held = self._claims.placements.get(record.request_id)
        never_ran = record.attempt == 0 and record.state != "running"
        if self._is_lost(record.request_id, record.router_id, is_held, never_ran):
            return "duplicate"
        older = None if held is None or held.record.state != "running" else held.record
        if older and older.router_id == record.router_id and older.attempt > record.attempt:
            return "stale"
        self._put(record, lifetime_s)
        return "placed"

    def _is_lost(
        self, request_id: str, router_id: str, is_held: bool, never_ran: bool = False
    ) -> bool:
        """To another router that runs it or, if the id was held, has ended it; to any, if it never
        ran here.
        """
        if self._claims.other(request_id, router_id) is not None:
            return True
        held = self._claims.placements.get(request_id)
        if held is None or held.until <= self._claims.registry.clock.now:
            return False
        has_ended = is_held and held.record.state != "running"
        return held.record.router_id != router_id and (has_ended or never_ran)

    async def keep_answer(
        self, request_id: str, digest: str, response: bytes, keep_s: float, holder: str = ""
    ) -> None:
        """Keeps an answer. Raises StoreUnavailable."""
        await self._trip()
        if not holder or not self._is_lost(request_id, holder, True):
            self._claims.answers[request_id] = digest, response
        await self._trip()

    def renew(self, router_id: str) -> None:
        """Renews a router's lease if Redis is there."""
        registry = self._claims.registry
        if registry.answers(self._host):
            self._claims.leases[router_id] = registry.clock.now + LEASE_S

    def _claim(self, record: PlacementRecord, digest: str, lifetime_s: float) -> Claim:
        claims = self._claims
        other = claims.other(record.request_id, record.router_id)
        if other is not None:
            lease_s = claims.leases[other.record.router_id] - claims.registry.clock.now
            return Claim(elsewhere=encode(other.record), lease_s=lease_s)
        kept = claims.answers.get(record.request_id)
        if kept is not None and kept[0] == digest:
            return Claim(response=kept[1])
        held, earlier = claims.placements.get(record.request_id), None
        is_running = held is not None and held.record.state == "running"
        if held is not None and is_running and held.record.router_id != record.router_id:
            earlier = encode(held.record)  # of a router that is gone
        self._put(record, lifetime_s)
        return Claim(earlier=earlier)

    def _put(self, record: PlacementRecord, lifetime_s: float) -> None:
        until = self._claims.registry.clock.now + lifetime_s
        self._claims.placements[record.request_id] = Held(record, until)

    async def _trip(self) -> None:
        """One way. Messages that did not arrive, or got no answer, are abandoned after a while."""
        registry = self._claims.registry
        await asyncio.sleep(registry.clock.draw.uniform(*LATENCY_S))
        if not registry.answers(self._host):
            await asyncio.sleep(PATIENCE_S)
            raise StoreUnavailable(f"{REDIS} does not answer {self._host}")
