"""A prefill worker's knowledge of its links, as values: which are warm, how fast, and which is
next; and the line of a link in the log.

No I/O; the time and the jitter are arguments. Rehearsals and prompts (server.py) bring the samples.
A link is warm after its first rehearsal. Its rate is the best of the last WINDOW_S: one bad moment
slows a sample down, and nothing speeds one up.
"""

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from effuse.placement.records import MOST_LINKS, Link, WorkerRecord

FIRST_S = 1.0  # until the next attempt after one that failed or found the link too slow
MOST_S = 60.0
COLD_FIRST_S = 0.2  # the same for a link that is not warm, for which prompts wait
COLD_MOST_S = 5.0
BUSY_S = 5.0  # until the next look at a peer that was not idle
AGAIN_S = 10.0  # from the first rehearsal to the second; each further pause is twice as long
MOST_AGAIN_S = 300.0
WINDOW_S = 900.0  # older samples do not count; several rehearsals fit into it
AGREEING = 3  # rehearsals that must find a link too slow before it is refused
MOST_SAMPLES = 8


@dataclass(slots=True)
class LinkState:
    """The link to one life of a decode worker. Samples are (when, bytes a second)."""

    peer: WorkerRecord
    due_at: float  # when it is next rehearsed
    least: float = 0.0  # bytes a second; a slower link is refused and measured again soon
    jitter: Callable[[], float] = lambda: 0.5  # returns numbers in [0, 1)
    transport: str = ""  # transport of its bytes; empty while it is cold
    samples: Sequence[tuple[float, float]] = ()  # of rehearsals, the last ones
    bound: Sequence[tuple[float, float]] = ()  # at most one of a prompt: a lower bound
    num_bytes: int = 0  # of the largest rehearsal
    num_good: int = 0  # rehearsals since the link was last too slow
    tries: int = 0  # that failed or found it too slow, since the last good one
    logged: bool | None = None  # the last verdict in the log
    is_under_way: bool = False  # a rehearsal runs

    def best(self, now: float) -> float:
        """The link's rate now; 0 if nothing is known. The last AGREEING rehearsals count always."""
        old, new = self.samples[:-AGREEING], self.samples[-AGREEING:]
        recent = [rate for at, rate in (*old, *self.bound) if now - at <= WINDOW_S]
        return max([*recent, *(rate for _, rate in new)], default=0.0)

    def verdict(self, now: float) -> bool | None:
        """Whether it reaches the least rate; None while that is open."""
        if not self.samples:
            return None
        if self.best(now) >= self.least:
            return True
        return False if len(self.samples) >= AGREEING else None

    def link(self, now: float) -> Link | None:
        """The link for a record; None while it is cold or may still miss the least rate."""
        if not self.transport or (self.least and self.verdict(now) is None):
            return None
        life = self.peer.worker_id, self.peer.incarnation
        return Link(*life, self.transport, self.best(now))

    def news(self, now: float) -> Link | None:
        """The link, if it should be logged: there is a verdict, and it is new or changed."""
        verdict = self.verdict(now)
        if verdict is None or verdict is self.logged:
            return None
        self.logged = verdict
        return self.link(now)

    def is_fine(self, now: float) -> bool:
        """Whether prompts take the link and nothing about it is open."""
        return bool(self.transport) and self.best(now) >= self.least

    def warmed(self, transport: str, rate: float, now: float) -> None:
        """It may carry prompts from now on, with at least this rate in bytes a second."""
        self.proven(rate, now)
        self.transport, self.due_at, self.tries = transport, now, 0

    def measured(self, transport: str, rate: float, num_bytes: int, now: float) -> None:
        """A rehearsal of this many bytes found a rate in bytes a second."""
        self.transport, self.num_bytes = transport, max(self.num_bytes, num_bytes)
        self.samples = (*self.samples, (now, rate))[-MOST_SAMPLES:]
        verdict = self.verdict(now)
        if verdict is None:
            self.due_at, self.num_good = now + self._spread(FIRST_S), 0
        elif not verdict:
            self.num_good = 0
            self.failed(now)
        else:
            pause_s = min(AGAIN_S * 2.0 ** min(self.num_good, 32), MOST_AGAIN_S)
            self.due_at, self.tries = now + self._spread(pause_s), 0
            self.num_good += 1

    def proven(self, rate: float, now: float) -> bool:
        """A prompt's pages have moved, which may have left only as fast as they were computed.
        Returns whether that is faster than was known."""
        is_faster = rate >= self.best(now)
        if is_faster:
            self.bound = ((now, rate),)
        return is_faster

    def refused(self, ways: str, now: float) -> None:
        """No bytes can move, because the two ends have different connectors."""
        self.transport, self.samples, self.bound = ways, ((now, 0.0),) * AGREEING, ()
        self.failed(now)

    def failed(self, now: float) -> float:
        """An attempt failed; returns the seconds until the next one."""
        first_s, most_s = (FIRST_S, MOST_S) if self.transport else (COLD_FIRST_S, COLD_MOST_S)
        pause_s = self._spread(min(first_s * 2.0 ** min(self.tries, 32), most_s))
        self.due_at, self.tries = now + pause_s, self.tries + 1
        return pause_s

    def put_off(self, now: float) -> None:
        """The other end is busy."""
        self.due_at = now + self._spread(BUSY_S)

    def _spread(self, pause_s: float) -> float:
        return pause_s * (0.5 + self.jitter())


