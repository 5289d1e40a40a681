"""Which rank sends which heads to which rank, where they lie, and what a receiving rank refuses."""

from __future__ import annotations

import os
from collections import Counter
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
from kvtransfer.fixtures import SEED, SMALL, WHOLE, boundary, filled, print_of
from kvtransfer.groups import FULL, LAYOUT, heads_of, layouts_of
from kvtransfer.reception_scene import Scene

from effuse.kvtransfer.connector import (
    ArrivalRefused,
    Arrived,
    Cancel,
    Cause,
    Command,
    ConnectorEvent,
    Expect,
    Fenced,
    Forget,
    HandoffRefused,
    Promised,
    PushCancelled,
    Pushed,
    PushFailed,
    Route,
)
from effuse.kvtransfer.digest import HostDigester, pages_digest
from effuse.kvtransfer.layout import Identity, KVLayout, PageMemory
from effuse.kvtransfer.messages import AttemptId, KVPart, PageRef, ReceiverAddress, Reservation
from effuse.kvtransfer.nixl_peers import cuts
from effuse.kvtransfer.push import check_push, parts_of, shard_of
from effuse.worker.group_parts import GroupConnector, RankEvents

DEGREES = (1, 2, 4, 8, 16)
GROUPS = range(LAYOUT.num_groups)


def ranks_of(degree: int, layout: KVLayout = LAYOUT) -> list[KVLayout]:
    return layouts_of(layout, degree)


def reserved_by(degree: int) -> Reservation:
    """Pages that the ranks of a worker hold."""
    return Reservation(
        attempt=AttemptId("request-1", 1, "transfer-1"),
        incarnation="decode-1",
        shards=tuple(
            shard_of(layout, ReceiverAddress(connector="zmq", endpoint=f"tcp://decode:{rank}"))
            for rank, layout in enumerate(ranks_of(degree))
        ),
        num_pool_pages=8,
        pages=(PageRef(3, 1),),
        fingerprint=print_of(LAYOUT),
        digest_seed=SEED,
        lease_s=9.0,
    )


PAIRS = [(sending, receiving) for sending in DEGREES for receiving in DEGREES]


@pytest.mark.parametrize(("sending", "receiving"), PAIRS)
def test_exactly_one_rank_sends_each_head_to_each_receiving_rank(
    sending: int, receiving: int
) -> None:
    reserved = reserved_by(receiving)
    sent = Counter[tuple[str, int]]()
    for layout in ranks_of(sending):
        for shard, part in parts_of(reserved, layout):
            assert set(part.heads) <= set(layout.heads) & set(shard.part.heads)
            sent.update((shard.address.endpoint, head) for head in part.heads)
    expected = {
        (shard.address.endpoint, head) for shard in reserved.shards for head in shard.part.heads
    }
    assert sent == Counter(expected)


def test_copies_share_the_receiving_ranks_among_them() -> None:
    """Two ranks hold each head on both sides: neither of them sends all."""
    reserved = reserved_by(8)
    assert [len(parts_of(reserved, layout)) for layout in ranks_of(8)] == [1] * 8


@pytest.mark.parametrize(("sending", "receiving"), PAIRS)
def test_a_part_is_the_same_bytes_and_digests_in_every_pool(sending: int, receiving: int) -> None:
    for layout in ranks_of(sending):
        source = PageMemory(layout, len(FULL.tensor))
        source.tensor.copy_(heads_of(FULL.tensor, layout))
        for shard, part in parts_of(reserved_by(receiving), layout):
            target = PageMemory(ranks_of(receiving)[_rank_of(shard.address)], 8)
            views = source.views([5, 2], GROUPS, part.heads)
            target.write([0, 7], GROUPS, views, part.heads)
            found, expected = (
                HostDigester(memory).begin(pages, range(1, 2), SEED, part.heads)()
                for memory, pages in ((target, [0, 7]), (FULL, [5, 2]))
            )
            assert found is not None and found.tolist() == np.asarray(expected).tolist()
            assert pages_digest(found) != pages_digest(found[::-1])
            place = target.layout.place_of(part.heads)
            moved = target.tensor[[0, 7]][:, :, place.start : place.stop]
            full = FULL.tensor[[5, 2]][:, :, part.heads.start : part.heads.stop]
            assert torch.equal(moved, full)
            assert int(target.tensor.count_nonzero()) == int(full.count_nonzero())


def _rank_of(address: ReceiverAddress) -> int:
    return int(address.endpoint.rpartition(":")[2])


