"""The router's own account of the fleet: its attempts on each worker, and the workers that take
part or are out.

The view of live workers is in `placement/leases.py`, the choice in `policy.py`, known prefixes in
`prefixes.py`, channels in `calls.py`, and the lessons of failed calls in `failures.py`."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Final, get_args

from msgspec.structs import replace

from effuse.placement.leases import FleetView
from effuse.placement.records import Kind, Load, Role, RoutedLoad, WorkerRecord
from effuse.router.calls import Peers
from effuse.router.failures import Standing
from effuse.router.policy import (
    IDLE,
    AttemptNeeds,
    Candidate,
    Condition,
    Fingerprint,
    Holder,
    InFlight,
    Placement,
    PrefillMode,
    Prospect,
    WorkerLife,
    choose_own,
    has_own,
    place,
    prospect,
)
from effuse.router.prefixes import SentPrefixes
from effuse.router.sizes import NO_SIZES, Rooms, Size, Sizes, room_of, round_up

LOG: Final = logging.getLogger(__name__)

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
FEW: Final = 64
"""Workers of which each choice looks at all."""
CHOICES: Final = 8
"""Decode workers that a choice among more draws, and prefill workers for each of their weights. The
best of several keeps loads almost as even as the best of all (Mitzenmacher, The Power of Two
Choices)."""
ROOM_S: Final = 60.0
"""How long the room of a lost worker counts, so that requests wait for it and are not refused."""


class FleetIndex:
    """The workers of a large fleet at one moment, and those that were ready by model, kind and text
    of the fingerprint, or an empty one."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.by_life = {c.record.life: c.record for c in candidates}
        self.ready: dict[tuple[str, Kind, str], list[WorkerRecord]] = {}
        alike: dict[tuple[str, Role, Fingerprint], list[WorkerRecord]] = {}
        for record in (c.record for c in candidates if c.condition is Condition.READY):
            same = record.model.name, record.role, record.fingerprint
            alike.setdefault(same, []).append(record)
        for (model, _, _), records in alike.items():
            first = records[0]
            for kind in KINDS:
                for text in ("", first.fingerprint_text) if first.does(kind) else ():
                    self.ready.setdefault((model, kind, text), []).extend(records)

    def draw(self, model: str, kind: Kind, text: str = "") -> list[WorkerRecord]:
        """`CHOICES` random ones."""
        ready = self.ready.get((model, kind, text), [])
        return random.sample(ready, CHOICES) if len(ready) > CHOICES else ready


