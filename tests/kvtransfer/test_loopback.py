"""The transport within one process behaves like the others, and can be held back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import pytest
from kvtransfer.fixtures import (
    SMALL,
    address_of,
    boundary,
    filled,
    print_of,
    reservation,
    with_shard,
)
from kvtransfer.loopback import Hub, LoopbackConnector

from effuse.kvtransfer.connector import (
    ArrivalRefused,
    Arrived,
    Cancel,
    Cause,
    Expect,
    Fenced,
    FinishPush,
    Forget,
    PushCancelled,
    Pushed,
    PushFailed,
    PushPages,
    Route,
)
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import PageRef, Reservation

BOUNDARY = boundary()
PAGES = (PageRef(4, 1), PageRef(2, 3))


@dataclass
class Pair:
    """Two connectors in one hub."""

    hub: Hub
    source: PageMemory
    target: PageMemory
    sender: LoopbackConnector
    receiver: LoopbackConnector

    def reserve(self, writer: str | None = "prefill-1") -> Reservation:
        reserved = reservation(self.target, self.receiver.describe(), PAGES)
        self.receiver.send(Expect(reserved, writer))
        return reserved

    def push(self, reserved: Reservation) -> None:
        self.sender.send(PushPages(reserved, (1,), 0))
        self.sender.send(PushPages(reserved, (5,), 1))
        self.sender.send(FinishPush(reserved, lambda: BOUNDARY))


@pytest.fixture(params=[True, False], ids=["two_sided", "one_sided"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    hub = Hub(is_two_sided=request.param)
    source, target = filled(SMALL, 6), PageMemory(SMALL, 6)
    sender, receiver = (
        LoopbackConnector(hub, memory, name, print_of(SMALL), lambda: 7.0)
        for memory, name in ((source, "prefill-1"), (target, "decode-1"))
    )
    sender.start()
    receiver.start()
    yield Pair(hub, source, target, sender, receiver)
    sender.close()
    receiver.close()


def test_pages_and_boundary_arrive(pair: Pair) -> None:
    reserved = pair.reserve()
    pair.push(reserved)
    num_bytes, route = 2 * SMALL.page_bytes, Route("memory")
    assert pair.sender.poll() == [Pushed("transfer-1", 2, num_bytes, 0.0, route)]
    (arrived,) = pair.receiver.poll()
    assert isinstance(arrived, Arrived)
    assert arrived.manifest.boundary == BOUNDARY
    for page, source in zip(PAGES, (1, 5), strict=True):
        assert pair.target.bytes_at(page.page_id) == pair.source.bytes_at(source)


def test_what_is_held_back_is_delivered_later_or_never(pair: Pair) -> None:
    pair.hub.pause()
    reserved = pair.reserve()
    pair.push(reserved)
    assert pair.sender.poll() == [] and not pair.target.tensor.any()
    pair.sender.send(Cancel("transfer-1"))
    assert pair.sender.poll() == [PushCancelled("transfer-1")]
    pair.hub.resume()
    assert pair.sender.poll() == [] and pair.receiver.poll() == []
    assert not pair.target.tensor.any()


def test_a_forgotten_transfer_is_refused(pair: Pair) -> None:
    reserved = pair.reserve()
    pair.receiver.send(Forget("transfer-1"))
    pair.push(reserved)
    failed = pair.sender.poll()[0]
    assert isinstance(failed, PushFailed) and failed.cause is Cause.UNKNOWN_TRANSFER
    assert pair.receiver.poll() == ([Fenced("transfer-1")] if pair.hub.is_two_sided else [])
    assert pair.target.tensor.any() != pair.hub.is_two_sided  # as no one-sided writer is stopped


def test_another_writer_is_refused_on_both_sides(pair: Pair) -> None:
    pair.push(pair.reserve(writer="prefill-2"))
    failed = pair.sender.poll()[0]
    assert isinstance(failed, PushFailed) and failed.cause is Cause.INCARNATION


def test_bytes_that_change_on_the_way_are_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = pair.target.write

    def spoil(
        page_ids: Sequence[int], groups: range, payload: Sequence[memoryview], heads: range
    ) -> None:
        write(page_ids, groups, payload, heads)
        pair.target.bytes_at(page_ids[0])[3] ^= 1

    monkeypatch.setattr(pair.target, "write", spoil)
    pair.push(pair.reserve())
    refused, *fenced = pair.receiver.poll()
    assert fenced == ([Fenced("transfer-1")] if pair.hub.is_two_sided else [])
    assert isinstance(refused, ArrivalRefused) and refused.cause is Cause.DIGEST
    failed = pair.sender.poll()[0]
    assert isinstance(failed, PushFailed) and failed.cause is Cause.DIGEST


def test_a_peer_that_left_fails_the_push(pair: Pair) -> None:
    reserved = pair.reserve()
    away = msgspec.structs.replace(address_of(reserved), endpoint="decode-0")
    pair.push(with_shard(reserved, address=away))
    failed = pair.sender.poll()[0]
    assert isinstance(failed, PushFailed) and failed.cause is Cause.PEER
