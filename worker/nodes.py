"""The other hosts of a group, for its leader: those that take part, and those that were lost.

`Roll` decides and does no I/O. `Nodes` has the sockets: one for the hosts' own messages, with keys
that follow from the fleet's secret, and others for ranks, with keys of this incarnation. So no rank
of an earlier incarnation can connect.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeVar

import msgspec
import torch.distributed as dist
import zmq
from zmq.utils.monitor import recv_monitor_message

from effuse.config.access import host_and_port
from effuse.config.checks import UNREADABLE
from effuse.kvtransfer.interfaces import interface_towards
from effuse.kvtransfer.resolving import numeric, resolve
from effuse.kvtransfer.zmq_sockets import KEY_BYTES, CurveKeys, ZmqListener, descriptor_of
from effuse.models.shared_meeting import SharedMeeting
from effuse.placement.records import Role
from effuse.worker.config import WorkerConfig
from effuse.worker.messages import StoreAddress
from effuse.worker.node_messages import (
    BEAT_S,
    ENCODER,
    FROM_NODE,
    STARTING,
    FromNode,
    Joining,
    JoinRefused,
    LeaderBeat,
    NodeBeat,
    RankGone,
    RankStopped,
    Stale,
    ToNode,
    Welcome,
    control_keys,
    difference,
    settings_of,
)
from effuse.worker.watchdog import PeerSilence

LOG = logging.getLogger(__name__)

_Made = TypeVar("_Made")
LOOK_S: Final = 0.25
_BIND_S: Final = 5.0  # for the leader before this one to end
_STORE_S: Final = 60.0
_MOST_BYTES: Final = 1 << 16  # of a host's message
_QUEUED: Final = 16  # messages of one host that wait for a turn
_LOG_S: Final = 1.0  # between two lines about messages that are refused


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A host has sent nothing for too long."""

    node: int
    silent_s: float


Event = RankGone | RankStopped | NodeLost
"""A report of a node, or its loss."""


def why_of(event: RankStopped | NodeLost) -> str:
    """The reason that such an event gives for the end of a group."""
    if isinstance(event, RankStopped):
        return f"a signal has stopped rank {event.rank}"
    return f"node {event.node} has been silent for {event.silent_s:.1f} s"


@dataclass(slots=True)
class _Member:
    sender: bytes  # the connection by which it joined
    silence: PeerSilence


@dataclass(slots=True, kw_only=True)
class Roll:
    """The nodes of one incarnation of a group, and those that would like to be."""

    incarnation: str
    settings: Mapping[str, str]  # of the leader
    limit_s: float  # of silence, once the engine can work
    welcomes: Mapping[int, Welcome]  # for each other node
    members: dict[int, _Member] = field(default_factory=dict)
    is_ready: bool = False  # the engine can work

    def take(
        self, sender: bytes, message: FromNode, now: float
    ) -> tuple[ToNode | None, Event | None]:
        """The answer to a message, and its report."""
        if isinstance(message, Joining):
            return self._join(sender, message, now), None
        own = {node: one for node, one in self.members.items() if one.sender == sender}
        if not own or message.incarnation != self.incarnation:
            return Stale(self.incarnation), None
        for member in own.values():
            member.silence.received_at = now
        if isinstance(message, NodeBeat):
            return None, None
        is_theirs = any(message.rank in self.welcomes[node].commands for node in own)
        return None, message if is_theirs else None

    def look(self, now: float) -> list[NodeLost]:
        """The members that were silent for too long."""
        for one in self.members.values():
            one.silence.limit_s = self.limit_s if self.is_ready else STARTING * self.limit_s
        return [
            NodeLost(node, now - one.silence.received_at)
            for node, one in self.members.items()
            if one.silence.is_over(now)
        ]

    @property
    def missing(self) -> list[int]:
        """Nodes that have not joined yet."""
        return sorted(self.welcomes.keys() - self.members.keys())

    def _join(self, sender: bytes, asked: Joining, now: float) -> ToNode:
        node = asked.node
        if node not in self.welcomes:
            most = len(self.welcomes)
            return JoinRefused(f"--node-rank: expected 1 to {most}, got {node}", final=True)
        if found := difference(self.settings, asked.settings, node):
            return JoinRefused(f"the hosts of a worker need equal settings: {found}", final=True)
        if node in self.members and self.members[node].sender != sender:
            return JoinRefused(f"another process is node {node} of this group", final=False)
        self.members[node] = _Member(sender, PeerSilence.begin(now, self.limit_s, LOOK_S))
        return self.welcomes[node]


