"""Handoffs between workers with stages of layers: each pair of ranks moves what both hold."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from itertools import product

import msgspec
import pytest
from kvtransfer.fixtures import SEED, SHARED, boundary, filled, next_event, print_of
from kvtransfer.groups import NUM_PAGES, Group, layouts_of
from kvtransfer.loopback import Hub
from kvtransfer.reception_scene import Scene

from effuse.kvtransfer.connector import (
    ArrivalRefused,
    Arrived,
    Cause,
    FinishPush,
    HandoffRefused,
    Pushed,
    PushPages,
)
from effuse.kvtransfer.digest import HostDigester, PageDigests
from effuse.kvtransfer.layout import Identity, KVLayout, PageMemory
from effuse.kvtransfer.messages import (
    AttemptId,
    KVPart,
    PageRef,
    ReceiverAddress,
    Reservation,
)
from effuse.kvtransfer.nixl_peers import cuts
from effuse.kvtransfer.push import Batch, Push, check_push, parts_of, shard_of
from effuse.kvtransfer.zmq_transport import CHUNK_BYTES

LAYOUT = replace(SHARED, num_layers=6, most_groups=3)
"""Three groups of two layers: two stages have one and two of them."""
FORMS = ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (8, 1), (16, 2))
"""Ranks, and stages among them; with 8 ranks in a stage, two have the same heads."""
PAIRS = list(product(FORMS, FORMS))
FEWER = [*product(FORMS[1:5], FORMS[1:5]), ((16, 2), (3, 3)), ((1, 1), (4, 2)), ((4, 2), (1, 1))]
FIRST = KVPart(0, 2, 0, 1)
"""The first of a scene's two groups of layers."""
SOURCES, TARGETS = (6, 1, 2, 5), (3, 4, 0, 7)


def ranks_of(form: tuple[int, int]) -> list[KVLayout]:
    return layouts_of(LAYOUT, form[0], 1, form[1])


def reserved_by(form: tuple[int, int]) -> Reservation:
    return Reservation(
        attempt=AttemptId("request-1", 1, "transfer-1"),
        incarnation="decode-1",
        shards=tuple(
            shard_of(layout, ReceiverAddress(connector="zmq", endpoint=str(layout.rank)))
            for layout in ranks_of(form)
        ),
        num_pool_pages=8,
        pages=(PageRef(3, 1),),
        fingerprint=print_of(LAYOUT),
        digest_seed=SEED,
        lease_s=9.0,
    )


@pytest.mark.parametrize(("sending", "receiving"), PAIRS)
def test_exactly_one_rank_sends_each_head_of_each_group_to_each_rank_that_holds_it(
    sending: tuple[int, int], receiving: tuple[int, int]
) -> None:
    reserved, sent = reserved_by(receiving), Counter[tuple[str, int, int]]()
    for layout in ranks_of(sending):
        check_push(reserved, Identity("prefill-1", print_of(LAYOUT), layout), "zmq")
        for shard, part in parts_of(reserved, layout):
            assert set(part.groups) <= set(layout.groups)
            to = shard.address.endpoint
            sent.update((to, head, group) for head in part.heads for group in part.groups)
    expected = {
        (str(one.rank), head, group)
        for one in ranks_of(receiving)
        for head, group in product(one.heads, one.groups)
    }
    assert sent == Counter(expected)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_hold_all_of_a_page_together(form: tuple[int, int]) -> None:
    ranks = ranks_of(form)
    assert {one.span_bytes for one in ranks} == {LAYOUT.page_bytes}
    assert {print_of(one) for one in ranks} == {print_of(LAYOUT)}
    copies = ranks[0].copies
    assert sum(one.page_bytes for one in ranks) == LAYOUT.page_bytes * copies
    assert sum(len(one.layers) for one in ranks) == LAYOUT.num_layers * form[0] // form[1]
    assert ranks[0].layers.stop == LAYOUT.num_layers, "the leader has the last stage"


@pytest.mark.parametrize(("sending", "receiving"), FEWER)
def test_a_part_is_the_same_bytes_and_digests_in_every_pool(
    sending: tuple[int, int], receiving: tuple[int, int]
) -> None:
    full = filled(LAYOUT, 8)
    for layout in ranks_of(sending):
        source = PageMemory(layout, 8)
        source.byte_parts(layout.groups, layout.heads).copy_(
            full.byte_parts(layout.groups, layout.heads)
        )
        for shard, part in parts_of(reserved_by(receiving), layout):
            target = PageMemory(ranks_of(receiving)[int(shard.address.endpoint)], 8)
            views = source.views([5, 2], part.groups, part.heads)
            target.write([0, 7], part.groups, views, part.heads)
            found, expected = (
                HostDigester(memory).begin(pages, part.groups, SEED, part.heads)()
                for memory, pages in ((target, [0, 7]), (full, [5, 2]))
            )
            assert found is not None and expected is not None
            assert found.tolist() == expected.tolist()
            ours, theirs = cuts(layout, target.layout.heads, target.layout.groups)
            for cut, memory, page in ((ours, source, 5), (theirs, target, 0)):
                rows = memory.byte_rows().view(8 * cut.per_page, -1)
                units = rows[cut.units([page], part.groups).tolist()]
                expected_bytes = full.byte_parts(part.groups, part.heads)[5]
                assert units.flatten().tolist() == expected_bytes.flatten().tolist()


