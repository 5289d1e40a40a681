"""Free pages of a prefill engine that are pushed once, to measure the link to a decode worker.

Their content does not matter: they are digested and verified like a prompt's. They are held only
while most of the free pages stay free. The engine calls it from its one thread.
"""

from __future__ import annotations

import itertools

from effuse.kvtransfer.connector import Pushed, PushFailed
from effuse.kvtransfer.digest import prompt_digest
from effuse.kvtransfer.messages import AttemptId, BoundaryState, PageRef, Reservation
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.sender import Ended, HandoffSender, SendReport
from effuse.placement.records import FEW_PAGES
from effuse.prefill_worker.prefix_cache import PrefixCache
from effuse.prefill_worker.prompts import prompt_pushed, push_failed
from effuse.worker.engine_process import Outbox

_NOTHING = BoundaryState(prompt_len=0, prompt_digest=prompt_digest(()), tail_token_ids=())


class RehearsalSender:
    """All rehearsals that an engine pushes."""

    def __init__(
        self, pool: PagePool, cache: PrefixCache, sender: HandoffSender, outbox: Outbox
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._sender = sender
        self._outbox = outbox
        self._held: dict[str, tuple[AttemptId, tuple[PageRef, ...]]] = {}  # by transfer id
        self._aborting: set[str] = set()  # those whose AbortDone is due

    def pages(self) -> list[PageRef]:
        """All held pages; for the audit."""
        return [page for _, pages in self._held.values() for page in pages]

    def push(self, reservation: Reservation, *, is_busy: bool, in_groups: bool = False) -> None:
        """Pushes as many free pages as are reserved, group by group of layers if `in_groups`.

        Refuses if prompts may need the pages; the few for warming up a link are always available.
        """
        attempt, count = reservation.attempt, len(reservation.pages)
        if attempt.transfer_id in self._held:
            self._outbox.failed(attempt, "ALREADY_EXISTS", "the rehearsal is running")
            return
        may_start = not is_busy or count <= FEW_PAGES
        has_room = may_start and 2 * count <= self._cache.num_free
        pages = self._cache.allocate(count) if has_room else None
        if pages is None:
            text = (
                f"prompts need the pages: a rehearsal cannot have {count} of "
                f"{self._cache.num_free} free pages"
            )
            self._outbox.failed(attempt, "RESOURCE_EXHAUSTED", text, retryable=True)
            return
        self._held[attempt.transfer_id] = attempt, pages
        self._sender.begin(attempt)
        self._sender.address(reservation)
        # One more group of layers is final each time that the connector polls.
        num_final = itertools.count(1).__next__ if in_groups else None
        page_ids = [page.page_id for page in pages]
        self._sender.pages_ready(attempt.transfer_id, page_ids, num_final)
        self._sender.computed(attempt.transfer_id, lambda: _NOTHING)

    def take_report(self, report: SendReport) -> None:
        """Handles the result of a rehearsal's push."""
        attempt, pages = self._held[report.transfer_id]
        match report:
            case Pushed():
                self._outbox.say(prompt_pushed(attempt, report))
            case PushFailed():
                self._outbox.say(push_failed(attempt, report))
            case Ended():
                del self._held[report.transfer_id]
                self._pool.release(pages)
                if report.transfer_id in self._aborting:
                    self._aborting.discard(report.transfer_id)
                    self._outbox.abort_done(attempt, was_running=True)

    def abort(self, transfer_id: str) -> bool:
        """Ends a rehearsal, which AbortDone reports; False if there is none."""
        if transfer_id not in self._held:
            return False
        self._aborting.add(transfer_id)
        self._sender.abort(transfer_id)
        return True
