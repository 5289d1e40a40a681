"""Audits of pages: every page of a pool is free, or held by exactly its holders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from effuse.decode_worker.engine import DecodeEngine
from effuse.decode_worker.replicas import ReplicatedEngine
from effuse.kvtransfer.ends import HandoffReceiver
from effuse.kvtransfer.handoff import ReceiverState
from effuse.kvtransfer.messages import PageRef
from effuse.kvtransfer.pool import FreeRuns, PagePool, PageState
from effuse.kvtransfer.tiered_cache import TieredCache
from effuse.kvtransfer.units import HeldUnits, Unit, UnitCache
from effuse.placement.waste import waste_of
from effuse.prefill_worker.engine import PrefillEngine

Pages = Sequence[PageRef]


class AuditError(AssertionError):
    """Pages are lost, held twice, or in a state without an owner."""


def audit(engine: object) -> None:
    """Checks the pages of an engine, or of each replica. Raises AuditError."""
    if isinstance(engine, ReplicatedEngine):
        for replica in engine._engines:
            audit(replica)
    elif isinstance(engine, PrefillEngine):
        prompts = engine.table.prompts.values()
        held = [page for prompt in prompts for page in prompt.pages]
        audit_cache(engine._cache)
        audit_users(engine._cache, [one.units for one in prompts])
        audit_room(engine, [(one.pages, one.num_computed) for one in prompts])
        audit_pool(engine._pool, [*held, *cached_pages(engine._cache)])
    else:
        assert isinstance(engine, DecodeEngine)
        requests = engine.roster.by_transfer.values()
        held = [page for request in requests for page in request.pages]
        size = engine._intake.limits.page_size
        audit_users(engine._cache, [one.units for one in requests])
        audit_room(engine, [(one.pages, one.num_stored(size)) for one in requests])
        apart = [*engine._rehearsal._pages, *quarantined(engine._handoffs)]
        audit_cache(engine._cache)
        audit_pool(engine._pool, [*held, *apart, *cached_pages(engine._cache)])


def quarantined(receiver: HandoffReceiver) -> list[PageRef]:
    """Pages of abandoned handoffs in which bytes may still arrive."""
    return [
        page
        for handoff in receiver._handoffs.values()
        if handoff.machine.state in (ReceiverState.ABORTING, ReceiverState.FENCING)
        for page in handoff.reservation.pages
    ]


def free_ids(free: FreeRuns) -> list[int]:
    """Every free id, ascending."""
    return [
        i for start in sorted(free._length_at) for i in range(start, start + free._length_at[start])
    ]


def cached_pages(cache: UnitCache) -> list[PageRef]:
    """Pages that a cache holds, with those that it fills, and those that it saves once more."""
    units: list[Unit] = []
    if isinstance(cache, TieredCache):
        coming = dict.fromkeys(cache._coming.values())
        units = [unit for one in coming for unit in one.units.values()]
        units += [unit for saving in cache._saving for _, unit, _ in saving.units]
    return [*cache.held.values(), *(page for unit in units for page in unit.pages)]


def audit_cache(cache: UnitCache) -> None:
    """Checks a cache's books: its pages are held once each, and those of units without a user
    exactly by it. Raises AuditError.
    """
    pool, pages = cache._pool, [page for unit in cache._units.values() for page in unit.pages]
    if lost := [page for page in pages if cache.held.get(page.page_id) != page]:
        raise AuditError(f"pages of units that the cache does not hold: {lost}")
    idle = {key for key, unit in cache._units.items() if not unit.num_users}
    if idle != set(cache._idle):
        raise AuditError(f"units without a user {idle} differ from {set(cache._idle)}")
    free = [page for unit in cache._idle.values() for page in unit.pages]
    if len(free) != cache.num_pages:
        raise AuditError(f"{len(free)} pages are only cached, {cache.num_pages} are counted")
    if used := [page for page in free if pool._more_holders.get(page.page_id)]:
        raise AuditError(f"pages of units without a user have users: {used}")
    if isinstance(cache, TieredCache):
        _audit_tiers(cache)


def _audit_tiers(cache: TieredCache) -> None:
    """Every slot is free, or of one unit that is there, arrives, or leaves."""
    tiers = cache.tiers
    coming = dict.fromkeys(cache._coming.values())
    writing = [one.kept for tier in tiers.stores for one in tier.writing]
    kept = [*tiers.kept.values(), *writing]
    kept += [one for each in coming for one in each.kept.values()]
    late = [read for tier in tiers.stores for read in tier._late]
    reads = [*late, *(read for one in coming for read in one.reads)]
    groups = [one.slots for one in dict.fromkeys(kept)] + [read.slots for read in reads]
    groups += [slots for one in cache._saving for *_, slots in one.units]
    used = [slot for slots in groups for slot in slots]
    if sorted([*used, *free_ids(tiers._free)]) != list(range(tiers.host.num_slots)):
        raise AuditError(f"slots {sorted(used)} and free ones {free_ids(tiers._free)} are not all")
    readers = [one for each in coming for one in each.kept.values()]
    readers += writing
    for one in dict.fromkeys(kept):
        if one.num_readers != readers.count(one):
            raise AuditError(f"{one} has {readers.count(one)} readers")


def audit_users(cache: UnitCache, requests: Iterable[HeldUnits]) -> None:
    """Checks that each unit has as many users as requests hold it, and the cache itself while it
    saves the unit. Raises AuditError.
    """
    holders = [*requests, *([cache._pins] if isinstance(cache, TieredCache) else [])]
    users = Counter(id(unit) for one in holders for unit in one.held.values())
    for key, unit in cache._units.items():
        if unit.num_users != users[id(unit)]:
            raise AuditError(f"{key!r} has {unit.num_users} users, {users[id(unit)]} hold it")


def audit_room(engine: DecodeEngine | PrefillEngine, held: Sequence[tuple[Pages, int]]) -> None:
    """Checks the waste that an engine reports against its pages, one by one. Raises AuditError.

    held: the pages of each request, and the number of tokens in them.
    """
    load, pool = engine.load(), engine._pool
    size = engine._cache._page_size
    filled: dict[int, int] = {}
    for pages, num_tokens in held:
        for at, page in enumerate(pages):
            inside = min(max(num_tokens - at * size, 0), size)
            if filled.setdefault(page.page_id, inside) != inside:
                raise AuditError(f"page {page.page_id} has {inside} tokens of one request only")
    counted = Counter(filled.values())
    partial = sum((size - inside) * count for inside, count in counted.items() if inside)
    waste = waste_of(load, size, 1)  # a longest text matters to none of the three
    in_quarantine = sum(state is PageState.QUARANTINED for state in pool._states)
    found = [size * counted[0], partial, size * in_quarantine]
    told = [waste.reserved, waste.internal, waste.external]
    if [room / (size * pool.num_pages) for room in found] != told:
        raise AuditError(f"empty, partly empty and in quarantine are {found} tokens, not {told}")


def audit_pool(pool: PagePool, held: Iterable[PageRef] | None = None) -> None:
    """Checks that every page is in exactly one place; raises AuditError with the difference.

    held: every page that a module holds, a shared one once for each holder; () when idle. Pages
    that are neither free nor held are a leak. With None, only the pool's own books are checked.
    """
    states, free = pool._states, free_ids(pool._free)
    found = [i for i, state in enumerate(states) if state is PageState.FREE]
    if found != free:
        raise AuditError(f"free list {free} differs from the free pages {found}")
    if Counter(states) != +pool._counts or len(states) != pool.num_pages:
        raise AuditError(f"counts {dict(pool._counts)} differ from states {Counter(states)}")
    strange = [i for i in pool._more_holders if states[i] is not PageState.COMMITTED]
    if strange:
        raise AuditError(f"shared pages that no attempt may read: {strange}")
    if held is not None:
        _audit_holders(pool, list(held))


def _audit_holders(pool: PagePool, held: list[PageRef]) -> None:
    ids, states = Counter(page.page_id for page in held), pool._states
    more = ids - Counter(ids.keys())
    if twice := sorted(more - pool._more_holders):
        raise AuditError(f"pages held twice: {twice}")
    stale = sorted(p.page_id for p in held if pool._generations[p.page_id] != p.generation)
    if stale:
        raise AuditError(f"pages held under an earlier generation: {stale}")
    leaked = [i for i, state in enumerate(states) if state is not PageState.FREE and i not in ids]
    if leaked:
        named = ", ".join(f"{i} {states[i].name}" for i in leaked[:8])
        raise AuditError(f"{len(leaked)} pages leaked: {named}")
    freed = sorted(i for i in ids if states[i] is PageState.FREE)
    if freed:
        raise AuditError(f"pages held although they are free: {freed}")
    if fewer := sorted(pool._more_holders - more):
        raise AuditError(f"pages with fewer holders than sharers: {fewer}")
