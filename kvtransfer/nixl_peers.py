"""The peers of NIXL agents: receivers with their pools as prepared page lists, and writers that get
answers.

A peer whose incarnation, pool or connection changed is removed and added again; no prepared list
survives.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from effuse.kernels import cuda_ipc
from effuse.kvtransfer.connector import UNKNOWN, Cause, HandoffRefused, Route
from effuse.kvtransfer.layout import KVLayout
from effuse.kvtransfer.messages import DIGEST_BYTES, ReceiverAddress, Reservation, Shard
from effuse.kvtransfer.nixl_agent import NIXL_ERRORS, NixlAgent, PageList, handle_in

LOG = logging.getLogger(__name__)

MOST_PEERS = 1024
_CALL_ERRORS: tuple[type[Exception], ...] = (UnicodeDecodeError, *NIXL_ERRORS)
T = TypeVar("T")


class PoolLists:
    """One pool, prepared page by page and in the parts of pages that are asked for."""

    def __init__(
        self, agent: NixlAgent, pool: tuple[str, int, int, str], page_bytes: int, num_pages: int
    ) -> None:
        """pool: its agent ("": our own), address, device and kind of memory."""
        self._agent = agent
        self._pool = pool
        self._page_bytes = page_bytes
        self._num_pages = num_pages
        self._lists: dict[int, PageList] = {}

    def cut(self, per_page: int) -> PageList:
        """All pages in order, each in so many equal parts."""
        found = self._lists.get(per_page)
        if found is None:
            owner, address, device_id, kind = self._pool
            sizes = self._page_bytes // per_page, self._num_pages * per_page
            found = self._agent.pages(owner, address, *sizes, device_id, kind)
            self._lists[per_page] = found
        return found

    def release(self) -> None:
        """Frees what was prepared."""
        for one in self._lists.values():
            self._agent.release_pages(one)
        self._lists.clear()


@dataclass(frozen=True, slots=True)
class Cut:
    """Where some KV heads are in a pool whose groups of layers are split into equal parts."""

    groups: int
    per_group: int
    first: int  # part of a group
    count: int
    first_group: int = 0  # of the pool, in the model's numbers

    @property
    def per_page(self) -> int:
        """Parts of a page."""
        return self.groups * self.per_group

    @property
    def is_whole(self) -> bool:
        """Whether they are all heads of the pool."""
        return self.count == self.per_group

    def units(self, page_ids: Sequence[int], groups: range) -> npt.NDArray[np.int32]:
        """Places of these groups of pages in the prepared list, page by page: neighbours are
        merged."""
        pages = np.array(page_ids, dtype=np.int32)[:, None, None] * self.per_page
        group = np.arange(groups.start, groups.stop, dtype=np.int32)[:, None] - self.first_group
        group *= self.per_group
        part = np.arange(self.first, self.first + self.count, dtype=np.int32)
        return np.asarray(pages + group + part, dtype=np.int32).ravel()


def cuts(layout: KVLayout, theirs: range, groups: range | None = None) -> tuple[Cut, Cut]:
    """Where the KV heads that both pools hold lie in ours and in one that holds `theirs`, in the
    largest parts that fit both. groups: those of layers that it holds, by default the same."""
    ours = layout.heads
    heads = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
    places = [(heads.start - pool.start, len(pool)) for pool in (ours, theirs)]
    size = gcd(len(heads), *(number for place in places for number in place))
    ours_cut, theirs_cut = (
        Cut(len(held), total // size, first // size, len(heads) // size, held.start)
        for (first, total), held in zip(
            places, (layout.groups, groups or layout.groups), strict=True
        )
    )
    return ours_cut, theirs_cut


@dataclass(slots=True, eq=False)
class NixlPeer:
    """One incarnation of a receiver."""

    address: ReceiverAddress
    num_pages: int
    lists: PoolLists
    cut: tuple[Cut, Cut]  # the common heads, in our pool and in the peer's
    num_pushes: int = 0  # that may still have something in flight
    is_lost: bool = False
    has_ended: bool = False  # its engine has ended
    mapped: int = 0  # where its GPU's allocation is mapped here; 0 if it is not
    pool: int = 0  # where its pool begins in that; 0 if it is not mapped
    num_tables: int | None = None  # that UCX had logged before this peer was reached
    route: Route = UNKNOWN

    @property
    def name(self) -> str:
        return self.address.agent_name

    @property
    def takes_pages(self) -> bool:
        """Whether whole pages are sent to it: both pools hold the same heads and layers."""
        ours, theirs = self.cut
        is_same = (ours.first_group, ours.groups) == (theirs.first_group, theirs.groups)
        return is_same and all(cut.is_whole for cut in self.cut)

    def cuts_of(self, cut: Cut) -> tuple[int, ...]:
        """The numbers of parts of a page that NIXL's writes to it name, on the side of this cut."""
        whole, parts = [1] * self.takes_pages, [cut.per_page] * (not self.pool)
        return (*whole, *parts)


