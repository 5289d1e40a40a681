"""A prefill worker's knowledge of its links, as values: which are warm, how fast, and which is
next.

No I/O; the time and the jitter are arguments. Rehearsals (rehearsals.py) and prompts bring the
samples. A link is warm after its first rehearsal. Its rate is the best of the last WINDOW_S: one
bad moment slows a sample down, and nothing speeds one up.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from effuse.placement.records import MOST_LINKS, Link, WorkerRecord

FIRST_S = 1.0  # until the next attempt after one that failed or found the link too slow
MOST_S = 60.0
COLD_FIRST_S = 0.2  # the same for a link that is not warm, for which prompts wait
COLD_MOST_S = 5.0
AGAIN_S = 10.0  # from the first rehearsal to the second; each further pause is twice as long
MOST_AGAIN_S = 300.0
WINDOW_S = 900.0  # older samples do not count; several rehearsals fit into it
AGREEING = 3  # rehearsals that must find a link too slow before it is refused
MOST_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Rates:
    """Samples of handoffs over one link, in bytes a second."""

    measured: tuple[tuple[float, float], ...] = ()  # (when, rate) of rehearsals, the last ones
    proven: tuple[float, float] | None = None  # the same for a prompt, as a lower bound

    def with_measured(self, rate: float, now: float) -> Rates:
        """With one more rehearsal."""
        return replace(self, measured=(*self.measured, (now, rate))[-MOST_SAMPLES:])

    def with_proven(self, rate: float, now: float) -> Rates:
        """With a prompt, whose pages may have left only as fast as they were computed."""
        is_news = rate >= self.best(now)
        return replace(self, proven=(now, rate)) if is_news else self

    def best(self, now: float) -> float:
        """The link's rate now; 0 if nothing is known. The last AGREEING rehearsals count always."""
        old, new = self.measured[:-AGREEING], self.measured[-AGREEING:]
        proven = () if self.proven is None else (self.proven,)
        recent = [rate for at, rate in (*old, *proven) if now - at <= WINDOW_S]
        return max([*recent, *(rate for _, rate in new)], default=0.0)


@dataclass(frozen=True, slots=True)
class LinkState:
    """The state of the link to one life of a decode worker."""

    peer: WorkerRecord
    due_at: float  # when it is next rehearsed
    transport: str = ""  # transport of its bytes; empty while it is cold
    rates: Rates = field(default_factory=Rates)
    num_bytes: int = 0  # of the largest rehearsal
    num_good: int = 0  # rehearsals since the link was last too slow
    tries: int = 0  # that failed or found it too slow, since the last good one
    told: bool | None = None  # the last verdict in the log

    def link(self, least: float, now: float) -> Link | None:
        """The link for a record; None while it is cold or may still miss a `least` rate."""
        if not self.transport or (least and self.verdict(least, now) is None):
            return None
        life = self.peer.worker_id, self.peer.incarnation
        return Link(*life, self.transport, self.rates.best(now))

    def verdict(self, least: float, now: float) -> bool | None:
        """Whether it reaches this rate in bytes a second; None while that is open."""
        if not self.rates.measured:
            return None
        if self.rates.best(now) >= least:
            return True
        return False if len(self.rates.measured) >= AGREEING else None


