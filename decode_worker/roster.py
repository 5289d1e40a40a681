"""The requests of an engine and their pages: which wait, which run, and which read whose prompt.

Answers to one request are a group. Their first one receives or computes the prompt's KV; the others
wait for it, then read its whole pages and own a copy of the page that has both prompt and answer.
If the first one ends before that, the next one in the order of arrival computes it: as after a
preemption, no prefill worker is involved again.
"""

import math
from bisect import insort
from collections.abc import Callable, Sequence

from effuse.decode_worker import scheduler
from effuse.decode_worker.executor import Executor, Share
from effuse.decode_worker.request import DecodeRequest
from effuse.decode_worker.room import Room
from effuse.decode_worker.scheduler import UNDER_WAY, DecodeLimits
from effuse.kvtransfer.messages import PageRef
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.store_tier import READ_S
from effuse.kvtransfer.units import UnitCache


class Roster:
    """Every request of an engine, by transfer id and in exactly one of three queues, which are in
    the order of arrival."""

    def __init__(
        self, executor: Executor, pool: PagePool, cache: UnitCache, limits: DecodeLimits
    ) -> None:
        self.by_transfer: dict[str, DecodeRequest] = {}
        self.waiting: list[DecodeRequest] = []  # hold no pages
        self.receiving: dict[str, DecodeRequest] = {}  # a remote writer is filling their pages
        self.running: list[DecodeRequest] = []  # oldest first
        self._groups: dict[tuple[str, str, bytes], list[DecodeRequest]] = {}  # of equal prompts
        self._executor = executor
        self._pool = pool
        self._cache = cache
        self._limits = limits

    @property
    def num_holding(self) -> int:
        return len(self.receiving) + len(self.running)

    @property
    def oldest_waiting_s(self) -> float:
        """When the oldest request that waits for pages arrived; infinite if none waits."""
        return min((one.arrived_s for one in self.waiting), default=math.inf)

    @property
    def pages_kept(self) -> int:
        """Free pages that running requests will need soon: a block's for each."""
        return self.num_holding * self._limits.pages_for(self._limits.block_size)

    def has_group(self, group: str) -> bool:
        return any(name == group for name, *_ in self._groups)

    def add(self, request: DecodeRequest) -> None:
        """A request arrives, after all others."""
        self.by_transfer[request.transfer_id] = request
        self.waiting.append(request)
        sequence, is_causal = request.sequence, self._cache.is_causal
        if not request.settings.is_canvas:
            known = sequence.in_flight_start if is_causal else sequence.prompt_len
            salt = request.asked.cache_salt
            request.units = self._cache.begin(salt, sequence.token_ids, known)
        if request.asked.group:
            request.siblings = self._groups.setdefault(_group_of(request), [])
            request.siblings.append(request)

    def start_running(self, request: DecodeRequest) -> None:
        """A request can take part in steps."""
        if self.receiving.pop(request.transfer_id, None) is None:
            self.waiting.remove(request)
        insort(self.running, request, key=_arrival)

    def remove(self, request: DecodeRequest, *, is_sound: bool = True) -> None:
        """A request has ended, and its pages are free unless others read them. Nothing of it stays
        in the cache if it is not `is_sound`."""
        if not is_sound:
            self._cache.drop(request.units)
        self._let_go(request)
        del self.by_transfer[request.transfer_id]
        if self.receiving.pop(request.transfer_id, None) is None:
            queue = self.running if request in self.running else self.waiting
            queue.remove(request)
        if request.asked.group:
            request.siblings.remove(request)
            if not request.siblings:
                del self._groups[_group_of(request)]

    def keep(self, request: DecodeRequest) -> None:
        """More of a request's text is final and stored: others may reuse it as a prefix."""
        stored = request.sequence.committed_len
        self._cache.extend(request.units, request.sequence.token_ids, stored)
        self._cache.add(request.units, request.pages, stored)

    def _let_go(self, request: DecodeRequest) -> None:
        """A request gives up its pages. Those of a whole prompt may go to an equal one."""
        num_pages = self._limits.pages_for(request.sequence.first_block_start)
        if request.holds_prompt or request.units.num_pages == num_pages:
            prompt = request.pages[:num_pages]
            self._cache.add_whole(request.units, prompt, request.prompt_boundary)
        self._cache.end(request.units)
        self._pool.release(request.pages)
        request.pages.clear()

    # Admission.

    def admissible(self, room: Room) -> list[DecodeRequest]:
        """The oldest waiting requests, as many as there is room for. Requests that wait for another
        one's prompt, or for units from other tiers, let younger ones pass."""
        waiting = self._not_coming()
        if not waiting:
            return []
        count = scheduler.admit(
            (self._pages_to_begin(request) for request in waiting),
            num_holding=self.num_holding,
            num_free=self._pool.num_free,
            growth=sum(request.demand(self._limits).growth for request in self.running),
            limits=self._limits,
        )
        return [one for one in waiting[:count] if not self._fetch(one, room)]

    def _fetch(self, request: DecodeRequest, room: Room) -> bool:
        """Whether units of a request are on their way from other tiers."""
        if _source_of(request) is not None:
            return False

        def compute_s(tokens: int) -> float:
            """Another worker computes prompts for the pool, so loading need not be faster."""
            return max(room.prompt_s(tokens), READ_S * request.asked.in_pool)

        return self._cache.fetch(request.units, *self._looked_up(request), compute_s)

    def _looked_up(self, request: DecodeRequest) -> tuple[int, int]:
        """How many first tokens of a request the cache may have, and how many of them a forward
        computes all the same."""
        sequence = request.sequence
        if request.needs_remote or not self._cache.is_causal:
            return sequence.first_block_start, 0
        return sequence.in_flight_start, int(request.model.shift_logits)

    def begin_remote(self, request: DecodeRequest) -> tuple[PageRef, ...]:
        """Gives a waiting request its pages; returns those that its writer fills, because the cache
        does not have them."""
        start, units = request.sequence.first_block_start, request.units
        held: tuple[PageRef, ...] = ()
        if self._cache.is_causal:
            held = self._cache.take(units, start)
        elif (unit := self._cache.take_whole(units, start)) is not None:
            held, request.prompt_boundary = unit.pages, unit.boundary
        pages = self._pool.allocate(self._limits.pages_for(start) - len(held))
        assert pages is not None, "admission counts free pages"
        request.pages, units.num_pages = [*held, *pages], len(held)
        self.waiting.remove(request)
        self.receiving[request.transfer_id] = request
        return pages

    def begin(self, request: DecodeRequest) -> None:
        """Gives a waiting request its pages, which the engine fills or which have its prefix."""
        count, source = request.pages_to_begin(self._limits), _source_of(request)
        if source is None:
            self._take_known(request)
        else:
            self._share_prompt(request, source)
        num_known = len(request.pages)
        self._give_pages(request, count - num_known)
        if source is not None:
            end = self._limits.pages_for(request.sequence.first_block_start)
            for at in range(num_known, end):  # of prompt and answer, or of a unit of both
                self._executor.copy_page(source.page_ids[at], request.page_ids[at])
        self.start_running(request)

    def _share_prompt(self, request: DecodeRequest, source: DecodeRequest) -> None:
        """A request also holds whole pages of another one's prompt."""
        start = request.sequence.first_block_start
        self._cache.join(request.units, source.units, start)
        pages = source.pages[: self._cache.num_joint(start) // self._limits.page_size]
        self._pool.share(pages)
        request.take_prompt(pages, source.prompt_boundary)
        self._executor.counters.prompts_shared += 1

    def _take_known(self, request: DecodeRequest) -> None:
        """A request begins with the pages that the cache has of its text."""
        sequence, units = request.sequence, request.units
        if self._cache.is_causal:
            request.pages = list(self._cache.take(units, *self._looked_up(request)))
            sequence.store(units.num_found * self._cache.unit_size)
        elif (unit := self._cache.take_whole(units, sequence.prompt_len)) is not None:
            request.take_prompt(unit.pages, unit.boundary)
        units.num_tokens = min(sequence.committed_len, sequence.prompt_len)

    def _pages_to_begin(self, request: DecodeRequest) -> int:
        """Free pages with which it can begin, without those of others that it will also hold."""
        count, sequence = request.pages_to_begin(self._limits), request.sequence
        if _source_of(request) is not None:
            return (
                count - self._cache.num_joint(sequence.first_block_start) // self._limits.page_size
            )
        if not self._cache.is_causal:
            return count
        return count - self._cache.num_pinned(request.units, *self._looked_up(request))

    def _give_pages(self, request: DecodeRequest, count: int) -> None:
        pages = self._pool.allocate_committed(count)
        assert pages is not None, "the scheduler counts free pages"
        request.pages.extend(pages)

    def _not_coming(self) -> list[DecodeRequest]:
        """The waiting requests whose prompt's KV is not on its way to a sibling, and that have no
        older sibling that will get it."""
        last_to_begin: dict[int, float] = {}  # arrivals, by the identity of a group
        left = []
        for request in self.waiting:
            group = id(request.siblings)
            if _may_share(request) and group not in last_to_begin:
                last_to_begin[group] = _last_to_begin(request.siblings)
            if not _may_share(request) or request.arrival <= last_to_begin[group]:
                left.append(request)
        return left

    # Steps.

    def schedule(
        self, apply_all: Callable[[], object], room: Room, now: Callable[[], float]
    ) -> list[Share]:
        """Asks the scheduler which requests take part, preempts, and hands out pages. `apply_all`
        waits for launched steps; `room` bounds prompts."""
        running, executor = list(self.running), self._executor
        demands = [
            UNDER_WAY
            if executor.is_under_way(one)
            else one.demand(self._limits, runs_ahead=executor.runs_ahead)
            for one in running
        ]
        schedule = scheduler.schedule(
            demands,
            num_free=self._pool.num_free,
            limits=self._limits,
            most_requests=-(-len(running) // executor.num_parts(len(running))),
            count_freed=lambda gone: self._pool.count_freed(running[at].pages for at in gone),
            prompt_rows=room.look(running, demands, now()),
        )
        if schedule.preempted and executor.is_running:
            # Launched steps must end before pages change hands; that may also free some.
            apply_all()
            return self.schedule(apply_all, room, now)
        for index in schedule.preempted:
            self.preempt(running[index], room)
        shares = []
        for request, demand, rows in zip(running, demands, schedule.rows, strict=True):
            if rows:
                self._give_pages(request, demand.growth)
                shares.append(Share(request, rows, demand.is_prompt))
        return shares

    def preempt(self, request: DecodeRequest, room: Room) -> None:
        """A running request loses its pages and waits again, before all younger ones."""
        assert not self._executor.is_running, "its last step has been read"
        self._executor.remove(request)
        self._let_go(request)
        self._cache.swap_out(request.units, room.prompt_s)
        request.preempt()
        if not request.settings.is_canvas:
            sequence = request.sequence
            self._cache.extend(request.units, sequence.token_ids, sequence.in_flight_start)
        self.running.remove(request)
        insort(self.waiting, request, key=_arrival)
        self._executor.counters.preemptions += 1


def _arrival(request: DecodeRequest) -> int:
    return request.arrival


def _group_of(request: DecodeRequest) -> tuple[str, str, bytes]:
    asked = request.asked
    return asked.group, asked.cache_salt, request.sequence.prompt_ids.tobytes()


def _source_of(request: DecodeRequest) -> DecodeRequest | None:
    """The request with the KV of its prompt, for a request that does not have it yet."""
    if not _may_share(request):
        return None
    return next((one for one in request.siblings if one.holds_prompt), None)


def _may_share(request: DecodeRequest) -> bool:
    """Whether a request may get its prompt from another one; not once it has it, and not if a
    writer brings it."""
    return bool(request.siblings) and request.lacks_prompt and not request.needs_remote


def _last_to_begin(siblings: Sequence[DecodeRequest]) -> float:
    """The last arrival among the sharing requests that can begin: all if one has the KV, none while
    it is on its way to one, otherwise the oldest."""
    if any(one.holds_prompt for one in siblings):
        return math.inf
    lacking = [one for one in siblings if one.lacks_prompt]
    return -math.inf if any(one.pages for one in lacking) else min(one.arrival for one in lacking)
