"""The connectors between real processes: arrivals, refusals, and the meaning of an abort."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from eventually import is_readable
from kvtransfer.fixtures import (
    DEADLINE_S,
    FIELD_NAMES,
    SMALL,
    address_of,
    boundary,
    changed,
    digests_of,
    filled,
    next_event,
    print_of,
    reservation,
    spoilt,
    with_shard,
)
from kvtransfer.receiver_process import LAYOUTS, make
from kvtransfer.remote import RemoteReceiver

from effuse.kvtransfer import zmq_transport
from effuse.kvtransfer.connector import (
    Cancel,
    Cause,
    Connector,
    ConnectorEvent,
    FinishPush,
    PushCancelled,
    Pushed,
    PushFailed,
    PushPages,
)
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import AttemptId, PageRef, ReceiverAddress, Reservation
from effuse.kvtransfer.thread import ThreadConnector

BOUNDARY = boundary(hidden=b"\x01" * 64)


@dataclass(frozen=True)
class Pair:
    """A sending connector here and a receiving one in another process."""

    kind: str
    source: PageMemory
    sender: ThreadConnector
    remote: RemoteReceiver

    def push(self, reserved: Reservation, pages: Sequence[int]) -> None:
        self.sender.send(PushPages(reserved, tuple(pages), 0))
        self.sender.send(FinishPush(reserved, lambda: BOUNDARY))

    def next_event(self, reserved: Reservation) -> ConnectorEvent:
        return next_event(self.sender, reserved.transfer_id)

    def end(self, reserved: Reservation) -> None:
        """Has the sender forget a push, for which it would poll until its lease is over."""
        self.sender.send(Cancel(reserved.transfer_id))
        next_event(self.sender, reserved.transfer_id, PushCancelled)

    def hear(self, reserved: Reservation) -> dict[str, Any]:
        return self.remote.hear(reserved.transfer_id)


@contextlib.contextmanager
def pair_of(kind: str, layout: str, num_pages: int) -> Iterator[Pair]:
    source = filled(LAYOUTS[layout], num_pages)
    sender = make(kind, source, "prefill-1")
    sender.start()
    try:
        with RemoteReceiver(kind, layout, num_pages) as remote:
            yield Pair(kind, source, sender, remote)
    finally:
        sender.close()


@pytest.fixture(scope="module", params=["zmq", "nixl"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair_of(request.param, "small", 20) as made:
        yield made


@pytest.fixture(scope="module", params=["zmq", "nixl"])
def large(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Its tests are in this order, because some leave traces: zeros, a spoilt page, a stopped
    receiver.
    """
    with pair_of(request.param, "large", 768) as made:
        yield made


@pytest.fixture
def alone() -> Iterator[ThreadConnector]:
    """A ZMQ connector without a peer."""
    connector = make("zmq", PageMemory(SMALL, 4), "prefill-1")
    connector.start()
    yield connector
    connector.close()


def digests(memory: PageMemory, pages: Sequence[int]) -> list[str]:
    return [digest.hex() for digest in digests_of(memory, pages)]


def test_pages_arrive_byte_for_byte(pair: Pair) -> None:
    scattered = [5, 6, 7, 2, 11]
    reserved = pair.remote.reserve([1, 2, 9, 10, 4])
    pair.sender.send(PushPages(reserved, (), 0))
    pair.sender.send(PushPages(reserved, tuple(scattered[:3]), 0))
    pair.sender.send(PushPages(reserved, tuple(scattered[3:]), 3))
    pair.sender.send(FinishPush(reserved, lambda: BOUNDARY))
    pushed, heard = pair.next_event(reserved), pair.hear(reserved)
    assert isinstance(pushed, Pushed), pushed
    assert (pushed.pages, pushed.num_bytes) == (5, 5 * SMALL.page_bytes)
    # NIXL's is only known if nothing else in the process has loaded UCX: see e2e/test_links.py.
    assert (pushed.route.name == "zmq over tcp") == (pair.kind == "zmq")
    assert (heard["event"], heard["tail"]) == ("received", [9])
    assert heard["digests"] == digests(pair.source, scattered)


