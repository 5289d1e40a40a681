"""The decode side of a handoff: pages change hands only when nobody can write into them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from kvtransfer.fixtures import SMALL, boundary, filled, print_of

from effuse.kvtransfer.connector import Cause
from effuse.kvtransfer.loopback import Hub, LoopbackConnector
from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import AttemptId, PageRef, Reservation
from effuse.kvtransfer.pool import AuditError, PagePool, PageState
from effuse.kvtransfer.receiver import HandoffFailed, HandoffReceiver, HandoffVerified

ATTEMPT = AttemptId("request-1", 1, "transfer-1")
BOUNDARY = boundary()


class Desk:
    """A receiver and a writer that pushes into it when told."""

    def __init__(self) -> None:
        self.time = 50.0
        hub = Hub()
        self.pool = PagePool(6)
        self.writer, self.connector = (
            LoopbackConnector(hub, memory, name, print_of(SMALL), self.now)
            for memory, name in (
                (filled(SMALL, 6), "prefill-1"),
                (PageMemory(SMALL, 6), "decode-1"),
            )
        )
        self.writer.start()
        self.connector.start()
        self.receiver = HandoffReceiver(
            self.pool,
            self.connector,
            incarnation="decode-1",
            fingerprint=print_of(SMALL),
            page_bytes=SMALL.page_bytes,
            lease_s=5.0,
        )

    def now(self) -> float:
        return self.time

    def reserve(self, attempt: AttemptId = ATTEMPT) -> Reservation:
        pages = self.pool.allocate(2)
        assert pages is not None
        return self.receiver.reserve(attempt, pages, "prefill-1", self.time)

    def push(self, reservation: Reservation) -> None:
        self.writer.push_pages(reservation, [0, 3], 0)
        self.writer.finish(reservation, BOUNDARY)

    def count(self, state: PageState) -> int:
        return self.pool.count(state)


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.pool.audit(made.receiver.quarantined())
    made.writer.close()
    made.connector.close()


def test_a_verified_handoff_gives_its_pages_to_the_caller(desk: Desk) -> None:
    reservation = desk.reserve()
    assert desk.count(PageState.RECEIVING) == 2
    assert reservation.lease_s == 5.0
    desk.push(reservation)
    desk.time += 2.0
    (verified,) = desk.receiver.poll(desk.time)
    assert isinstance(verified, HandoffVerified)
    assert (verified.pages, verified.seconds) == (reservation.pages, 2.0)
    assert verified.manifest.boundary == BOUNDARY
    assert desk.count(PageState.COMMITTED) == 2
    desk.pool.release(verified.pages)


def test_aborted_pages_are_quarantined_until_the_writer_is_gone(desk: Desk) -> None:
    reservation = desk.reserve()
    desk.receiver.abort("transfer-1")
    assert desk.count(PageState.QUARANTINED) == 2
    desk.push(reservation)
    assert desk.receiver.poll(desk.time) == []
    assert desk.receiver.is_open("transfer-1")
    with pytest.raises(AuditError, match="2 pages leaked"):
        desk.pool.audit(held=())
    desk.receiver.writer_gone("transfer-1")
    assert desk.pool.num_free == 6 and not desk.receiver.is_open("transfer-1")


def test_a_lease_that_runs_out_fails_the_handoff_once(desk: Desk) -> None:
    desk.reserve()
    desk.time += 4.9
    assert desk.receiver.poll(desk.time) == []
    desk.time += 0.1
    (failed,) = desk.receiver.poll(desk.time)
    assert isinstance(failed, HandoffFailed)
    assert (failed.cause, failed.attempt) == (Cause.LEASE, ATTEMPT)
    assert "did not arrive within 5 s" in failed.message
    desk.time += 100.0
    assert desk.receiver.poll(desk.time) == []
    assert desk.count(PageState.QUARANTINED) == 2
    desk.receiver.writer_gone("transfer-1")


def test_what_arrives_wrong_fails_the_handoff_and_stays_in_quarantine(desk: Desk) -> None:
    reservation = desk.reserve()
    stale = tuple(PageRef(page.page_id, page.generation + 1) for page in reservation.pages)
    desk.push(msgspec.structs.replace(reservation, pages=stale))
    (failed,) = desk.receiver.poll(desk.time)
    assert isinstance(failed, HandoffFailed) and failed.cause is Cause.GENERATION
    assert desk.count(PageState.QUARANTINED) == 2
    desk.receiver.writer_gone("transfer-1")
    assert desk.receiver.poll(desk.time) == [] and desk.pool.num_free == 6


def test_a_writer_that_dies_fails_the_handoff_and_frees_its_pages(desk: Desk) -> None:
    desk.reserve()
    failed = desk.receiver.writer_gone("transfer-1")
    assert isinstance(failed, HandoffFailed) and failed.cause is Cause.PEER
    assert desk.receiver.poll(desk.time) == []
    assert desk.pool.num_free == 6


def test_nothing_happens_to_handoffs_that_are_unknown(desk: Desk) -> None:
    desk.receiver.abort("transfer-9")
    desk.receiver.writer_gone("transfer-9")
    assert desk.receiver.poll(desk.time) == []


def test_a_transfer_id_is_reserved_once(desk: Desk) -> None:
    desk.reserve()
    with pytest.raises(ValueError, match="transfer-1 is reserved already"):
        desk.receiver.reserve(ATTEMPT, (), "prefill-1", desk.time)
    desk.receiver.writer_gone("transfer-1")
