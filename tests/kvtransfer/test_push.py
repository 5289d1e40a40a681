"""The pages of a push, when its layers may leave, its claims, and its possible destinations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import pytest
from kvtransfer.fixtures import SEED, SMALL, boundary, digest_of, filled, print_of, reservation

from effuse.kvtransfer.connector import Cause, HandoffRefused
from effuse.kvtransfer.digest import HostDigester, PageDigests
from effuse.kvtransfer.layout import Identity
from effuse.kvtransfer.messages import PageRef, ReceiverAddress
from effuse.kvtransfer.push import Batch, Push, check_push, parts_of

SOURCE = filled(SMALL, 6)
ORIGIN = Identity("prefill-1", print_of(SMALL), SMALL)
RESERVED = reservation(
    SOURCE, ReceiverAddress(connector="zmq"), tuple(PageRef(page, 2) for page in (4, 5, 1))
)
BOUNDARY = boundary()


@pytest.fixture
def push() -> Push:
    checked = check_push(RESERVED, ORIGIN, "zmq")
    ((shard, part),) = parts_of(checked, SMALL)
    digests = PageDigests(HostDigester(SOURCE), SMALL, part, len(checked.pages), SEED)
    return Push(checked, shard, part, "a peer", ORIGIN, digests, known_at=3.0)


@contextlib.contextmanager
def refused(cause: Cause) -> Iterator[None]:
    with pytest.raises(HandoffRefused) as caught:
        yield
    assert caught.value.cause is cause


def test_the_manifest_digests_pages_in_the_reservations_order(push: Push) -> None:
    push.cover((3,), 2, None)
    push.cover((0, 5), 0, None)
    push.digests.begin(2, [3], range(SMALL.num_groups))
    push.digests.begin(0, [0, 5], range(SMALL.num_groups))
    assert push.digests.poll()
    push.final_at = 5.0  # after the reservation was known
    manifest = push.account(BOUNDARY)
    assert manifest.digest == digest_of(SOURCE, [0, 5, 3])
    assert push.account(BOUNDARY) is manifest
    assert push.elapsed_s(5.25) == 0.25
    assert manifest.num_bytes == push.num_bytes == 3 * SMALL.page_bytes


def test_a_manifest_waits_for_every_page(push: Push) -> None:
    push.cover((0, 5), 0, None)
    with refused(Cause.COVERAGE):
        push.account(BOUNDARY)


@pytest.mark.parametrize(("pages", "first"), [([0], 1), ([0, 1], 0), ([0], 3), ([0], -1)])
def test_overlaps_and_overruns_are_refused(push: Push, pages: list[int], first: int) -> None:
    push.cover((2,), 1, None)
    with refused(Cause.COVERAGE):
        push.cover(tuple(pages), first, None)


def test_the_lease_is_counted_from_when_the_reservation_was_known(push: Push) -> None:
    assert push.deadline == 3.0 + RESERVED.lease_s


def test_groups_leave_as_they_become_final_and_as_many_together_as_are_worth_it() -> None:
    finals = iter((0, 2, 3, 5, 6, 8))
    batch = Batch(0, (1, 2), lambda: next(finals), step=3)
    left = []
    for _ in range(6):
        groups = batch.next_groups(8)
        batch.num_sent = max(batch.num_sent, groups.stop)
        left.append(list(groups))
    assert left == [[], [], [0, 1, 2], [], [3, 4, 5], [6, 7]]


def test_pages_that_are_final_leave_whole() -> None:
    assert Batch(0, (1, 2), None, step=3).next_groups(8) == range(8)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"fingerprint": print_of(SMALL, "w2")}, Cause.FINGERPRINT),
        ({"pages": (PageRef(6, 1),)}, Cause.MALFORMED),
        ({"pages": (PageRef(1, 1), PageRef(1, 2))}, Cause.MALFORMED),
        ({"lease_s": -1.0}, Cause.MALFORMED),
        ({"digest_seed": -1}, Cause.MALFORMED),
    ],
    ids=str,
)
def test_a_reservation_is_checked_before_anything_is_pushed(
    change: dict[str, object], cause: Cause
) -> None:
    with refused(cause):
        check_push(msgspec.structs.replace(RESERVED, **change), ORIGIN, "zmq")