def test_chunks_may_come_in_any_order_and_handoffs_at_once(pair: Pair) -> None:
    first, second = pair.remote.reserve([0, 1, 2]), pair.remote.reserve([12, 13])
    pair.sender.send(PushPages(first, (2,), 2))
    pair.sender.send(PushPages(second, (8, 9), 0))
    pair.sender.send(PushPages(first, (0, 1), 0))
    pair.sender.send(FinishPush(second, lambda: BOUNDARY))
    pair.sender.send(FinishPush(first, lambda: BOUNDARY))
    heard = [pair.remote.hear(), pair.remote.hear()]
    found = {words["transfer"]: words["digests"] for words in heard}
    assert found[first.transfer_id] == digests(pair.source, [0, 1, 2])
    assert found[second.transfer_id] == digests(pair.source, [8, 9])


def test_a_prompt_without_a_page_hands_over_its_boundary(pair: Pair) -> None:
    reserved = pair.remote.reserve([])
    pair.sender.send(FinishPush(reserved, lambda: BOUNDARY))
    assert isinstance(pair.next_event(reserved), Pushed)
    assert pair.hear(reserved)["event"] == "received"


def test_many_chunks_and_a_long_manifest(large: Pair) -> None:
    """48 MB in 64 KiB pages: more than a window, more than any one message."""
    order = [*range(0, 768, 2), *range(767, 0, -2)]
    reserved = large.remote.reserve(range(768))
    large.push(reserved, order)
    pushed, heard = large.next_event(reserved), large.hear(reserved)
    assert isinstance(pushed, Pushed), pushed
    assert heard["digests"] == digests(large.source, order)


@pytest.mark.parametrize("name", [*FIELD_NAMES, "page_bytes"])
def test_a_reservation_of_another_model_is_refused_before_a_write(
    alone: Connector, name: str
) -> None:
    """The same check in every connector, so one of them stands for all."""
    reserved = nowhere()
    if name == "page_bytes":
        reserved = with_shard(reserved, page_bytes=SMALL.page_bytes * 2)
    else:
        reserved = msgspec.structs.replace(reserved, fingerprint=changed(print_of(SMALL), name))
    alone.send(PushPages(reserved, (0,), 0))
    failed = next_event(alone, reserved.transfer_id)
    assert isinstance(failed, PushFailed)
    assert failed.cause is (Cause.SIZE if name == "page_bytes" else Cause.FINGERPRINT)
    assert name == "page_bytes" or repr(name) in failed.message


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"pages": (PageRef(3, 0),)}, "GENERATION"),
        ({"pages": (PageRef(4, 1),)}, "COVERAGE"),
        ({"pages": (PageRef(3, 1), PageRef(4, 1))}, "COVERAGE"),
        ({"incarnation": "decode-0"}, "INCARNATION"),
        ({"attempt": 2}, "ATTEMPT"),
        ({"writer": "prefill-0"}, "INCARNATION"),
    ],
    ids=str,
)
def test_what_was_not_reserved_is_refused(
    pair: Pair, change: dict[str, object], cause: str
) -> None:
    reserved = pair.remote.reserve([3], writer=str(change.get("writer", "prefill-1")))
    other = AttemptId(reserved.attempt.request_id, 2, reserved.transfer_id)
    words: dict[str, object] = {"attempt": other} if "attempt" in change else change
    words = {name: word for name, word in words.items() if name != "writer"}
    false = msgspec.structs.replace(reserved, **words)
    pair.push(false, range(len(false.pages)))
    heard = pair.hear(reserved)
    assert (heard["event"], heard["cause"]) == ("refused", cause)
    if pair.kind == "zmq" or cause not in ("INCARNATION", "ATTEMPT"):
        # Over NIXL, a writer that could not introduce itself gets no answer: it has its lease.
        failed = pair.next_event(reserved)
        assert isinstance(failed, PushFailed) and failed.cause.name == cause
    pair.end(reserved)


def test_a_push_that_overlaps_itself_fails(pair: Pair) -> None:
    reserved = pair.remote.reserve([3, 4])
    pair.sender.send(PushPages(reserved, (0, 1), 0))
    pair.sender.send(PushPages(reserved, (2,), 1))
    failed = pair.next_event(reserved)
    assert isinstance(failed, PushFailed) and failed.cause is Cause.COVERAGE
    pair.sender.send(Cancel(reserved.transfer_id))
    assert isinstance(pair.next_event(reserved), PushCancelled)