@pytest.mark.parametrize(("sending", "receiving"), PAIRS)
def test_prepared_parts_name_the_same_bytes_in_both_pools(sending: int, receiving: int) -> None:
    for ours, theirs in ((a, b) for a in ranks_of(sending) for b in ranks_of(receiving)):
        if set(ours.heads).isdisjoint(theirs.heads):
            continue
        both = cuts(ours, theirs.heads)
        heads = sorted(set(ours.heads) & set(theirs.heads))
        for layout, cut in zip((ours, theirs), both, strict=True):
            unit_bytes = layout.page_bytes // cut.per_page
            first = layout.place_of(range(heads[0], heads[-1] + 1)).start * layout.head_bytes
            begins = [3 * layout.page_bytes + g * layout.group_bytes + first for g in range(2)]
            part_bytes = len(heads) * layout.head_bytes
            spans = [at for one in begins for at in range(one, one + part_bytes, unit_bytes)]
            assert (cut.units([3], range(2)) * unit_bytes).tolist() == spans
            assert cut.is_whole == (len(heads) == len(layout.heads))
        assert both[0].count == both[1].count


def test_a_rank_has_no_place_for_heads_of_others() -> None:
    one = ranks_of(8)[3]
    assert (one.heads, one.copies, one.page_bytes) == (range(1, 2), 2, LAYOUT.page_bytes // 4)
    with pytest.raises(ValueError, match="not all among"):
        one.place_of(range(1, 3))


@pytest.mark.parametrize("degree", DEGREES)
def test_the_fingerprint_does_not_depend_on_the_degree(degree: int) -> None:
    assert {print_of(layout) for layout in ranks_of(degree)} == {print_of(LAYOUT)}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"part": KVPart(0, 5, 0, 2)}, Cause.MALFORMED),
        ({"part": KVPart(2, 2, 0, 2)}, Cause.MALFORMED),
        ({"part": KVPart(1, 2, 0, 2)}, Cause.SIZE),
        ({"page_bytes": 1}, Cause.SIZE),
        ({"address": ReceiverAddress(connector="nixl")}, Cause.PEER),
    ],
)
def test_a_rank_that_cannot_be_sent_to_is_refused(change: dict[str, object], cause: Cause) -> None:
    origin = Identity("prefill-1", print_of(LAYOUT), LAYOUT)
    first, *others = reserved_by(2).shards
    shards = (msgspec.structs.replace(first, **change), *others)
    with pytest.raises(HandoffRefused) as caught:
        check_push(msgspec.structs.replace(reserved_by(2), shards=shards), origin, "zmq")
    assert caught.value.cause is cause
    with pytest.raises(HandoffRefused, match=r"no rank receives the KV heads \[0, 1\]"):
        check_push(msgspec.structs.replace(reserved_by(2), shards=tuple(others)), origin, "zmq")


ONE, OTHER = KVPart(0, 1, 0, 2), KVPart(1, 2, 0, 2)


def send_part(scene: Scene, part: KVPart, prompt_len: int = 20, **changes: object) -> None:
    """One writing rank's begin, pages and finish; `scene` itself is of all heads."""
    scene.begin(part=part)
    payload = scene.source.views(range(3), range(SMALL.num_groups), part.heads)
    scene.send(part=part, payload=payload)
    found = HostDigester(scene.source).begin(range(3), range(2), SEED, part.heads)()
    assert found is not None
    claims = {
        "part": part,
        "digest": pages_digest(found),
        "num_bytes": 3 * SMALL.page_bytes // 2,
        "boundary": boundary(prompt_len, tail_token_ids=(7, 8)),
    }
    scene.finish(**(claims | changes))


def test_a_transfer_has_arrived_once_all_of_its_parts_are_verified() -> None:
    scene = Scene()
    send_part(scene, OTHER)
    assert scene.events == [] and len(scene.receptions) == 1
    send_part(scene, ONE)
    (arrived,) = scene.events
    assert isinstance(arrived, Arrived) and arrived.manifest.part == ONE
    assert arrived.num_bytes == 3 * SMALL.page_bytes
    for index, page in enumerate(scene.reserved.pages):
        assert scene.memory.bytes_at(page.page_id) == scene.source.bytes_at(index)


@pytest.mark.parametrize("heads", [(0, 2), (1, 3), (2, 3), (1, 1)])
def test_heads_that_are_sent_already_or_are_not_here_are_refused(heads: tuple[int, int]) -> None:
    scene = Scene()
    scene.begin(part=ONE)
    scene.begin(part=KVPart(*heads, 0, 2))
    cause = next(one.cause for one in scene.events if isinstance(one, ArrivalRefused))
    assert cause is Cause.COVERAGE and len(scene.receptions) == 0


def test_pages_of_heads_that_did_not_begin_are_refused() -> None:
    scene = Scene()
    scene.begin(part=ONE)
    scene.send(part=OTHER, payload=())
    assert scene.refusal()[0] is Cause.FINGERPRINT