@pytest.mark.parametrize(("sending", "receiving"), FEWER)
def test_pages_arrive_between_all_forms(
    sending: tuple[int, int], receiving: tuple[int, int]
) -> None:
    hub, forms = Hub(), (("prefill-1", sending), ("decode-1", receiving))
    sender, receiver = (
        Group("loopback", name, form[0], has_pages=name == "prefill-1", hub=hub, layout=LAYOUT,
              stages=form[1])
        for name, form in forms
    )  # fmt: skip
    with contextlib.closing(sender), contextlib.closing(receiver):
        hand_over(sender, receiver)


@pytest.mark.parametrize("kind", ["nixl", "zmq"])
@pytest.mark.parametrize(("sending", "receiving"), [((2, 2), (3, 3)), ((2, 1), (4, 2))])
def test_pages_arrive_over_each_connector(
    kind: str, sending: tuple[int, int], receiving: tuple[int, int]
) -> None:
    (degree, stages), (others, after) = sending, receiving
    sender = Group(kind, "prefill-1", degree, has_pages=True, layout=LAYOUT, stages=stages)
    receiver = Group(kind, "decode-1", others, layout=LAYOUT, stages=after)
    with contextlib.closing(sender), contextlib.closing(receiver):
        hand_over(sender, receiver)


@pytest.mark.parametrize(("degree", "stages"), [(1, 1), (2, 1), (2, 2)])
def test_pages_above_a_chunk_arrive_over_zmq_where_a_rank_has_a_part_of_each(
    degree: int, stages: int
) -> None:
    """Several parts would fit into the sender's page, and be more than a receiver takes."""
    layout = KVLayout("unified", 36, 8, 128, 64, "bfloat16", most_groups=2)
    assert layout.page_bytes > CHUNK_BYTES
    sender = Group("zmq", "prefill-1", 1, has_pages=True, layout=layout)
    receiver = Group("zmq", "decode-1", degree, layout=layout, stages=stages)
    with contextlib.closing(sender), contextlib.closing(receiver):
        hand_over(sender, receiver)


def hand_over(sender: Group, receiver: Group) -> None:
    reserved = receiver.reserve(TARGETS)
    sender.all.send(PushPages(reserved, SOURCES[:1], 0))
    sender.all.send(PushPages(reserved, SOURCES[1:], 1))
    sender.all.send(FinishPush(reserved, boundary))
    arrived = next_event(receiver.all, reserved.transfer_id)
    pushed = next_event(sender.all, reserved.transfer_id)
    num_bytes = sum(len(TARGETS) * shard.page_bytes for shard in reserved.shards)
    assert isinstance(arrived, Arrived) and arrived.num_bytes == num_bytes
    assert isinstance(pushed, Pushed) and (pushed.pages, pushed.num_bytes) == (4, num_bytes)
    receiver.check_holds(TARGETS, SOURCES)
    assert NUM_PAGES == 8


def test_groups_of_a_later_part_leave_once_the_forward_has_stored_them() -> None:
    """A rank with groups 2..5 of which a receiver gets 4..5 has stored two others first."""
    finals = iter([0, 1, 2, 3])
    batch = Batch(0, (1,), lambda: next(finals), step=1)
    assert [batch.next_groups(1, 2) for _ in range(4)] == [range(0)] * 3 + [range(1)]


def test_the_groups_of_a_late_stage_leave_by_its_own_count() -> None:
    """Its forward counts the groups that it stores itself; messages have the model's numbers."""
    layout = ranks_of((2, 2))[0]
    assert layout.groups == range(2, 3)
    own, reserved = Identity("prefill-1", print_of(LAYOUT), layout), reserved_by((1, 1))
    ((shard, part),) = parts_of(reserved, layout)
    digester, stored = HostDigester(PageMemory(layout, 8)), iter([0, 1])
    digests = PageDigests(digester, layout, part, 1, SEED)
    push = Push(check_push(reserved, own, "zmq"), shard, part, "a peer", own, digests, known_at=0.0)
    push.cover((5,), 0, lambda: next(stored))
    assert not push.queue_final(1 << 20) and push.queue_final(1 << 20)
    (chunk,) = push.queue
    header = push.header(chunk)
    assert (header.group, header.end_group, header.part.groups) == (2, 3, range(2, 3))


def test_groups_that_no_rank_receives_are_refused() -> None:
    ours = Identity("prefill-1", print_of(LAYOUT), LAYOUT)
    reserved = reserved_by((2, 2))
    with pytest.raises(HandoffRefused, match="in group 0 of layers"):
        check_push(msgspec.structs.replace(reserved, shards=reserved.shards[:1]), ours, "zmq")
    first = reserved.shards[0]
    part = msgspec.structs.replace(first.part, first_group=1, end_group=4)
    beyond = msgspec.structs.replace(first, part=part)
    with pytest.raises(HandoffRefused, match=r"groups 1\.\.4 of 3"):
        check_push(msgspec.structs.replace(reserved, shards=(beyond,)), ours, "zmq")


@pytest.mark.parametrize("layers", [(0, 1), (1, 3), (1, 1), (0, 2)])
def test_layers_that_are_sent_already_or_are_not_here_are_refused(layers: tuple[int, int]) -> None:
    scene = Scene()  # of two groups
    scene.begin(part=FIRST)
    scene.begin(part=KVPart(0, 2, *layers))
    refused = [one for one in scene.events if isinstance(one, ArrivalRefused)]
    is_same = layers == (0, 1)
    assert [one.cause for one in refused] == ([] if is_same else [Cause.COVERAGE])


def test_pages_of_other_layers_than_a_part_has_are_refused() -> None:
    scene = Scene()
    scene.begin(part=FIRST)
    scene.send(part=FIRST, group=1, end_group=2, payload=())
    (refused,) = [one for one in scene.events if isinstance(one, ArrivalRefused)]
    assert refused.cause is Cause.COVERAGE and "not within the groups 0..1" in str(refused)
