"""The ways from a prefill worker to decode workers: which are known, and which is measured next.

A table of values, with the time and the jitter handed in; measuring itself is rehearsals.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from effuse.placement.records import MOST_LINKS, Link, WorkerRecord

FIRST_S = 1.0  # to the next try after one that failed, or that found the link too slow
MOST_S = 60.0


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