def test_a_manifest_of_heads_that_did_not_begin_is_refused() -> None:
    scene = Scene()
    scene.begin(part=ONE)
    scene.finish(part=OTHER)
    assert scene.refusal()[0] is Cause.COVERAGE


def test_parts_of_different_prompts_are_refused() -> None:
    scene = Scene()
    send_part(scene, ONE)
    send_part(scene, OTHER, prompt_len=21)
    refused = scene.events[0]
    assert isinstance(refused, ArrivalRefused) and refused.cause is Cause.MALFORMED


def test_a_part_that_is_wrong_refuses_the_transfer() -> None:
    scene = Scene()
    send_part(scene, ONE)
    send_part(scene, OTHER, digest=b"?" * 16)
    refused = scene.events[0]
    assert isinstance(refused, ArrivalRefused) and refused.cause is Cause.DIGEST


# What ranks say together.

NAME = "transfer-1"
PUSHED = Pushed(NAME, 4, 10, 0.5)


def arrived(num_bytes: int, seconds: float) -> Arrived:
    manifest = Scene().manifest()
    return Arrived(NAME, manifest, seconds, num_bytes)


def test_ranks_have_received_a_transfer_once_all_have() -> None:
    events = RankEvents(2)
    events.begin(NAME)
    assert events.take(1, Promised(NAME)) == [Promised(NAME)]
    assert events.take(1, arrived(3, 0.5)) == []
    assert events.take(1, arrived(3, 0.5)) == []  # the same rank
    (both,) = events.take(0, arrived(4, 0.25))
    assert isinstance(both, Arrived) and (both.num_bytes, both.seconds) == (7, 0.5)
    assert events.take(0, Fenced(NAME)) == [], "it is over"


def test_the_first_rank_that_fails_fails_all_and_all_must_end() -> None:
    events = RankEvents(2)
    for failure, end in (
        (ArrivalRefused(NAME, Cause.DIGEST, "no"), Fenced(NAME)),
        (PushFailed(NAME, Cause.PEER, "no"), PushCancelled(NAME)),
    ):
        events.begin(NAME)
        assert events.take(1, failure) == [failure]
        assert events.take(0, failure) == []
        told: list[ConnectorEvent] = []
        for rank in (1, 1, 0, 0):
            told += events.take(rank, end)
        assert told == [end]


def test_a_transfer_that_is_given_up_ends_once_all_ranks_have_stopped() -> None:
    """Also if all of them had succeeded, unseen, when the command came."""
    events = RankEvents(2)
    for success, end in ((arrived(3, 0.5), Fenced(NAME)), (PUSHED, PushCancelled(NAME))):
        events.begin(NAME)
        assert events.take(0, success) == []
        events.give_up(NAME)
        assert len(events.take(1, success)) == 1
        assert events.take(0, end) == []
        assert events.take(1, end) == [end]
        assert events.take(1, end) == [], "it is over"


@pytest.mark.parametrize(
    ("command", "success", "end"),
    [
        (Cancel(NAME), PUSHED, PushCancelled(NAME)),
        (Forget(NAME), arrived(3, 0.5), Fenced(NAME)),
    ],
)
def test_a_group_waits_for_the_end_of_what_it_gives_up(
    command: Command, success: ConnectorEvent, end: ConnectorEvent
) -> None:
    with os.fdopen(os.eventfd(0), "rb", buffering=0) as signal:
        own, ranks = Mock(fileno=signal.fileno), Mock(size=2, event_signal=os.dup(signal.fileno()))
        own.poll.return_value = ranks.events.return_value = [success, end]
        group = GroupConnector(own, ranks)
        group.send(Expect(reserved_by(2), None))
        group.send(command)
        assert group.poll()[-1] == end
        group.close()
        os.close(ranks.event_signal)


def test_ranks_have_pushed_what_all_of_them_have() -> None:
    events = RankEvents(3)
    events.begin(NAME)
    assert events.take(0, Pushed(NAME, 4, 0, 0.0)) == []  # it served nobody
    assert events.take(2, Pushed(NAME, 4, 10, 0.5, Route("rc"), 0.25)) == []
    merged = events.take(1, Pushed(NAME, 4, 20, 0.25, Route("rc"), 0.125))
    assert merged == [Pushed(NAME, 4, 30, 0.5, Route("rc"), 0.25)]


def test_a_pool_of_one_rank_is_what_it_was() -> None:
    memory = filled(SMALL, 4)
    whole = memory.views([1, 2], range(1), WHOLE.heads)
    assert [view.nbytes for view in whole] == [SMALL.group_bytes] * 2
    assert memory.layout.runs(range(2), WHOLE.heads) == (1, SMALL.page_bytes)
