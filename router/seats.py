"""How many requests run at once: as many as live decode workers have seats, within a limit.

What is beyond that waits here, where it holds nothing and has its turn with any worker, and not in
the queue of one of them. Not here: the queue (`admission.py`), where a request goes (`policy.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from effuse.placement.records import WorkerRecord
from effuse.router.admission import Admission
from effuse.router.fleet import Fleet
from effuse.router.policy import live_workers

CHECK_S: Final = 0.2


def seats(decode: Sequence[WorkerRecord], most: int) -> int:
    """Requests that these workers can run at once, `most` at most. Without workers it is `most`:
    nobody should wait to be told that there are none."""
    num_seats = sum(record.capacity.max_num_seqs for record in decode)
    return min(most, num_seats) if num_seats else most


class Seats:
    """Keeps a router's queue in step with its fleet."""

    def __init__(self, fleet: Fleet, admission: Admission, most: int) -> None:
        self._fleet = fleet
        self._admission = admission
        self._most = most
        self._is_known = False

    def settle(self) -> None:
        """Makes sure that seats are counted before a request asks for one; cheap where they are."""
        if not self._is_known:
            self.follow()

    def follow(self) -> None:
        """Brings the queue up to date once."""
        _, decode = live_workers(self._fleet.candidates())
        self._is_known = bool(decode)
        now = seats(decode, self._most)
        if now != self._admission.max_running:
            self._admission.resize(now)

    async def run(self) -> None:
        """Follows until cancelled."""
        while True:
            self.follow()
            await asyncio.sleep(CHECK_S)