class RoutedFleet:
    """One per router, used from its event loop. `now` is a monotonic clock in seconds; `seats`:
    how many requests we may have on a decode worker, by default all that it takes."""

    def __init__(
        self,
        view: FleetView,
        mode: PrefillMode,
        now: Callable[[], float],
        *,
        by_pool: bool = False,
        seats: Callable[[WorkerRecord], int] | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._seats, self._now = seats, now
        self.peers = Peers(now) if peers is None else peers
        self.view = view
        self.mode: Final[PrefillMode] = mode  # the role that prefills
        self._by_pool = by_pool
        self.standing = Standing(now)
        self.prompts = SentPrefixes(now)
        self._in_flight: dict[WorkerLife, InFlight] = {}
        self._kept: dict[WorkerLife, Holder] = {}  # workers that run nothing else
        self._held: dict[WorkerLife, WorkerRecord] = {}  # by open attempts
        self._seen: dict[WorkerLife, tuple[Role, Condition]] = {}
        self._changed = asyncio.Event()
        self._waiting_for: dict[Hashable, Prospect] = {}  # of needs that were looked for just now
        self.index: FleetIndex | None = None  # of a large fleet, at the last look
        self._last: dict[str, tuple[WorkerRecord, float]] = {}  # by worker id, and when it was seen
        self._rooms: dict[tuple[str, Kind], set[Size]] = {}  # of these, at the last look
        self._freed: deque[WorkerLife] = deque(maxlen=CHOICES)  # that a request has just left

    def records(self) -> Sequence[WorkerRecord]:
        """Every worker that lives or may come back."""
        alive, absent = self.view.workers(), self.standing.absent
        if absent:
            names = {record.worker_id for record in alive}
            alive = [*alive, *(record for record in absent if record.worker_id not in names)]
        if not self.standing.knows_roles:
            return alive
        return [self.standing.with_role(record) for record in alive]

    def candidates(self) -> list[Candidate]:
        """The same workers, with our account of them."""
        suspects = self.standing.suspects()
        return [self._candidate(record, suspects) for record in self.records()]

    def need(
        self, model: str, *, on_decode_only: bool = False, sizes: Sizes = NO_SIZES
    ) -> AttemptNeeds:
        """What a first attempt asks of the fleet, as things stand."""
        known = (self._rooms.get((model, kind), ()) for kind in KINDS)
        return AttemptNeeds(
            model=model,
            mode="local" if on_decode_only else self.mode,
            broken=self.standing.broken_pairs(),
            doubtful=self.standing.doubtful_pairs(),
            by_pool=self._by_pool,
            sizes=Sizes(*map(round_up, sizes, known)),
        )

    def rooms(self, model: str, on_decode_only: bool) -> Rooms:
        """The known rooms of workers that an attempt takes, also of those that may come back. A
        decode worker may lose a prompt's KV, and then computes it itself."""
        is_local = on_decode_only or self.mode != "remote"
        kinds: tuple[Kind, ...] = ("decode",) if is_local else KINDS
        return {kind: found for kind in kinds if (found := self._rooms.get((model, kind)))}

    def place(self, need: AttemptNeeds) -> Placement | None:
        """Picks workers for an attempt; nothing is counted yet."""
        if (few := self._draw(need)) and (found := place(few, need)) is not None:
            return found
        return place(self.candidates(), need)

    def _draw(self, need: AttemptNeeds) -> list[Candidate]:
        """A few workers of a large fleet for one choice, or none: random ones that write answers,
        those that have most of the prompt, those that a request has just left, and for each of
        these some that can hand pages over to it."""
        if (index := self.index) is None:
            return []
        lives = [*self._freed, *sorted(need.cached, key=need.cached.__getitem__)[-CHOICES:]]
        lives += [life for life, holder in self._kept.items() if holder == need.holder]
        if need.beside is not None:
            lives.append(need.beside)
        weights = "" if need.fingerprint is None else repr(need.fingerprint)
        drawn = {record.life: record for record in index.draw(need.model, "decode", weights)}
        drawn |= {life: index.by_life[life] for life in lives if life in index.by_life}
        for text in {record.fingerprint_text for record in drawn.values()}:
            drawn |= {record.life: record for record in index.draw(need.model, "prefill", text)}
        suspects, role = self.standing.suspects(), self.standing.with_role
        return [self._candidate(role(record), suspects) for record in drawn.values()]

    def known_prospect(self, need: AttemptNeeds) -> Prospect | None:
        """The prospect of an attempt that workers cannot take, if it was found just now.

        A change wakes all waiting requests, perhaps a thousand, which find the same. So requests
        with equal needs get the first one's result until the loop turns, or something changes. They
        may lack `cached` and `prompt`, which take long to look up and exclude no worker."""
        return self._waiting_for.get(need.key) if self._waiting_for else None

    def prospect(self, need: AttemptNeeds) -> Prospect:
        """The prospect of an attempt."""
        if (few := self._draw(need)) and place(few, need) is not None:
            return Prospect.NOW
        found = prospect(self.candidates(), need)
        if found is not Prospect.NOW:
            if not self._waiting_for:
                asyncio.get_running_loop().call_soon(self._waiting_for.clear)
            self._waiting_for[need.key] = found
        return found

    # Workers of their own, for requests that run alone.

    @property
    def num_alone(self) -> int:
        """Requests that workers are kept for: they run there, or will once it is empty."""
        return len(set(self._kept.values()))

    def keep_workers(self, holder: Holder, need: AttemptNeeds) -> None:
        """Has workers take nothing but this request from now on, if others can do without. One
        at a time of those that ask the same."""
        if has_own(self.candidates(), need):
            return
        self.release_workers(holder)
        if any(holder.digest == other.digest for other in self._kept.values()):
            return
        for record in choose_own(self.candidates(), need):
            LOG.info("%s is reserved for request %s", record.worker_id, holder.request_id)
            self._kept[record.life] = holder

    def release_workers(self, holder: Holder) -> None:
        """Others may have them again."""
        own = [life for life, other in self._kept.items() if other == holder]
        for life in own:
            del self._kept[life]
        if own:
            self.announce_change()

    def counted(
        self, placement: Placement, prompt_len: int, max_tokens: int, num_known: int = 0
    ) -> AttemptShare:
        """Counts an attempt on its workers within `with`; then another request may have its seat. A
        prompt that is shared counts once. Tokens whose KV is known need no forward."""
        prompt_len = 0 if placement.shares_prompt else prompt_len
        num_left = max(prompt_len - num_known, min(prompt_len, 1))
        return AttemptShare(self, placement, num_left, prompt_len + max_tokens)

    def held(self, placement: Placement) -> Placement:
        """The same, with records that attempts may hold for long: without what changes in a life,
        and one for all attempts there."""
        decode, prefill = placement.decode, placement.prefill
        prefill = None if prefill is None else self._held_record(prefill)
        return replace(placement, decode=self._held_record(decode), prefill=prefill)

    def _held_record(self, record: WorkerRecord) -> WorkerRecord:
        held = self._held.get(record.life)
        same = (record.role, record.fingerprint)
        if held is None or (held.role, held.fingerprint) != same:
            held = replace(record, load=Load(), links=(), quarantines=())
            self._held[record.life] = held
        return held

    def free_seats(self, placement: Placement) -> None:
        """A request has left its workers."""
        workers = (placement.prefill, placement.decode)
        self._freed.extend(one.life for one in workers if one is not None)
        self.announce_change()

    def loads(self) -> tuple[RoutedLoad, ...]:
        """What we have on workers now, for other routers."""
        return tuple(
            RoutedLoad(worker_id, incarnation, one.requests)
            for (worker_id, incarnation), one in self._in_flight.items()
            if one.requests
        )

    # Changes.

    def announce_change(self) -> None:
        """Wakes whoever waits for the fleet: a choice may come out otherwise now."""
        self._waiting_for.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, most_s: float) -> None:
        """Returns once that has happened, or after `most_s` seconds."""
        changed = self._changed
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await changed.wait()

    def look(self) -> list[Candidate]:
        """Announces what has changed in the view, and returns all workers."""
        candidates = self.candidates()
        self.index = FleetIndex(candidates) if len(candidates) > FEW else None
        self._note_rooms(c.record for c in candidates)
        seen = {c.record.life: (c.record.role, c.condition) for c in candidates}
        if seen != self._seen:
            self._seen = seen
            self.announce_change()
        return candidates

    def _note_rooms(self, records: Iterable[WorkerRecord]) -> None:
        """Also of roles that workers may take. A worker that has gone may come back."""
        now = self._now()
        self._last |= {record.worker_id: (record, now) for record in records}
        self._last = {name: one for name, one in self._last.items() if one[1] > now - ROOM_S}
        self._rooms = {}
        for record, _ in self._last.values():
            for kind in KINDS:
                if record.does(kind) or record.may_change_role:
                    self._rooms.setdefault((record.model.name, kind), set()).add(room_of(record))

    async def ask_absent(self) -> None:
        """Asks each worker that is out how it is. One that is ready takes part again."""
        absent = self.standing.absent
        conditions = await asyncio.gather(*map(self.peers.condition_of, absent))
        for record, condition in zip(absent, conditions, strict=True):
            if self.standing.note_condition(record.life, condition):
                LOG.info("%s is ready again", record.worker_id)
                self.announce_change()

    async def forget_ended(self) -> None:
        """Drops what is kept of workers that are neither alive, nor in use, nor may come back."""
        alive = self.view.workers()
        self.standing.forget_ended(alive)
        lives = {r.life for r in alive}
        addresses = {r.address for r in (*alive, *self.standing.absent)}
        for life, in_flight in list(self._in_flight.items()):
            if not in_flight.is_idle:
                addresses.add(self._held[life].address)
            elif life not in lives:
                del self._in_flight[life], self._held[life]
        await self.peers.keep(addresses)

    def _candidate(self, record: WorkerRecord, suspects: Collection[WorkerLife]) -> Candidate:
        life, standing = record.life, self.standing
        return Candidate(  # by position, because each choice makes some thirty of them
            record,
            self._in_flight.get(life, IDLE),
            standing.condition(record),
            standing.is_full(life),
            life in suspects,
            self._kept.get(life),
            None if self._seats is None else self._seats(record),
        )

    def count_in_flight(self, record: WorkerRecord, before: InFlight, now: InFlight) -> None:
        """A request that had `before` on a worker has `now` there."""
        life = record.life
        self._waiting_for.clear()
        self._held_record(record)
        had = self._in_flight.get(life, IDLE)
        begun = now.requests + now.prompts - before.requests - before.prompts
        self._in_flight[life] = InFlight(  # written out, because every request passes here
            had.requests + now.requests - before.requests,
            had.tokens + now.tokens - before.tokens,
            had.prompts + now.prompts - before.prompts,
            had.to_prefill + now.to_prefill - before.to_prefill,
            had.placed + max(0, begun),
        )


