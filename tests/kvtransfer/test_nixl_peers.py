"""Many peers of one NIXL agent: each is added once, and only the least recent makes room."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import msgspec
import pytest
from kvtransfer.fixtures import (
    LARGE,
    SMALL,
    address_of,
    reservation,
    with_shard,
)
from nixl._api import nixl_agent, nixl_agent_config
from slowness import patient

from effuse.kernels import cuda_ipc
from effuse.kvtransfer import nixl_peers
from effuse.kvtransfer.connector import Cause, HandoffRefused
from effuse.kvtransfer.layout import KVLayout, PageMemory
from effuse.kvtransfer.messages import DIGEST_BYTES, PageRef, ReceiverAddress, Reservation
from effuse.kvtransfer.nixl_agent import NIXL_ERRORS, NixlAgent, Transfer, handle_in
from effuse.kvtransfer.nixl_peers import NixlPeer, NixlPeers, NixlWriters
from effuse.kvtransfer.nixl_transport import LOOKS, NixlDelivery, NixlTransport


@dataclass
class Agent:
    """Records added and removed peers; metadata is the name."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    prepared: list[tuple[int, int]] = field(default_factory=list)  # bytes and number of units
    looks: Iterator[bool] = field(default_factory=lambda: repeat(False))  # their results

    def add_peer(self, metadata: bytes) -> str:
        self.added.append(metadata.decode())
        return metadata.decode()

    def remove_peer(self, name: str) -> None:
        self.removed.append(name)

    def pages(self, owner: str, address: int, unit_bytes: int, count: int, *_: object) -> object:
        self.prepared.append((unit_bytes, count))
        return self.prepared[-1]

    def release_pages(self, pages: tuple[int, int]) -> None:
        self.prepared.remove(pages)

    def is_done(self, write: object) -> bool:
        return next(self.looks)

    def release(self, write: object) -> None: ...

    def notify(self, name: str, message: bytes) -> None:
        self.told.append(name)


def find(peers: NixlPeers, reserved: Reservation) -> NixlPeer:
    (shard,) = reserved.shards
    return peers.find(reserved, shard)


def to(number: int, pool: int = 0, layout: KVLayout = SMALL) -> Reservation:
    name = f"decode-{number}"
    address = ReceiverAddress(
        connector="nixl",
        agent_name=name,
        agent_metadata=name.encode(),
        pool_address=pool,
        memory_kind="DRAM",
    )
    return reservation(PageMemory(layout, 4), address, [PageRef(1, 1)])


@pytest.fixture
def agent() -> Any:
    return Agent()


def test_hundreds_of_peers_are_added_once_each(agent: Any) -> None:
    peers = NixlPeers(agent, SMALL)
    for _ in range(3):
        for number in range(500):
            assert find(peers, to(number)).name == f"decode-{number}"
    assert len(agent.added) == 500 and agent.removed == []


def test_the_least_recent_idle_peer_makes_room(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_peers, "MOST_PEERS", 3)
    peers = NixlPeers(agent, SMALL)
    in_use = find(peers, to(0))
    in_use.num_pushes = 1
    for number in (1, 2, 1, 3):
        find(peers, to(number))
    assert agent.removed == ["decode-2"]
    for number in (1, 3):
        find(peers, to(number)).num_pushes = 1
    with pytest.raises(HandoffRefused, match="3 peers are already in flight") as caught:
        find(peers, to(4))
    assert caught.value.cause is Cause.PEER


def test_a_peer_that_changed_or_was_lost_is_added_anew_once_nothing_is_in_flight(
    agent: Any,
) -> None:
    peers = NixlPeers(agent, SMALL)
    peer = find(peers, to(1))
    peer.num_pushes = 1
    with pytest.raises(HandoffRefused, match="writes to it are in flight"):
        find(peers, to(1, pool=4096))
    assert find(peers, to(1)) is peer
    peer.is_lost = True
    peer.num_pushes = 0
    assert find(peers, to(1)) is not peer
    assert agent.removed == ["decode-1"] and agent.added == ["decode-1"] * 2


def test_a_pool_is_prepared_by_pages_and_by_groups_as_long_as_its_peer_is_known(
    agent: Any,
) -> None:
    peers = NixlPeers(agent, LARGE)
    peer = find(peers, to(1, layout=LARGE))
    count, groups = peer.num_pages, LARGE.num_groups
    assert groups > 1
    by_page, by_group = (LARGE.page_bytes, count), (LARGE.group_bytes, count * groups)
    assert agent.prepared == [by_page, by_group]
    assert peer.lists.cut(1) is agent.prepared[0] and peer.lists.cut(groups) is agent.prepared[1]
    peer.is_lost = True
    find(peers, to(1, layout=LARGE))
    assert len(agent.prepared) == 2


