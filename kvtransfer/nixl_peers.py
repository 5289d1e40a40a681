"""The peers of NIXL agents: receivers with their pools as prepared page lists, and writers that get
answers.

A peer whose life, pool or connection changed is removed and added again; no prepared list survives.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from effuse.kvtransfer import cuda_ipc
from effuse.kvtransfer.connector import UNKNOWN, Cause, HandoffRefused, Route
from effuse.kvtransfer.layout import KVLayout
from effuse.kvtransfer.messages import DIGEST_BYTES, ReceiverAddress, Reservation
from effuse.kvtransfer.nixl_agent import NIXL_ERRORS, NixlAgent, PageList, handle_in

LOG = logging.getLogger(__name__)

MOST_PEERS = 1024
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class NixlPeer:
    """One receiver in one of its lives."""

    address: ReceiverAddress
    num_pages: int
    pages: PageList
    groups: PageList  # of groups of layers, page by page
    num_pushes: int = 0  # that may still have something in flight
    is_lost: bool = False
    is_gone: bool = False  # its engine has ended
    mapped: int = 0  # address at which its GPU's memory is mapped here; 0 if it is not
    num_tables: int | None = None  # that UCX had logged before this peer was reached
    route: Route = UNKNOWN

    @property
    def name(self) -> str:
        """Name of its agent."""
        return self.address.agent_name


class NixlPeers:
    """Receivers to which one agent writes, at most MOST_PEERS; those in use are never removed."""

    def __init__(self, agent: NixlAgent, layout: KVLayout, *, on_device: bool = False) -> None:
        self._agent = agent
        self._layout = layout
        self._on_device = on_device
        self._peers: dict[str, NixlPeer] = {}  # least recently used first

    def find(self, reservation: Reservation) -> NixlPeer:
        """The peer of a reservation, connected. Raises HandoffRefused if it cannot be used."""
        address = reservation.address
        if not address.agent_name or not address.agent_metadata or not address.memory_kind:
            raise HandoffRefused(Cause.MALFORMED, "the reservation lacks its agent's address")
        peer = self._peers.pop(address.agent_name, None)
        if peer is not None and _is_same(peer, reservation):
            self._peers[peer.name] = peer
            return peer
        if peer is not None:
            self._remove(peer)
        self._make_room()
        added = self._add(reservation)
        self._peers[added.name] = added
        return added

    def named(self, name: str) -> NixlPeer | None:
        """The peer whose agent has this name, if it is known."""
        return self._peers.get(name)

    def lose(self, peer: NixlPeer) -> None:
        """A connection failed: the peer is prepared again at its next use."""
        peer.is_lost = True

    def forget(self, life: str) -> None:
        """Removes the receivers of an ended life, because their memory stays in use as long as they
        are known. Receivers with pushes in flight are removed once these have ended.
        """
        for peer in [one for one in self._peers.values() if f"-{life}-" in one.name]:
            peer.is_gone = True
            self._remove_gone(peer)

    def leave(self, peer: NixlPeer) -> None:
        """A push has stopped using the peer."""
        peer.num_pushes -= 1
        self._remove_gone(peer)

    def _remove_gone(self, peer: NixlPeer) -> None:
        if not peer.is_gone or peer.num_pushes or self._peers.pop(peer.name, None) is None:
            return
        try:
            self._remove(peer)
        except HandoffRefused as error:
            LOG.warning("the memory of %s remains in use: %s", peer.name, error)

    def _add(self, reservation: Reservation) -> NixlPeer:
        address = reservation.address

        def add() -> NixlPeer:
            name = self._agent.add_peer(address.agent_metadata)
            if name != address.agent_name:
                if name not in self._peers:
                    self._agent.remove_peer(name)
                raise HandoffRefused(
                    Cause.PEER,
                    f"expected metadata of agent {address.agent_name}, got that of {name}",
                )
            lists = pool_lists(
                self._agent,
                name,
                self._layout,
                reservation.num_pool_pages,
                address.pool_address,
                address.device_id,
                address.memory_kind,
            )
            peer = NixlPeer(address, reservation.num_pool_pages, *lists)
            if self._on_device and (handle := handle_in(address.agent_metadata)):
                peer.mapped = cuda_ipc.open_handle(handle)
            return peer

        return attempt(f"agent {address.agent_name} cannot be reached", add)

    def _remove(self, peer: NixlPeer) -> None:
        if peer.num_pushes:
            self._peers[peer.name] = peer
            raise HandoffRefused(
                Cause.PEER, f"agent {peer.name} changed while writes to it are in flight"
            )

        def remove() -> None:
            self._agent.release_pages(peer.pages)
            self._agent.release_pages(peer.groups)
            self._agent.remove_peer(peer.name)

        try:
            attempt(f"agent {peer.name} cannot be removed", remove)
        finally:
            if peer.mapped:
                cuda_ipc.close_handle(peer.mapped)

    def _make_room(self) -> None:
        if len(self._peers) < MOST_PEERS:
            return
        idle = next((peer for peer in self._peers.values() if not peer.num_pushes), None)
        if idle is None:
            raise HandoffRefused(Cause.PEER, f"pushes to {MOST_PEERS} peers are already in flight")
        del self._peers[idle.name]
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
        self._digests: OrderedDict[str, bytes] = OrderedDict()  # by incarnation

    def learn(self, incarnation: str, metadata: bytes) -> None:
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
        self._digests[incarnation] = digest
        self._digests.move_to_end(incarnation)
        if len(self._digests) > MOST_PEERS:
            self._digests.popitem(last=False)

    def tell(self, incarnation: str, message: bytes) -> None:
        """Notifies a writer, if it is known and reachable."""
        digest = self._digests.get(incarnation, b"")
        name = self._names.get(digest)
        if name is None:
            return
        try:
            attempt("no answer", lambda: self._agent.notify(name, message))
        except HandoffRefused:
            del self._names[digest]  # gone, or to be added again


def pool_lists(
    agent: NixlAgent,
    owner: str,
    layout: KVLayout,
    num_pages: int,
    address: int,
    device_id: int,
    kind: str,
) -> tuple[PageList, PageList]:
    """A pool of `owner` ("": this process) prepared twice: by pages, and by their groups of
    layers.
    """

    def prepared(parts: int) -> PageList:
        unit_bytes = layout.page_bytes // parts
        return agent.pages(owner, address, unit_bytes, num_pages * parts, device_id, kind)

    return prepared(1), prepared(layout.num_groups)


def attempt(what: str, action: Callable[[], T]) -> T:
    """Makes a NIXL call, and turns its errors into a refusal that names them."""
    try:
        return action()
    except UnicodeDecodeError as error:  # from NIXL's own binding, for a name in a peer's metadata
        raise HandoffRefused(Cause.MALFORMED, f"{what}: its name is not UTF-8") from error
    except NIXL_ERRORS as error:
        raise HandoffRefused(Cause.PEER, f"{what}: {type(error).__name__}: {error}") from error


def _is_same(peer: NixlPeer, reservation: Reservation) -> bool:
    same_pool = (peer.address, peer.num_pages) == (reservation.address, reservation.num_pool_pages)
    return same_pool and not peer.is_lost