class Links:
    """All links of one prefill worker. Times are seconds of one monotonic clock."""

    def __init__(self, jitter: Callable[[], float], min_gbps: float = 0.0) -> None:
        """`jitter` returns numbers in [0, 1); a link below `min_gbps` is measured again soon."""
        self._jitter = jitter
        self._least = min_gbps * 1e9
        self.own = ""  # the life that measures
        self._links: dict[str, LinkState] = {}  # by worker id
        self._under_way: set[str] = set()  # worker ids

    def follow(
        self, own: WorkerRecord, seen: Sequence[WorkerRecord], now: float
    ) -> list[WorkerRecord]:
        """Takes `seen`, all live workers, of which at most MOST_LINKS are followed. Returns the
        decode workers whose previous life has ended.

        Links to decode workers with our fingerprint are due immediately. Results for another life,
        ours or theirs, are dropped.
        """
        before = self._links if self.own == own.incarnation else {}
        self.own, self._links = own.incarnation, {}
        fitting = [
            one
            for one in seen
            if one.role == "decode" and one.fingerprint == own.fingerprint
            if one.state != "starting"  # its engine has ended
        ]
        for peer in fitting[:MOST_LINKS]:
            state = before.get(peer.worker_id)
            if state is None or state.peer.incarnation != peer.incarnation:
                state = LinkState(peer, now)
            self._links[peer.worker_id] = replace(state, peer=peer)
        lives = {state.peer.incarnation for state in self._links.values()}
        return [one.peer for one in before.values() if one.peer.incarnation not in lives]

    def next(
        self, now: float, *, only_cold: bool = False, may_measure: bool = True
    ) -> WorkerRecord | None:
        """The decode worker to rehearse with now; None if nothing is due.

        Cold links come first. `may_measure`: whether this engine is idle. A warm link that is fast
        enough waits until both of its ends are.
        """
        due = [
            state
            for name, state in self._links.items()
            if state.peer.state == "ready" and state.due_at <= now and name not in self._under_way
            if not (only_cold and state.transport)
            if (may_measure and _is_idle(state.peer)) or not self._is_fine(state, now)
        ]
        return min(due, key=self._turn).peer if due else None

    def begin(self, peer: WorkerRecord) -> None:
        """A rehearsal with this worker is running, until `end`."""
        self._under_way.add(peer.worker_id)

    def end(self, peer: WorkerRecord) -> None:
        """It has ended."""
        self._under_way.discard(peer.worker_id)

    def state_of(self, peer: WorkerRecord) -> LinkState | None:
        """The link to this life of a decode worker."""
        state = self._links.get(peer.worker_id)
        return state if state is not None and state.peer.incarnation == peer.incarnation else None

    def known(self, now: float) -> tuple[Link, ...]:
        """All warm links, and whether each reaches the limit, if there is one."""
        links = (state.link(self._least, now) for state in self._links.values())
        return tuple(link for link in links if link is not None)

    def warmed(self, peer: WorkerRecord, transport: str, rate: float, now: float) -> None:
        """A link may carry prompts from now on, with at least this rate in bytes a second."""
        state = self.state_of(peer)
        if state is not None:
            rates = state.rates.with_proven(rate, now)
            self._put(replace(state, transport=transport, rates=rates, due_at=now, tries=0))

    def measured(
        self, peer: WorkerRecord, transport: str, rate: float, num_bytes: int, now: float
    ) -> None:
        """A rehearsal of this many bytes found a rate in bytes a second."""
        state = self.state_of(peer)
        if state is None:
            return
        state = replace(
            state,
            transport=transport,
            rates=state.rates.with_measured(rate, now),
            num_bytes=max(state.num_bytes, num_bytes),
        )
        verdict = state.verdict(self._least, now)
        if verdict is None:
            self._put(replace(state, due_at=now + FIRST_S * (0.5 + self._jitter()), num_good=0))
        elif not verdict:
            self._put(self._later(replace(state, num_good=0), now))
        else:
            pause_s = min(AGAIN_S * 2.0 ** min(state.num_good, 32), MOST_AGAIN_S)
            due_at = now + pause_s * (0.5 + self._jitter())
            self._put(replace(state, due_at=due_at, num_good=state.num_good + 1, tries=0))

    def proven(self, incarnation: str, num_bytes: int, seconds: float, now: float) -> None:
        """A prompt's pages have moved to this life of a decode worker, in this many seconds.

        Fewer bytes than half of a rehearsal's prove nothing, because their time is mostly that of
        the messages.
        """
        for state in self._links.values():
            is_there = state.peer.incarnation == incarnation and state.rates.measured
            if is_there and 2 * num_bytes >= state.num_bytes and seconds > 0:
                rates = state.rates.with_proven(num_bytes / seconds, now)
                self._put(replace(state, rates=rates))
                return

    def refused(self, peer: WorkerRecord, ways: str, now: float) -> None:
        """No bytes can move, because the two ends have different connectors."""
        state = self.state_of(peer)
        if state is not None:
            rates = Rates(((now, 0.0),) * AGREEING)
            self._put(self._later(replace(state, transport=ways, rates=rates), now))

    def news(self, peer: WorkerRecord, now: float) -> Link | None:
        """The link, if it should be logged: there is a verdict, and it is new or changed."""
        state = self.state_of(peer)
        verdict = None if state is None else state.verdict(self._least, now)
        if state is None or verdict is None or verdict is state.told:
            return None
        self._put(replace(state, told=verdict))
        return state.link(self._least, now)

    def failed(self, peer: WorkerRecord, now: float) -> float:
        """An attempt failed; returns the seconds until the next one."""
        state = self.state_of(peer)
        if state is None:
            return 0.0
        later = self._later(state, now)
        self._put(later)
        return later.due_at - now

    def _put(self, state: LinkState) -> None:
        self._links[state.peer.worker_id] = state

    def _later(self, state: LinkState, now: float) -> LinkState:
        first_s, most_s = (FIRST_S, MOST_S) if state.transport else (COLD_FIRST_S, COLD_MOST_S)
        pause_s = min(first_s * 2.0 ** min(state.tries, 32), most_s)
        return replace(state, due_at=now + pause_s * (0.5 + self._jitter()), tries=state.tries + 1)

    def _is_fine(self, state: LinkState, now: float) -> bool:
        """Whether prompts take the link and nothing about it is open."""
        return bool(state.transport) and state.rates.best(now) >= self._least

    def _turn(self, state: LinkState) -> tuple[bool, float, int]:
        """Workers that start together begin with different peers."""
        named = f"{self.own} {state.peer.worker_id}".encode()
        return bool(state.transport), state.due_at, zlib.crc32(named)


def _is_idle(worker: WorkerRecord) -> bool:
    return not (worker.load.running or worker.load.waiting)