def test_a_write_is_looked_at_several_times(agent: Any) -> None:
    """Each poll notices some of the arrived writes, and the next turn may be far."""
    delivery = NixlDelivery(agent, agent, Transfer(object()))
    agent.looks = chain(repeat(False, LOOKS), [False, True], repeat(False))
    assert not delivery.is_over()
    assert delivery.is_over()
    assert delivery.is_over(), "nobody looks at what is over"


@pytest.mark.parametrize("missing", ["agent_name", "agent_metadata", "memory_kind"])
def test_an_address_that_lacks_something_is_refused(agent: Any, missing: str) -> None:
    empty = b"" if missing == "agent_metadata" else ""
    held = to(1)
    address = msgspec.structs.replace(address_of(held), **{missing: empty})
    with pytest.raises(HandoffRefused) as caught:
        find(NixlPeers(agent, SMALL), with_shard(held, address=address))
    assert caught.value.cause is Cause.MALFORMED and agent.added == []


def test_metadata_of_another_agent_is_refused_and_forgotten(agent: Any) -> None:
    held = to(1)
    address = msgspec.structs.replace(address_of(held), agent_metadata=b"decode-9")
    with pytest.raises(HandoffRefused, match="of agent decode-1, got that of decode-9"):
        find(NixlPeers(agent, SMALL), with_shard(held, address=address))
    assert agent.removed == ["decode-9"]


def test_hundreds_of_writers_are_answered(agent: Any) -> None:
    writers = NixlWriters(agent)
    for _ in range(2):
        for number in range(500):
            writers.add(f"life-{number}", f"prefill-{number}".encode())
            writers.notify(f"life-{number}", b"accepted")
    assert len(agent.added) == 500 and len(agent.told) == 1000
    writers.notify("nobody", b"accepted")
    assert len(agent.told) == 1000
    with pytest.raises(HandoffRefused, match="has no address for answers"):
        writers.add("life-new", b"")


def test_who_said_before_a_writer_that_it_is_that_writer_does_not_have_its_answers(
    agent: Any,
) -> None:
    writers = NixlWriters(agent)
    for said in ("stranger", "prefill-1") * 3:
        writers.add("life-1", said.encode())
        writers.notify("life-1", b"accepted")
        assert agent.told[-1] == said
    assert (agent.added, agent.removed) == (["stranger", "prefill-1"], [])
    with pytest.raises(HandoffRefused):
        writers.add("life-1", b"")
    writers.notify("life-1", b"accepted")
    assert agent.told[-1] == "prefill-1"


def test_a_writer_that_cannot_be_told_is_learnt_anew(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, message: bytes) -> None:
        raise NIXL_ERRORS[0]("gone")

    writers = NixlWriters(agent)
    writers.add("life-1", b"prefill-1")
    monkeypatch.setattr(agent, "notify", fail)
    writers.notify("life-1", b"accepted")
    writers.add("life-1", b"prefill-1")
    assert agent.added == ["prefill-1"] * 2


