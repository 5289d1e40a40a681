"""How a transfer ends that was given up: nothing of it may land once it is fenced."""

from __future__ import annotations

import pytest
from kvtransfer.fixtures import address_of
from kvtransfer.reception_scene import Scene

from effuse.kvtransfer.connector import ArrivalRefused, Cause, Fenced
from effuse.kvtransfer.messages import PageRef


@pytest.fixture
def one_sided() -> Scene:
    return Scene(is_two_sided=False)


def test_a_two_sided_transfer_is_fenced_once_it_is_forgotten() -> None:
    two_sided = Scene()
    two_sided.receptions.forget("transfer-1")
    two_sided.receptions.fence("transfer-1", has_drained=False)
    assert two_sided.events == [Fenced("transfer-1")]
    assert two_sided.transport.renewed == []


def test_copies_that_are_under_way_are_awaited_before_pages_are_free() -> None:
    """On a GPU digests are queued behind the copies into the pages."""
    slow = Scene(slow=True)
    slow.begin()
    slow.send()
    slow.receptions.forget("transfer-1")
    assert slow.events == [] and slow.receptions.is_moving
    slow.digester.may_show = True
    slow.receptions.turn()
    assert slow.events == [Fenced("transfer-1")] and not slow.receptions.is_moving


def test_the_engines_word_frees_no_page_of_a_refused_transfer_before_copies_end() -> None:
    slow = Scene(slow=True)
    slow.begin()
    slow.send(0, 2)
    slow.send(0, 1)  # a second time: refused, while the copies of the first are under way
    slow.receptions.forget("transfer-1")  # by the engine, which knows of it
    assert [type(event) for event in slow.events] == [ArrivalRefused]
    slow.digester.may_show = True
    slow.receptions.turn()
    assert slow.events[1:] == [Fenced("transfer-1")]


def test_a_one_sided_writer_is_fenced_by_its_word(one_sided: Scene) -> None:
    one_sided.begin()
    one_sided.receptions.forget("transfer-1")
    one_sided.receptions.turn()
    assert one_sided.events == []
    one_sided.receptions.fence("transfer-1", has_drained=True)
    assert one_sided.events == [Fenced("transfer-1")]
    assert one_sided.transport.renewed == []


def test_the_address_of_a_writer_that_died_is_shut_off_before_its_pages_are_free(
    one_sided: Scene,
) -> None:
    address = address_of(one_sided.reserved)
    one_sided.begin()
    one_sided.receptions.forget("transfer-1")
    one_sided.receptions.fence("transfer-1", has_drained=False)
    assert one_sided.transport.renewed == [address] and one_sided.events == []
    one_sided.receptions.turn()
    assert one_sided.transport.shut == [address]
    assert one_sided.events == [Fenced("transfer-1")]


def test_an_address_that_others_write_to_is_shut_off_after_them(one_sided: Scene) -> None:
    other = one_sided.expect([PageRef(0, 1)], number=2)
    given_up = one_sided.expect([PageRef(5, 1)], number=3)
    elsewhere = one_sided.expect([PageRef(2, 1)], number=4, port=2)
    for reserved in (one_sided.reserved, given_up):
        one_sided.receptions.forget(reserved.transfer_id)
    one_sided.receptions.fence("transfer-1", has_drained=False)
    one_sided.receptions.turn()
    assert one_sided.transport.shut == [] and one_sided.events == []
    one_sided.receptions.forget(other.transfer_id)
    one_sided.receptions.turn()
    assert one_sided.transport.shut == [address_of(one_sided.reserved)]
    # The writers of the other two may live and write by other ways than the connection.
    assert one_sided.events == [Fenced("transfer-1")]
    for reserved in (other, given_up):
        one_sided.receptions.fence(reserved.transfer_id, has_drained=True)
    assert one_sided.events[1:] == [Fenced("transfer-2"), Fenced("transfer-3")]
    assert len(one_sided.receptions) == 1 and elsewhere.transfer_id == "transfer-4"


def test_a_reservation_that_names_an_address_which_was_shut_off_is_refused_at_once(
    one_sided: Scene,
) -> None:
    """The engine gave the address out just before, and asks for the transfer just after."""
    one_sided.receptions.forget("transfer-1")
    one_sided.receptions.fence("transfer-1", has_drained=False)
    one_sided.receptions.turn()
    assert one_sided.events == [Fenced("transfer-1")]
    one_sided.expect([PageRef(0, 1)], number=2)
    refused = one_sided.events[-1]
    assert isinstance(refused, ArrivalRefused)
    assert (refused.transfer_id, refused.cause) == ("transfer-2", Cause.PEER)
    assert len(one_sided.receptions) == 0
    one_sided.receptions.fence("transfer-2", has_drained=False)
    one_sided.receptions.turn()
    assert one_sided.events[-1] == Fenced("transfer-2"), "its pages are never free again"
    one_sided.expect([PageRef(0, 2)], number=3, port=2)
    assert len(one_sided.receptions) == 1