class Links:
    """All links of one prefill worker. Times are seconds of one monotonic clock.

    A link belongs to one life at either end: results for an earlier one have no effect.
    """

    def __init__(self, jitter: Callable[[], float], min_gbps: float = 0.0) -> None:
        """`jitter` returns numbers in [0, 1); a link below `min_gbps` is measured again soon."""
        self._jitter = jitter
        self._least = min_gbps * 1e9
        self.own = ""  # the life that measures
        self._links: dict[str, LinkState] = {}  # by worker id
        self._seen: Sequence[WorkerRecord] = ()  # that they follow

    def follow(
        self, own: WorkerRecord, seen: Sequence[WorkerRecord], now: float
    ) -> list[WorkerRecord]:
        """Takes `seen`, all live workers, of which at most MOST_LINKS are followed. Returns the
        decode workers whose previous life has ended.

        Links to decode workers with our fingerprint are due immediately, and those to workers that
        may become one, so that they are warm before a change of role.
        """
        if seen is self._seen and self.own == own.incarnation:
            return []  # nothing has changed, and a large fleet costs nothing
        self._seen = seen
        before = self._links if self.own == own.incarnation else {}
        self.own, self._links = own.incarnation, {}
        fitting = [
            one
            for one in seen
            if one.may_ever_decode and one.worker_id != own.worker_id
            if one.fingerprint == own.fingerprint
            if one.state != "starting"  # its engine has ended
        ]
        if len(fitting) > MOST_LINKS:  # each prefill worker follows others
            fitting.sort(key=lambda one: zlib.crc32(f"{own.worker_id} {one.worker_id}".encode()))
        for peer in fitting[:MOST_LINKS]:
            state = before.get(peer.worker_id)
            if state is None or state.peer.incarnation != peer.incarnation:
                state = LinkState(peer, now, self._least, self._jitter)
            state.peer = peer
            self._links[peer.worker_id] = state
        lives = {one.incarnation for one in fitting}
        return [one.peer for one in before.values() if one.peer.incarnation not in lives]

    def next(
        self, now: float, *, only_cold: bool = False, may_measure: bool = True
    ) -> LinkState | None:
        """The link to rehearse now; None if nothing is due.

        Cold links come first. `may_measure`: whether this engine is idle. A warm link that is fast
        enough waits until both of its ends are.
        """
        due = [
            state
            for state in self._links.values()
            if state.peer.state == "ready" and state.due_at <= now and not state.is_under_way
            if not (only_cold and state.transport)
            if (may_measure and is_idle(state.peer)) or not state.is_fine(now)
        ]
        return min(due, key=self._turn) if due else None

    def known(self, now: float) -> tuple[Link, ...]:
        """All warm links, and whether each reaches the limit, if there is one."""
        links = (state.link(now) for state in self._links.values())
        return tuple(link for link in links if link is not None)

    def proven(self, incarnation: str, num_bytes: int, seconds: float, now: float) -> bool:
        """A prompt's pages have moved to this life of a decode worker, in so many seconds. Returns
        whether a link is faster than was known.

        Fewer bytes than half of a rehearsal's prove nothing, because their time is mostly that of
        the messages.
        """
        for state in self._links.values():
            is_there = state.peer.incarnation == incarnation and state.samples
            if is_there and 2 * num_bytes >= state.num_bytes and seconds > 0:
                return state.proven(num_bytes / seconds, now)
        return False

    def _turn(self, state: LinkState) -> tuple[bool, float, int]:
        """Workers that start together begin with different peers."""
        named = f"{self.own} {state.peer.worker_id}".encode()
        return bool(state.transport), state.due_at, zlib.crc32(named)


def is_idle(worker: WorkerRecord) -> bool:
    return not (worker.load.running or worker.load.waiting)


def line_of(own: str, link: Link, min_gbps: float, *, is_fallback: bool) -> tuple[int, str]:
    """The line for the log about a link, and its level: a warning if the link is refused or
    unexpectedly slow."""
    found = f"handoff {own} to {link.peer}: {link.transport}, {link.gigabytes_per_second:.4g} GB/s"
    if not link.bytes_per_second:
        why = ": REFUSED, because both ends must have the same --connector"
    elif link.gigabytes_per_second < min_gbps:
        why = f": REFUSED, because --min-handoff-gbps is {min_gbps:.10g}"
    elif is_fallback:
        why = (
            ": SLOW, because pages of GPUs go over TCP or through the host's memory. Check "
            "UCX_TLS; --min-handoff-gbps refuses such a link, and --connector zmq accepts it "
            "without this warning"
        )
    else:
        return logging.INFO, found
    return logging.WARNING, found + why
