"""Pages of given-up handoffs whose writers have not let go of them yet, as the front knows them.

Tells operators, and refuses such a writer more pages. That the pages stay where they are until then
is the engine's; asking the writer is `peer.py`'s.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from effuse.placement.records import MOST_QUARANTINES, Quarantine
from effuse.protos.errors import TransferFailed
from effuse.worker.wire import Writer

LOG = logging.getLogger(__name__)

SILENT_S = 10.0
"""Who has not let go of pages for so long gets no more of them."""
ALARM_S = 30.0
_RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class _Held:
    """Pages of one handoff that wait for its writer."""

    writer: Writer
    pages: int
    since: float


class Quarantines:
    """All that wait now; a worker's handoffs are few, and so are these."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._held: list[_Held] = []
        self._told: set[str] = set()  # writers of which the log says that they are waited for

    @contextmanager
    def holding(self, writer: Writer, pages: int) -> Iterator[Callable[[], None]]:
        """Counts pages that wait for `writer`; gives what to call now and then meanwhile, for the
        log's sake."""
        held = _Held(writer, pages, self._now())
        self._held.append(held)
        try:
            yield lambda: self._tell(held)
        finally:
            self._held.remove(held)
            if writer.address in self._told and not self._of(writer.address):
                self._told.remove(writer.address)
                LOG.warning("no page waits for %s any more", writer.address)

    def check(self, writer: Writer) -> None:
        """Raises `TransferFailed` for a writer that has held pages for too long to get more."""
        ages = [self._now() - one.since for one in self._held if _is_same(one.writer, writer)]
        if ages and max(ages) >= SILENT_S:
            raise TransferFailed(
                f"the prefill worker at {writer.address} has not let go of pages here for "
                f"{max(ages):.0f} s and gets no more",
                retry_after_s=_RETRY_AFTER_S,
            )

    def listed(self) -> tuple[Quarantine, ...]:
        """Pages by writer, those that have waited longest first, `MOST_QUARANTINES` at most."""
        by_writer: dict[str, list[_Held]] = defaultdict(list)
        for one in self._held:  # oldest first
            by_writer[one.writer.address].append(one)
        now = self._now()
        return tuple(
            Quarantine(address, sum(one.pages for one in held), now - held[0].since)
            for address, held in list(by_writer.items())[:MOST_QUARANTINES]
        )

    def _of(self, address: str) -> list[_Held]:
        return [one for one in self._held if one.writer.address == address]

    def _tell(self, held: _Held) -> None:
        address, age_s = held.writer.address, self._now() - held.since
        if age_s < ALARM_S or address in self._told:
            return
        self._told.add(address)
        LOG.error(
            "%d pages cannot be used: the prefill worker at %s, on this machine, may still write "
            "into them, and has not answered for %.0f s. They are free once it answers or its "
            "engine's process has ended: continue it if it is stopped, else kill it",
            sum(one.pages for one in self._of(address)),
            address,
            age_s,
        )


def _is_same(one: Writer, other: Writer) -> bool:
    """Whether both are one life of one worker: what an earlier life holds is not held against the
    next."""
    return (one.address, one.incarnation) == (other.address, other.incarnation)