def test_a_push_that_does_not_cover_its_pages_fails(pair: Pair) -> None:
    reserved = pair.remote.reserve([3, 4])
    pair.push(reserved, [0])
    failed = pair.next_event(reserved)
    assert isinstance(failed, PushFailed) and failed.cause is Cause.COVERAGE
    assert "1 pages were not pushed" in failed.message


def test_nothing_of_a_forgotten_transfer_is_accepted(pair: Pair) -> None:
    known = pair.remote.reserve([])
    pair.push(known, [])
    assert isinstance(pair.next_event(known), Pushed)
    reserved = pair.remote.reserve([3])
    before = pair.remote.digests()
    pair.remote.forget(reserved.transfer_id)
    pair.push(reserved, [0])
    failed = pair.next_event(reserved)
    assert isinstance(failed, PushFailed) and failed.cause is Cause.UNKNOWN_TRANSFER
    if pair.kind == "zmq":  # a one-sided writer places its bytes nevertheless
        assert pair.remote.digests() == before
    last = pair.remote.reserve([])
    pair.push(last, [])
    assert pair.remote.hear()["transfer"] == last.transfer_id


def test_cancelling_what_is_unknown_or_over_is_answered(pair: Pair) -> None:
    pair.sender.send(Cancel("never-begun"))
    assert next_event(pair.sender, "never-begun") == PushCancelled("never-begun")
    reserved = pair.remote.reserve([3])
    pair.push(reserved, [0])
    assert isinstance(pair.next_event(reserved), Pushed)
    pair.sender.send(Cancel(reserved.transfer_id))
    assert isinstance(pair.next_event(reserved), PushCancelled)


def test_after_cancelled_nothing_more_is_written(
    large: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        zmq_transport.ZmqTransport, "drain_s", DEADLINE_S
    )  # however long the receiver takes
    reserved = large.remote.reserve(range(768))
    large.sender.send(PushPages(reserved, tuple(range(768)), 0))
    large.sender.send(Cancel(reserved.transfer_id))
    assert isinstance(large.next_event(reserved), PushCancelled)
    before = large.remote.digests()
    large.source.tensor.zero_()
    last = large.remote.reserve([])
    large.push(last, [])
    assert large.hear(last)["event"] == "received"
    assert large.remote.digests() == before


def test_a_byte_that_changes_in_memory_is_refused_on_both_sides(large: Pair) -> None:
    large.remote.ask(do="spoil", page=3)
    while large.remote.hear() != {"spoilt": True}:
        pass
    reserved = large.remote.reserve(range(8))
    large.push(reserved, range(8))
    failed, heard = large.next_event(reserved), large.hear(reserved)
    assert isinstance(failed, PushFailed) and failed.cause is Cause.DIGEST
    assert (heard["event"], heard["cause"]) == ("refused", "DIGEST")
    assert "digest" in failed.message and failed.message == heard["message"]


def test_a_frozen_receiver_is_noticed_by_the_lease(large: Pair) -> None:
    """But one-sided writes that were posted may land whenever it thaws: only then is it over."""
    met = large.remote.reserve([])
    large.push(met, [])
    assert isinstance(large.next_event(met), Pushed)
    reserved = large.remote.reserve(range(768), lease_s=0.5)
    os.kill(large.remote.process.pid, signal.SIGSTOP)
    large.push(reserved, range(768))
    failed = large.next_event(reserved)
    assert isinstance(failed, PushFailed) and failed.cause is Cause.LEASE
    large.sender.send(Cancel(reserved.transfer_id))
    if large.kind == "nixl":
        large.sender.send(Cancel("another"))
        assert next_event(large.sender, "another") == PushCancelled("another")
        os.kill(large.remote.process.pid, signal.SIGCONT)
    assert isinstance(large.next_event(reserved), PushCancelled)