class AttemptShare:
    """An attempt's part of the account of its workers."""

    __slots__ = ("_decode", "_fleet", "_placement", "_prefill", "_to_prefill", "_tokens")

    def __init__(self, fleet: RoutedFleet, placement: Placement, left: int, tokens: int) -> None:
        self._fleet = fleet
        self._placement = placement
        self._to_prefill, self._tokens = left, tokens
        self._decode, self._prefill = IDLE, IDLE

    def __enter__(self) -> AttemptShare:
        decode, prefill = self._placement.decode, self._placement.prefill
        own_prompt = 0 if prefill is not None else self._to_prefill
        self.take(
            InFlight(1, self._tokens, to_prefill=own_prompt),
            IDLE if prefill is None else InFlight(prompts=1, to_prefill=self._to_prefill),
        )
        if prefill is not None and not self._placement.by_pool:
            self._fleet.standing.note_try((prefill.life, decode.life))
        return self

    def __exit__(self, *error: object) -> None:
        self.take(IDLE, IDLE)
        self._fleet.free_seats(self._placement)

    def take(self, decode: InFlight, prefill: InFlight) -> None:
        """It has this on them from now on."""
        placement = self._placement
        self._fleet.count_in_flight(placement.decode, self._decode, decode)
        if placement.prefill is not None:
            self._fleet.count_in_flight(placement.prefill, self._prefill, prefill)
        self._decode, self._prefill = decode, prefill

    def end_prompt(self) -> None:
        """The prompt's KV is complete."""
        had_own = self._decode.to_prefill > 0
        self.take(replace(self._decode, to_prefill=0), IDLE)
        if had_own or self._fleet.num_alone:  # for which its prefill worker may be empty now
            self._fleet.announce_change()


def live_workers(
    candidates: Sequence[Candidate], model: str | None = None
) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
    """Workers that compute prompts, and those that write answers, of one model or of all."""
    ready = [
        c.record
        for c in candidates
        if c.condition is Condition.READY and model in (None, c.record.model.name)
    ]
    return [r for r in ready if r.does("prefill")], [r for r in ready if r.does("decode")]