class Nodes:
    """The sockets of a leader for the other hosts. The watching thread calls `turn` and `lost`."""

    def __init__(
        self,
        config: WorkerConfig,
        role: Role,
        incarnation: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listens. Raises OSError if it cannot, and ValueError for unusable settings."""
        assert config.master_addr is not None, "a config with several nodes has one"
        self._now = now
        self._stack = contextlib.ExitStack()
        try:
            self._listen(config, config.master_addr, role, incarnation)
        except BaseException:
            self._stack.close()
            raise
        LOG.info(
            "node 0 waits for %d others at %s",
            config.nnodes - 1,
            host_and_port(config.master_addr, config.master_port),
        )

    def _listen(self, config: WorkerConfig, master: str, role: Role, incarnation: str) -> None:
        seed, meeting = secrets.token_bytes(KEY_BYTES), secrets.token_hex(16)
        host, family = _own(config, master)
        listener = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            master,
            port,
            is_master=True,
            timeout=timedelta(seconds=_STORE_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.address = StoreAddress(
            host=master,
            port=port,
            meeting=meeting,
            interface=interface_towards(master, config.master_port),
        )
        self._control = self._listener(control_keys(config), host, config.master_port)
        keyed = self._listening(CurveKeys.of(seed))
        self.answers = keyed(zmq.PULL, host, 0)
        each = config.ranks_per_node
        self.commands = {rank: keyed(zmq.PAIR, host, 0) for rank in range(each, config.num_ranks)}
        self._monitor = self.answers.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._stack.callback(self._monitor.close, 0)
        self._connections: dict[int, int] = {}  # ranks by ZMQ's descriptor, once they have answered
        self._lost: list[int] = []
        welcomes = {
            node: Welcome(
                incarnation=incarnation,
                role=role,
                connector=config.connector,
                key_seed=seed,
                commands={
                    rank: _port(self.commands[rank])
                    for rank in range(node * each, node * each + each)
                },
                answers=_port(self.answers),
                store=port,
                meeting=meeting,
            )
            for node in range(1, config.nnodes)
        }
        self.roll = Roll(
            incarnation=incarnation,
            settings=settings_of(config),
            limit_s=config.hang_timeout_s,
            welcomes=welcomes,
        )
        self._beat_at = self._now()
        self._refusals = _Refusals()

    def meeting(self) -> SharedMeeting:
        """That of this host."""
        return SharedMeeting(self._store, self.address.meeting, self.address.interface)

    def sources(self) -> Sequence[zmq.Socket[bytes]]:
        """Sockets that are readable while there is something to do."""
        return (self._control.socket, self.answers, self._monitor)

    def turn(self) -> list[Event]:
        """Answers nodes, within a bound, sends heartbeats, and returns reports and losses."""
        now, events = self._now(), list[Event]()
        for sender, message in self._messages(now):
            is_new = len(self.roll.missing)
            answer, event = self.roll.take(sender, message, now)
            if answer is not None:
                self._send(sender, answer)
            if event is not None:
                events.append(event)
            if isinstance(answer, JoinRefused):
                self._refusals.log(answer.message, now)
            elif len(self.roll.missing) < is_new:
                LOG.info("a host has joined; still missing: %s", self.roll.missing or "none")
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            for member in self.roll.members.values():
                self._send(member.sender, LeaderBeat(self.roll.incarnation, self.roll.is_ready))
        return [*events, *self.roll.look(now)]

    def note(self, rank: int, frames: list[zmq.Frame]) -> None:
        """A rank of another host has sent an answer, whose connection is its own. Only such ones
        count, because anyone can connect to a port for a moment."""
        descriptor = descriptor_of(frames)
        if rank in self.commands and self._connections.get(descriptor) != rank:
            self._watch()  # an earlier connection may have had the same descriptor
            self._connections[descriptor] = rank

    def lost(self) -> list[int]:
        """Ranks whose connection has ended since the last call."""
        self._watch()
        found, self._lost = self._lost, []
        return found

    def _watch(self) -> None:
        while self._monitor.poll(0):
            descriptor = int(recv_monitor_message(self._monitor)["value"])
            if (rank := self._connections.pop(descriptor, None)) is not None:
                self._lost.append(rank)

    def close(self) -> None:
        """Closes all sockets; nodes then end their ranks."""
        self.answers.disable_monitor()
        self._stack.close()

    def _messages(self, now: float) -> Iterator[tuple[bytes, FromNode]]:
        for received in self._control.receive():
            frames = received.frames
            try:
                if len(frames) != 1:
                    raise msgspec.DecodeError(f"expected one frame, got {len(frames)}")
                yield received.sender, FROM_NODE.decode(frames[0].buffer)
            except UNREADABLE as error:
                self._refusals.log(f"it sent an invalid message: {error}", now)

    def _send(self, sender: bytes, message: ToNode) -> None:
        with contextlib.suppress(zmq.Again):  # it is gone
            self._control.answer(sender, ENCODER.encode(message))

    def _context(self, keys: CurveKeys | None) -> zmq.Context[zmq.Socket[bytes]]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.term)
        if keys is not None:
            self._stack.enter_context(keys.admitting(context))
        return context

    def _listener(self, keys: CurveKeys | None, host: str, port: int) -> ZmqListener:
        """Bounds all that a host can send, because without keys anyone may connect."""
        context, endpoint = self._context(keys), f"tcp://{host_and_port(host, port)}"

        def listen() -> ZmqListener:
            return ZmqListener(
                context, endpoint, message_bytes=_MOST_BYTES, queued=_QUEUED, keys=keys
            )

        made = _bound(endpoint, listen)
        self._stack.callback(made.close)
        return made

    def _listening(self, keys: CurveKeys) -> Callable[[int, str, int], zmq.Socket[bytes]]:
        """Makes listening sockets of one context, for owners of these keys."""
        context = self._context(keys)

        def listening(kind: int, host: str, port: int) -> zmq.Socket[bytes]:
            made = context.socket(kind)
            self._stack.callback(made.close, 0)
            for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
                made.set(option, 0)
            made.set(zmq.IPV6, int(":" in host))
            keys.serve(made)
            endpoint = f"tcp://{host_and_port(host, port)}"
            _bound(endpoint, lambda: made.bind(endpoint))
            return made

        return listening


@dataclass(slots=True)
class _Refusals:
    """Logs refused messages, but at most one line in `_LOG_S`: any number may come."""

    logged_at: float = float("-inf")
    num_left_out: int = 0

    def log(self, why: str, now: float) -> None:
        if now - self.logged_at < _LOG_S:
            self.num_left_out += 1
            return
        more = f" (and {self.num_left_out} others)" if self.num_left_out else ""
        self.logged_at, self.num_left_out = now, 0
        LOG.warning("refused a host: %s%s", why, more)


def _bound(endpoint: str, bind: Callable[[], _Made]) -> _Made:
    until = time.monotonic() + _BIND_S
    while True:
        try:
            return bind()
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > until:
                raise OSError(f"--master-port: cannot listen at {endpoint}: {error}") from error
            time.sleep(0.1)


def _port(made: zmq.Socket[bytes]) -> int:
    return int(made.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def _own(config: WorkerConfig, master: str) -> tuple[str, socket.AddressFamily]:
    """The address at which a leader listens: of the family by which the others reach it."""
    family = socket.AF_INET6 if ":" in numeric(master) else socket.AF_INET
    try:
        return resolve(config.host, family)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--host: expected an address of this host, got {config.host!r}"
        ) from error
