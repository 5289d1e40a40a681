"""What a push covers, what it claims, and where it may go at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import pytest
from kvtransfer.fixtures import SMALL, boundary, filled, print_of, reservation

from effuse.kvtransfer.connector import Cause, HandoffRefused
from effuse.kvtransfer.digest import page_digests, seal_of
from effuse.kvtransfer.messages import PageRef, ReceiverAddress
from effuse.kvtransfer.outgoing import Origin, Push, checked_push, split

SOURCE = filled(SMALL, 6)
ORIGIN = Origin("prefill-1", print_of(SMALL), SMALL.page_bytes)
RESERVED = reservation(
    SOURCE, ReceiverAddress(connector="zmq"), tuple(PageRef(page, 2) for page in (4, 5, 1))
)
BOUNDARY = boundary()


@pytest.fixture
def push() -> Push:
    return checked_push(RESERVED, ORIGIN, "zmq", now=3.0)


@contextlib.contextmanager
def refused(cause: Cause) -> Iterator[None]:
    with pytest.raises(HandoffRefused) as caught:
        yield
    assert caught.value.cause is cause


def test_the_manifest_lists_pages_in_the_reservations_order(push: Push) -> None:
    push.digest(SOURCE, push.cover([3], 2))
    push.digest(SOURCE, push.cover([0, 5], 0))
    push.boundary = BOUNDARY
    manifest = push.manifest(ORIGIN)
    assert manifest.pages == RESERVED.pages
    assert list(manifest.page_digests) == page_digests(SOURCE, [0, 5, 3])
    assert manifest.seal == seal_of(manifest)
    assert manifest.num_bytes == push.num_bytes == 3 * SMALL.page_bytes


def test_a_manifest_waits_for_every_page_and_the_boundary(push: Push) -> None:
    push.digest(SOURCE, push.cover([0, 5, 3], 0))
    with refused(Cause.COVERAGE):
        push.manifest(ORIGIN)
    push.boundary = BOUNDARY
    push.digests.pop(1)
    with refused(Cause.COVERAGE):
        push.manifest(ORIGIN)


@pytest.mark.parametrize(("pages", "first"), [([0], 1), ([0, 1], 0), ([0], 3), ([0], -1)])
def test_overlaps_and_overruns_are_refused(push: Push, pages: list[int], first: int) -> None:
    push.cover([2], 1)
    with refused(Cause.COVERAGE):
        push.cover(pages, first)


def test_a_chunk_is_split_without_loss(push: Push) -> None:
    chunk = push.cover([0, 5, 3], 0)
    pieces = split(chunk, 2)
    assert [piece.first for piece in pieces] == [0, 2]
    assert sum((piece.source_pages for piece in pieces), ()) == chunk.source_pages
    assert sum((piece.targets for piece in pieces), ()) == chunk.targets


def test_the_lease_is_counted_from_the_start_of_the_push(push: Push) -> None:
    assert push.deadline == 3.0 + RESERVED.lease_s


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"page_bytes": SMALL.page_bytes + 1}, Cause.SIZE),
        ({"fingerprint": print_of(SMALL, "w2")}, Cause.FINGERPRINT),
        ({"address": ReceiverAddress(connector="nixl")}, Cause.PEER),
        ({"pages": (PageRef(6, 1),)}, Cause.MALFORMED),
        ({"pages": (PageRef(1, 1), PageRef(1, 2))}, Cause.MALFORMED),
        ({"lease_s": -1.0}, Cause.MALFORMED),
    ],
    ids=str,
)
def test_a_reservation_is_checked_before_anything_is_pushed(
    change: dict[str, object], cause: Cause
) -> None:
    with refused(cause):
        checked_push(msgspec.structs.replace(RESERVED, **change), ORIGIN, "zmq", now=0.0)
