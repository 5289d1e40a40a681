"""Free pages of a decode engine that a prefill worker writes once, to measure the way.

They are reserved, written and verified like a prompt's, and free again afterwards. They are held
only while most of what is free stays so, and for one rehearsal at a time.
"""

from effuse.decode_worker.events import handoff_failed
from effuse.kvtransfer.connector import Arrived
from effuse.kvtransfer.messages import AttemptId, PageRef
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.receiver import HandoffFailed, HandoffReceiver
from effuse.worker.engine_process import Outbox
from effuse.worker.messages import Reserved, StartRehearsal, Verified

MOST_BYTES = 64 << 20  # about what the prompt of a large model takes
MOST_PAGES = 1 << 14  # each is named and digested
LEAST_SHARE = 8  # of the pool: no more than one page in so many


class RehearsalReceiver:
    """The rehearsal that an engine receives. Its own thread calls it."""

    def __init__(self, pool: PagePool, handoffs: HandoffReceiver, outbox: Outbox) -> None:
        self._pool = pool
        self._handoffs = handoffs
        self._outbox = outbox
        self._attempt: AttemptId | None = None  # while its pages may still arrive
        self._pages: tuple[PageRef, ...] = ()
        self._last = ""  # transfer id of the last one, which may have left pages in quarantine

    def pages(self) -> tuple[PageRef, ...]:
        """The pages that are held, those in quarantine left out; for the audit."""
        return self._pages

    def reserve(self, message: StartRehearsal, *, is_busy: bool, now: float) -> None:
        """Opens free pages to the writer; refuses where requests may need them."""
        attempt, free = message.attempt, self._pool.num_free
        if not self._handoffs.can_receive:
            text = "no connector: only local prefill"
            self._outbox.failed(attempt, "FAILED_PRECONDITION", text)
            return
        most = min(MOST_BYTES // self._handoffs.page_bytes, self._pool.num_pages // LEAST_SHARE)
        count = min(max(1, most), MOST_PAGES, message.most_pages)
        if self._attempt is not None or self._handoffs.is_open(self._last):
            self._refuse(attempt, "another rehearsal is under way")
        elif is_busy or 2 * count > free:
            self._refuse(attempt, f"requests come first: {count} of {free} free pages are too many")
        else:
            pages = self._pool.allocate(count)
            assert pages is not None, "they were counted"
            self._attempt, self._pages, self._last = attempt, pages, attempt.transfer_id
            reservation = self._handoffs.reserve(attempt, pages, message.writer, now)
            self._outbox.say(Reserved(reservation=reservation))

    def take_report(self, report: Arrived | HandoffFailed) -> bool:
        """Takes in how a handoff ended; False where it is not of the rehearsal."""
        attempt, pages = self._attempt, self._pages
        if attempt is None or report.transfer_id != attempt.transfer_id:
            return False
        self._attempt, self._pages = None, ()
        if isinstance(report, HandoffFailed):
            self._outbox.say(handoff_failed(attempt, report))
        else:
            self._pool.release(pages)
            self._outbox.say(
                Verified(
                    attempt=attempt,
                    bytes=report.manifest.num_bytes,
                    pages=len(pages),
                    handoff_s=report.seconds,
                )
            )
        return True

    def abort(self, transfer_id: str) -> bool:
        """Gives the rehearsal up; False where there is none of this name."""
        if self._attempt is None or self._attempt.transfer_id != transfer_id:
            return False
        self._attempt, self._pages = None, ()
        self._handoffs.abort(transfer_id)
        return True

    def _refuse(self, attempt: AttemptId, message: str) -> None:
        self._outbox.failed(attempt, "RESOURCE_EXHAUSTED", message, retryable=True)