def test_a_stranger_whose_name_is_not_utf8_ends_no_agent() -> None:
    """NIXL's own binding raises; later messages are received."""
    receiver, honest = NixlAgent("receiver"), NixlAgent("honest")
    config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    stranger = nixl_agent(b"\xff", config)
    stranger.send_notif(
        stranger.add_remote_agent(receiver.metadata()[DIGEST_BYTES + 1 :]), b"hello"
    )
    heard, has_warned = [], []

    class Warned(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            has_warned.append(record.getMessage())

    logger, handler = logging.getLogger("effuse.kvtransfer.nixl_agent"), Warned()
    logger.addHandler(handler)
    ends_at = time.monotonic() + patient(20.0)
    while not has_warned and time.monotonic() < ends_at:  # each end's looking moves the bytes
        stranger.get_new_notifs()
        heard += receiver.notifications()
    logger.removeHandler(handler)
    assert "is not UTF-8" in has_warned[0] and not heard
    honest.notify(honest.add_peer(receiver.metadata()), b"from a friend")
    while not heard and time.monotonic() < ends_at:
        honest.notifications()
        heard += receiver.notifications()
    assert heard == [("honest", b"from a friend")]


def test_receivers_of_a_life_that_is_over_are_removed_once_nothing_is_in_flight(agent: Any) -> None:
    def of(life: str, pushes: int) -> NixlPeer:
        name = f"decode-{life}-r0"
        address = msgspec.structs.replace(
            address_of(to(0)), agent_name=name, agent_metadata=name.encode()
        )
        peer = find(peers, with_shard(to(0), address=address))
        peer.num_pushes = pushes
        return peer

    peers = NixlPeers(agent, SMALL)
    idle, busy, other = of("18ab-1", 0), of("18ab-2", 1), of("18ab-12", 0)
    peers.forget("18ab-1")
    peers.forget("18ab-2")
    assert agent.removed == [idle.name]
    peers.leave(busy)
    assert agent.removed == [idle.name, busy.name]
    assert peers.by_name[other.name] is other and busy.name not in peers.by_name


def test_a_writer_shows_its_connection_and_none_of_its_memory() -> None:
    writer, reader = NixlAgent("writer-w"), NixlAgent("reader-r0")
    memory = PageMemory(SMALL, 4)
    writer.register(memory.address, memory.num_bytes, 0, "DRAM")
    assert len(writer.connection()) < len(writer.metadata())
    name = reader.add_peer(writer.connection())
    with pytest.raises(NIXL_ERRORS):
        reader.pages(name, memory.address, memory.page_bytes, 4, 0, "DRAM")
    reader.notify(name, b"heard")
    deadline = time.monotonic() + patient(10)
    while not (heard := writer.notifications()) and time.monotonic() < deadline:
        reader.notifications()
    assert heard == [("reader-r0", b"heard")]


def test_a_handle_travels_with_the_metadata_and_is_mapped_once_for_each_peer(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, closed = list[bytes](), list[int]()

    def opens(handle: bytes) -> int:
        opened.append(handle)
        return 7 * len(opened)

    monkeypatch.setattr(cuda_ipc, "open_handle", opens)
    monkeypatch.setattr(cuda_ipc, "close_handle", closed.append)
    owner = NixlAgent("owner-r0")
    handle = bytes(range(cuda_ipc.HANDLE_BYTES))
    assert handle_in(owner.metadata(handle)) == handle and handle_in(owner.metadata()) == b""
    assert NixlAgent("writer-w").add_peer(owner.metadata(handle)) == "owner-r0"
    peers = NixlPeers(agent, SMALL, maps=True)
    agent.add_peer = lambda metadata: "decode-1ab-r0"
    address = msgspec.structs.replace(
        address_of(to(0)), agent_name="decode-1ab-r0", agent_metadata=owner.metadata(handle)
    )
    asked = with_shard(to(0), address=address)
    assert find(peers, asked) is find(peers, asked) and opened == [handle]
    peers.forget("1ab")
    assert closed == [7]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_mapped_pool_begins_where_its_owner_says_and_has_all_of_its_pages(
    agent: Any, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    monkeypatch.setattr(cuda_ipc, "open_handle", lambda handle: 1 << 20)
    asked, owner = to(0), NixlAgent("owner-r0")
    (shard,) = asked.shards
    place = struct.pack("<2Q", 512, asked.num_pool_pages * shard.page_bytes - missing)
    handle = bytes(cuda_ipc.HANDLE_BYTES - len(place)) + place
    agent.add_peer = lambda metadata: "decode-0"
    address = msgspec.structs.replace(address_of(asked), agent_metadata=owner.metadata(handle))
    peer = find(NixlPeers(agent, SMALL, maps=True), with_shard(asked, address=address))
    assert peer.mapped == 1 << 20
    assert peer.pool == (0 if missing else (1 << 20) + 512)
    by_page, by_group = (SMALL.page_bytes, 4), (SMALL.group_bytes, 4 * SMALL.num_groups)
    assert agent.prepared == [by_page, *[by_group] * missing], (
        "NIXL writes no parts of a mapped pool"
    )


def test_a_transport_shows_writers_its_memory_and_readers_only_its_connection() -> None:
    memory, peer = PageMemory(SMALL, 4), NixlAgent("peer-r0")
    transport = NixlTransport(memory, "1ab", role="prefill")
    transport.open()

    def pages(metadata: bytes) -> None:
        name = peer.add_peer(metadata)
        peer.pages(name, memory.address, memory.page_bytes, 4, 0, "DRAM")

    pages(transport.address().agent_metadata)
    with pytest.raises(NIXL_ERRORS):
        pages(transport._metadata)