class NixlPeers:
    """Receivers to which one agent writes, at most MOST_PEERS; those in use are never removed."""

    def __init__(self, agent: NixlAgent, layout: KVLayout, *, maps: bool = False) -> None:
        """With `maps` it maps the memory of peers on this host's GPUs."""
        self._agent = agent
        self._layout = layout
        self._maps = maps
        self.by_name: dict[str, NixlPeer] = {}  # of its agent; least recently used first

    def find(self, reservation: Reservation, shard: Shard) -> NixlPeer:
        """The peer of a receiving rank, connected. Raises HandoffRefused if it cannot be used."""
        address = shard.address
        if not address.agent_name or not address.agent_metadata or not address.memory_kind:
            raise HandoffRefused(Cause.MALFORMED, "the reservation lacks its agent's address")
        peer = self.by_name.pop(address.agent_name, None)
        if peer is not None and _is_same(peer, address, reservation.num_pool_pages):
            self.by_name[peer.name] = peer
            return peer
        if peer is not None:
            self._remove(peer)
        self._make_room()
        added = self._add(reservation.num_pool_pages, shard)
        self.by_name[added.name] = added
        return added

    def forget(self, life: str) -> None:
        """Removes the receivers of an ended incarnation, because their memory stays in use as long
        as they are known. Receivers with pushes in flight are removed once these have ended."""
        for peer in [one for one in self.by_name.values() if f"-{life}-" in one.name]:
            peer.has_ended = True
            self._remove_ended(peer)

    def leave(self, peer: NixlPeer) -> None:
        """A push has stopped using the peer."""
        peer.num_pushes -= 1
        self._remove_ended(peer)

    def _remove_ended(self, peer: NixlPeer) -> None:
        if not peer.has_ended or peer.num_pushes or self.by_name.pop(peer.name, None) is None:
            return
        try:
            self._remove(peer)
        except HandoffRefused as error:
            LOG.warning("NIXL still holds memory for the ended peer %s: %s", peer.name, error)

    def _add(self, num_pages: int, shard: Shard) -> NixlPeer:
        address = shard.address

        def add() -> NixlPeer:
            name = self._agent.add_peer(address.agent_metadata)
            if name != address.agent_name:
                if name not in self.by_name:
                    self._agent.remove_peer(name)
                raise HandoffRefused(
                    Cause.PEER,
                    f"expected metadata of agent {address.agent_name}, got that of {name}",
                )
            pool = name, address.pool_address, address.device_id, address.memory_kind
            lists = PoolLists(self._agent, pool, shard.page_bytes, num_pages)
            cut = cuts(self._layout, shard.part.heads, shard.part.groups)
            peer = NixlPeer(address, num_pages, lists, cut)
            if self._maps:
                _map(peer, num_pages * shard.page_bytes)
            for parts in peer.cuts_of(cut[1]):
                lists.cut(parts)
            return peer

        return attempt(f"agent {address.agent_name} cannot be reached", add)

    def _remove(self, peer: NixlPeer) -> None:
        if peer.num_pushes:
            self.by_name[peer.name] = peer
            raise HandoffRefused(
                Cause.PEER, f"agent {peer.name} changed while writes to it are in flight"
            )

        def remove() -> None:
            peer.lists.release()
            self._agent.remove_peer(peer.name)

        try:
            attempt(f"agent {peer.name} cannot be removed", remove)
        finally:
            if peer.mapped:
                cuda_ipc.close_handle(peer.mapped)

    def _make_room(self) -> None:
        if len(self.by_name) < MOST_PEERS:
            return
        idle = next((peer for peer in self.by_name.values() if not peer.num_pushes), None)
        if idle is None:
            raise HandoffRefused(Cause.PEER, f"pushes to {MOST_PEERS} peers are already in flight")
        del self.by_name[idle.name]
        self._remove(idle)