def test_a_receiver_that_dies_fails_the_push_and_is_reached_anew(pair: Pair) -> None:
    with RemoteReceiver(pair.kind, "small", 8, "decode-2") as remote:
        reserved = remote.reserve([3, 4], number=100, lease_s=20.0)
        pair.sender.send(PushPages(reserved, (0,), 0))
        other = remote.reserve([], number=101)
        pair.push(other, [])
        assert isinstance(pair.next_event(other), Pushed)
    pair.sender.send(PushPages(reserved, (1,), 1))
    pair.sender.send(FinishPush(reserved, lambda: BOUNDARY))
    failed = pair.next_event(reserved)
    assert isinstance(failed, PushFailed), failed
    assert failed.cause in (Cause.PEER, Cause.LEASE)
    pair.sender.send(Cancel(reserved.transfer_id))
    assert isinstance(pair.next_event(reserved), PushCancelled)
    with RemoteReceiver(pair.kind, "small", 8, "decode-2") as again:
        reserved = again.reserve([0], number=102)
        pair.push(reserved, [4])
        assert isinstance(pair.next_event(reserved), Pushed)
        assert again.hear()["digests"] == digests(pair.source, [4])


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:9", "nonsense", "tcp://nowhere"])
def test_an_endpoint_where_nobody_listens_fails_the_push(alone: Connector, endpoint: str) -> None:
    reserved = nowhere(endpoint)
    alone.send(PushPages(reserved, (0,), 0))
    failed = next_event(alone, reserved.transfer_id)
    assert isinstance(failed, PushFailed)
    assert failed.cause in (Cause.PEER, Cause.LEASE)
    alone.send(Cancel(reserved.transfer_id))
    assert isinstance(next_event(alone, reserved.transfer_id), PushCancelled)


@pytest.mark.parametrize(
    "change",
    [
        {"agent_name": "decode-9"},
        {"agent_metadata": b"junk" * 50},
        {"agent_metadata": "name"},  # the receiver's own, with a name that is not UTF-8
        {"agent_metadata": "bit"},  # and with a bit flipped, at some of which UCX ends the process
        {"pool_address": 4096},
        {"memory_kind": ""},
    ],
    ids=["name", "junk", "not UTF-8", "flipped", "pool", "kind"],
)
def test_false_addresses_are_refused_and_the_honest_one_still_works(
    pair: Pair, change: dict[str, object]
) -> None:
    honest = pair.remote.reserve([3])
    if pair.kind != "nixl":
        change = {"endpoint": "tcp://decode-9"}
    elif isinstance(what := change.get("agent_metadata"), str):
        change = {"agent_metadata": spoilt(address_of(honest), what)}
    address = msgspec.structs.replace(address_of(honest), **change)
    false = msgspec.structs.replace(
        with_shard(honest, address=address), attempt=AttemptId("request-1", 1, "false")
    )
    pair.push(false, [0])
    failed = pair.next_event(false)
    assert isinstance(failed, PushFailed)
    assert failed.cause in (Cause.PEER, Cause.MALFORMED)
    pair.push(honest, [0])
    assert isinstance(pair.next_event(honest), Pushed)
    assert pair.hear(honest)["digests"] == digests(pair.source, [0])


def test_a_connector_that_waits_uses_no_processor_time(pair: Pair) -> None:
    """NIXL's own progress thread would use a whole core."""
    pair.sender.poll()  # the traces of earlier tests would end the wait immediately
    before = time.process_time()
    is_readable(pair.sender.fileno(), 0.5)
    assert time.process_time() - before < 0.25


def nowhere(endpoint: str = "tcp://127.0.0.1:9") -> Reservation:
    """A reservation that no receiver made."""
    address = ReceiverAddress(connector="zmq", endpoint=endpoint)
    return reservation(PageMemory(SMALL, 4), address, (PageRef(1, 1),), lease_s=0.3)


def test_many_pushes_to_nobody_fail_one_by_one(
    alone: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More messages than a socket queues by default: the connector must outlive them."""
    # Each fails for itself, by its lease.
    monkeypatch.setattr(zmq_transport, "CONNECT_S", DEADLINE_S)
    pushes = [
        msgspec.structs.replace(nowhere(), attempt=AttemptId("r", 1, f"nobody-{number}"))
        for number in range(1200)
    ]
    for reserved in pushes:
        alone.send(PushPages(reserved, (0,), 0))
    failed = next_event(alone, "nobody-1199")
    assert isinstance(failed, PushFailed) and failed.cause is Cause.LEASE
