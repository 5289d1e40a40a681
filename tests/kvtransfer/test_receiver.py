"""The decode side of a handoff: pages change hands only when no writer can reach them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from auditing import AuditError, audit_pool, quarantined
from kvtransfer.fixtures import SMALL, boundary, filled, print_of
from kvtransfer.loopback import Hub, LoopbackConnector

from effuse.kvtransfer.connector import ArrivalRefused, Arrived, Cause, FinishPush, PushPages
from effuse.kvtransfer.ends import HandoffReceiver, HandoffSender
from effuse.kvtransfer.layout import Identity, PageMemory
from effuse.kvtransfer.messages import AttemptId, PageRef, Reservation
from effuse.kvtransfer.pool import PagePool, PageState

ATTEMPT = AttemptId("request-1", 1, "transfer-1")
BOUNDARY = boundary()


class Desk:
    """A receiver and a writer that pushes into it on command."""

    def __init__(self, *, is_two_sided: bool = False) -> None:
        self.time = 50.0
        hub = Hub(is_two_sided=is_two_sided)
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
        identity = Identity("decode-1", print_of(SMALL), SMALL)
        self.receiver = HandoffReceiver(self.pool, self.connector, identity, lease_s=5.0)

    def now(self) -> float:
        return self.time

    def reserve(self, attempt: AttemptId = ATTEMPT) -> Reservation:
        pages = self.pool.allocate(2)
        assert pages is not None
        return self.receiver.reserve(attempt, pages, "prefill-1", self.time)

    def push(self, reservation: Reservation) -> None:
        self.writer.send(PushPages(reservation, (0, 3), 0))
        self.writer.send(FinishPush(reservation, lambda: BOUNDARY))

    def count(self, state: PageState) -> int:
        return self.pool.count(state)


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    audit_pool(made.pool, quarantined(made.receiver))
    made.writer.close()
    made.connector.close()


def test_a_verified_handoff_gives_its_pages_to_the_caller(desk: Desk) -> None:
    reservation = desk.reserve()
    assert desk.count(PageState.RECEIVING) == 2
    assert reservation.lease_s == 5.0
    desk.push(reservation)
    (arrived,) = desk.receiver.poll(desk.time)
    assert isinstance(arrived, Arrived)
    assert (arrived.transfer_id, arrived.seconds) == ("transfer-1", 0.0)
    assert arrived.manifest.boundary == BOUNDARY
    assert desk.count(PageState.COMMITTED) == 2
    desk.pool.release(reservation.pages)


def test_aborted_pages_are_quarantined_until_the_writer_is_gone(desk: Desk) -> None:
    reservation = desk.reserve()
    desk.receiver.abort("transfer-1")
    assert desk.count(PageState.QUARANTINED) == 2
    desk.push(reservation)
    assert desk.receiver.poll(desk.time) == []
    assert desk.receiver.is_open("transfer-1")
    with pytest.raises(AuditError, match="2 pages leaked"):
        audit_pool(desk.pool, held=())
    desk.receiver.writer_gone("transfer-1", has_drained=True)
    assert desk.receiver.is_open("transfer-1")
    assert desk.receiver.poll(desk.time) == []
    assert desk.pool.num_free == 6 and not desk.receiver.is_open("transfer-1")


def test_pages_of_a_writer_that_died_wait_until_the_connector_has_shut_it_out(desk: Desk) -> None:
    """While others write to the same address, its bytes may still arrive."""
    reservation = desk.reserve()
    other = desk.reserve(AttemptId("request-2", 1, "transfer-2"))
    failed = desk.receiver.writer_gone("transfer-1", has_drained=False)
    assert isinstance(failed, ArrivalRefused) and failed.cause is Cause.PEER
    assert desk.receiver.poll(desk.time) == []
    assert desk.count(PageState.QUARANTINED) == 2
    assert quarantined(desk.receiver) == list(reservation.pages)
    desk.push(other)
    (arrived,) = desk.receiver.poll(desk.time)
    assert isinstance(arrived, Arrived) and arrived.transfer_id == "transfer-2"
    assert desk.receiver.poll(desk.time) == []
    assert desk.count(PageState.QUARANTINED) == 0
    desk.pool.release(other.pages)


def test_over_a_two_sided_connector_nothing_is_quarantined_for_long() -> None:
    desk = Desk(is_two_sided=True)
    desk.reserve()
    desk.receiver.abort("transfer-1")
    assert desk.receiver.poll(desk.time) == []
    assert desk.pool.num_free == 6 and not desk.receiver.is_open("transfer-1")
    assert desk.receiver.writer_gone("transfer-1", has_drained=False) is None


def test_a_lease_that_runs_out_fails_the_handoff_once(desk: Desk) -> None:
    desk.reserve()
    desk.time += 4.9
    assert desk.receiver.poll(desk.time) == []
    desk.time += 0.1
    (failed,) = desk.receiver.poll(desk.time)
    assert isinstance(failed, ArrivalRefused)
    assert (failed.cause, failed.transfer_id) == (Cause.LEASE, "transfer-1")
    assert "did not arrive within 5 s" in failed.message
    desk.time += 100.0
    assert desk.receiver.poll(desk.time) == []
    assert desk.count(PageState.QUARANTINED) == 2
    desk.receiver.writer_gone("transfer-1", has_drained=True)


def test_what_arrives_wrong_fails_the_handoff_and_stays_in_quarantine(desk: Desk) -> None:
    reservation = desk.reserve()
    stale = tuple(PageRef(page.page_id, page.generation + 1) for page in reservation.pages)
    desk.push(msgspec.structs.replace(reservation, pages=stale))
    (failed,) = desk.receiver.poll(desk.time)
    assert isinstance(failed, ArrivalRefused) and failed.cause is Cause.GENERATION
    assert desk.count(PageState.QUARANTINED) == 2
    desk.receiver.writer_gone("transfer-1", has_drained=True)
    assert desk.receiver.poll(desk.time) == [] and desk.pool.num_free == 6


def test_a_writer_that_dies_fails_the_handoff_and_frees_its_pages(desk: Desk) -> None:
    desk.reserve()
    failed = desk.receiver.writer_gone("transfer-1", has_drained=True)
    assert isinstance(failed, ArrivalRefused) and failed.cause is Cause.PEER
    assert desk.receiver.poll(desk.time) == []
    assert desk.receiver.poll(desk.time) == [] and desk.pool.num_free == 6


def test_nothing_happens_to_handoffs_that_are_unknown(desk: Desk) -> None:
    desk.receiver.abort("transfer-9")
    desk.receiver.writer_gone("transfer-9", has_drained=False)
    assert desk.receiver.poll(desk.time) == []


def test_a_transfer_id_is_reserved_once(desk: Desk) -> None:
    desk.reserve()
    with pytest.raises(ValueError, match="transfer-1 is already reserved"):
        desk.receiver.reserve(ATTEMPT, (), "prefill-1", desk.time)
    desk.receiver.writer_gone("transfer-1", has_drained=True)


class Queue:
    """The handoff part of a prefill engine whose one prompt waits for its turn."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.sender = HandoffSender(desk.writer, reservation_s=30.0, now=desk.now)
        self.sender.begin(ATTEMPT)
        self.reserved = desk.reserve()
        self.sender.address(self.reserved)

    def wait(self, seconds: int, *, looks: bool = True) -> list[Arrived | ArrivalRefused]:
        """The receiver's reports meanwhile; the prompt's engine `looks` at its own every second."""
        reports = []
        for _ in range(seconds):
            self.desk.time += 1.0
            if looks:
                assert self.sender.poll() == []
            reports += self.desk.receiver.poll(self.desk.time)
        return reports

    def compute(self) -> None:
        self.sender.pages_ready("transfer-1", [0, 3])
        self.sender.computed("transfer-1", lambda: BOUNDARY)


def test_a_prompt_may_wait_for_longer_than_the_lease_while_its_engine_lives(desk: Desk) -> None:
    """Otherwise a queue as long as the lease computes prompts without waiting requests."""
    queue = Queue(desk)
    assert queue.wait(23) == []
    queue.compute()
    (arrived,) = desk.receiver.poll(desk.time)
    assert isinstance(arrived, Arrived)
    desk.pool.release(queue.reserved.pages)


def test_a_prompt_whose_engine_stands_still_loses_its_reservation(desk: Desk) -> None:
    queue = Queue(desk)
    assert queue.wait(7) == []
    (failed,) = queue.wait(5, looks=False)
    assert isinstance(failed, ArrivalRefused) and failed.cause is Cause.LEASE


def test_a_computed_prompt_has_its_lease_to_arrive_and_no_more(desk: Desk) -> None:
    queue = Queue(desk)
    assert queue.wait(7) == []
    desk.writer._hub.pause()
    queue.compute()
    (failed,) = queue.wait(5, looks=False)
    assert isinstance(failed, ArrivalRefused) and failed.cause is Cause.LEASE