class NixlWriters:
    """Writers that one agent answers; beyond the limit the least recent one is dropped.

    Answers go to the last agent that claims to be the writer. If they went to the first one, a
    stranger that came before the writer would get all of its answers. Agents stay known meanwhile,
    because removing and adding one costs descriptors.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._names: OrderedDict[bytes, str] = OrderedDict()  # of agents, by metadata digest
        self._digests: OrderedDict[str, bytes] = OrderedDict()  # by writer

    def add(self, writer: str, metadata: bytes) -> None:
        """Adds a writer. Raises HandoffRefused if its metadata is unusable."""
        if not metadata:
            raise HandoffRefused(Cause.MALFORMED, "the writer's message has no address for answers")
        digest = metadata[:DIGEST_BYTES]
        if digest not in self._names:
            if len(self._names) >= MOST_PEERS:
                _, name = self._names.popitem(last=False)
                attempt("a writer cannot be removed", lambda: self._agent.remove_peer(name))
            added = attempt("the writer cannot be added", lambda: self._agent.add_peer(metadata))
            self._names[digest] = added
        self._names.move_to_end(digest)
        self._digests[writer] = digest
        self._digests.move_to_end(writer)
        if len(self._digests) > MOST_PEERS:
            self._digests.popitem(last=False)

    def notify(self, writer: str, message: bytes) -> None:
        """Notifies a writer, if it is known and reachable."""
        digest = self._digests.get(writer, b"")
        name = self._names.get(digest)
        if name is None:
            return
        try:
            attempt("no answer", lambda: self._agent.notify(name, message))
        except HandoffRefused:
            del self._names[digest]  # gone, or to be added again


def attempt(what: str, action: Callable[[], T], peer: NixlPeer | None = None) -> T:
    """Makes a NIXL call, and turns its errors into a refusal that names them. `peer` is prepared
    again at its next use then."""
    try:
        return action()
    except _CALL_ERRORS as error:
        if peer is not None:
            peer.is_lost = True
        if isinstance(error, UnicodeDecodeError):  # NIXL's own binding, for a name in metadata
            raise HandoffRefused(Cause.MALFORMED, f"{what}: its name is not UTF-8") from error
        raise HandoffRefused(Cause.PEER, f"{what}: {type(error).__name__}: {error}") from error


def _map(peer: NixlPeer, num_bytes: int) -> None:
    """Maps its GPU's memory, if that is possible; its pool only if it has so many bytes."""
    handle = handle_in(peer.address.agent_metadata)
    if not handle:
        return
    peer.mapped = cuda_ipc.open_handle(handle)
    offset, most = cuda_ipc.place_of(handle)
    if peer.mapped and num_bytes <= most:
        peer.pool = peer.mapped + offset


def _is_same(peer: NixlPeer, address: ReceiverAddress, num_pages: int) -> bool:
    return (peer.address, peer.num_pages) == (address, num_pages) and not peer.is_lost
