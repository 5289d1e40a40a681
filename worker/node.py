"""A host of a worker's group beside the leader's: runs its ranks for one incarnation after another.

Its ranks never outlive the leader: they end with the connection to it, or once it is silent. Then
the host offers itself to the next one. It imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import msgspec
import zmq

from effuse.config.access import host_and_port
from effuse.config.checks import UNREADABLE
from effuse.kvtransfer.interfaces import interface_towards
from effuse.kvtransfer.resolving import numeric
from effuse.protos import rpc
from effuse.protos.channels import FleetAccess
from effuse.worker.config import WorkerConfig, to_json
from effuse.worker.messages import RankOrders, RemoteLeader, StoreAddress
from effuse.worker.node_messages import (
    BEAT_S,
    ENCODER,
    STARTING,
    TO_NODE,
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
    settings_of,
)
from effuse.worker.supervisor import AsyncSocket, start
from effuse.worker.watchdog import Limits, PeerSilence, Stopped

LOG = logging.getLogger(__name__)

_LOOK_S: Final = 0.25
_ASK_S: Final = 1.0  # between two offers
_LOOK_UP_S: Final = 10.0  # without a connection, until the leader's name is resolved again
_PAUSE_S: Final = 0.2
_WARN_S: Final = 10.0  # without an answer
_WARN_AGAIN_S: Final = 60.0
_KILL_S: Final = 10.0


class NodeRefused(Exception):
    """The leader accepts no such host, now or later."""


@dataclass(slots=True, eq=False)
class _FarRank:
    process: asyncio.subprocess.Process
    exited: asyncio.Future[int]
    stopped: Stopped = field(default_factory=Stopped)
    is_reported: bool = False  # its end


class LeaderLink(AsyncSocket):
    """A connection to the leader of one incarnation; another incarnation needs another one."""

    def __init__(self, config: WorkerConfig, host: str | None = None) -> None:
        """host: the leader's numeric address; None resolves its name, which may take a while."""
        self.host = numeric(str(config.master_addr)) if host is None else host
        endpoint = f"tcp://{host_and_port(self.host, config.master_port)}"
        # An offer that cannot leave now is not kept.
        options: dict[int, int] = {zmq.LINGER: 0, zmq.IMMEDIATE: 1, zmq.IPV6: int("[" in endpoint)}
        super().__init__(zmq.DEALER, options)
        if (keys := control_keys(config)) is not None:
            keys.ask(cast("zmq.Socket[bytes]", self.zmq))
        self.zmq.connect(endpoint)

    def post(self, message: FromNode) -> bool:
        """Sends a message if the leader is connected, and returns whether it is."""
        return self.send(ENCODER.encode(message))

    async def next_message(
        self, timeout_s: float, others: Iterable[asyncio.Future[Any]] = ()
    ) -> ToNode | None:
        """The leader's next message; None as of `receive`, and for one that no leader sends."""
        if (received := await self.receive(timeout_s, others)) is None:
            return None
        try:
            message: ToNode = TO_NODE.decode(received)
            return message
        except UNREADABLE as error:
            LOG.warning("ignored an invalid message from the leader: %s", error)
            return None


@dataclass(slots=True)
class Unanswered:
    """Warns of a leader that does not answer: after a while, and then now and then."""

    where: str
    why: str = "there is no connection"
    _since: float | None = None
    _warns_at: float = 0.0

    def look(self, now: float) -> None:
        """There is no answer yet."""
        if self._since is None:
            self._since, self._warns_at = now, now + _WARN_S
        if now >= self._warns_at:
            self._warns_at = now + _WARN_AGAIN_S
            silent_s = now - self._since
            LOG.warning(
                "the leader at %s has not answered for %.0f s: %s", self.where, silent_s, self.why
            )

    def end(self) -> None:
        """It has answered."""
        self._since = None


class NodeAgent:
    """This host's part of a group."""

    def __init__(
        self,
        config: WorkerConfig,
        stop: asyncio.Event,
        on_ready: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_ready: called with an incarnation once its engine can work, and with "" once it has
        ended."""
        self._config = config
        self._stop = stop
        self._on_ready = on_ready
        self._now = now
        self._limits = Limits(startup_s=config.startup_timeout_s, serving_s=config.hang_timeout_s)
        self._ranks: dict[int, _FarRank] = {}
        self._logged = ""  # the last reason for which it waits
        where = host_and_port(str(config.master_addr), config.master_port)
        self._unanswered = Unanswered(where)

    async def run(self) -> None:
        """Serves one incarnation after another until it is stopped. Raises NodeRefused."""
        master, where = str(self._config.master_addr), self._unanswered.where
        LOG.info("node %d waits for its leader at %s", self._config.node_rank, where)
        while not self._stop.is_set():
            host = await asyncio.to_thread(numeric, master)
            with contextlib.closing(LeaderLink(self._config, host)) as link:
                welcome = await self._join(link)
                if welcome is None:
                    await asyncio.sleep(_PAUSE_S)
                    continue
                LOG.info("incarnation %s begins", welcome.incarnation)
                try:
                    await self._start(host, welcome)
                    why = await self._follow(link, welcome.incarnation)
                    LOG.info("incarnation %s has ended: %s", welcome.incarnation, why)
                finally:
                    await self._end_ranks()
                    self._on_ready("")
            await asyncio.sleep(_PAUSE_S)

    async def _join(self, link: LeaderLink) -> Welcome | None:
        """The leader's welcome; None if this process is stopped, the connection is lost, or there
        was none for so long that the leader may have another address."""
        offer = Joining(node=self._config.node_rank, settings=settings_of(self._config))
        asked_at, until, silence = float("-inf"), self._now() + _LOOK_UP_S, self._unanswered
        while not (self._stop.is_set() or link.disconnected.done()):
            if (now := self._now()) - asked_at >= _ASK_S:
                if link.post(offer):
                    until, silence.why = float("inf"), "it is connected, but silent"
                elif now > until:
                    return None
                elif asked_at > float("-inf"):  # so there was time for a refusal
                    silence.why = f"there is no connection to {link.host}"
                asked_at = now
            silence.look(now)
            if (received := await link.next_message(_LOOK_S, [link.disconnected])) is not None:
                silence.end()
            match received:
                case Welcome() as welcome:
                    self._logged = ""
                    return welcome
                case JoinRefused(message=message, final=True):
                    raise NodeRefused(message)
                case JoinRefused(message=message) if message != self._logged:
                    LOG.warning("cannot join the leader yet: %s", message)
                    self._logged = message
                case _:
                    pass
        if link.disconnected.done() and until < float("inf"):
            silence.why = "the connection ends at once; has the leader another --fleet-secret?"
        return None

    async def _start(self, master: str, welcome: Welcome) -> None:
        config = self._config
        raw = msgspec.Raw(to_json(replace(config, connector=welcome.connector)))
        store = StoreAddress(
            host=master,
            port=welcome.store,
            meeting=welcome.meeting,
            interface=interface_towards(master, config.master_port),
        )
        for rank, port in welcome.commands.items():
            orders = RankOrders(
                rank=rank,
                role=welcome.role,
                leader=RemoteLeader(
                    commands=f"tcp://{host_and_port(master, port)}",
                    answers=f"tcp://{host_and_port(master, welcome.answers)}",
                    key_seed=welcome.key_seed,
                ),
                store=store,
                incarnation=welcome.incarnation,
                leader_pid=os.getpid(),
                alive_fd=None,
                config=raw,
            )
            process = await start(f"effuse.{orders.role}_worker.rank", orders)
            self._ranks[rank] = _FarRank(process, asyncio.ensure_future(process.wait()))

    async def _follow(self, link: LeaderLink, incarnation: str) -> str:
        """Returns once the incarnation is over, with the reason."""
        silence = PeerSilence.begin(self._now(), STARTING * self._limits.serving_s, _LOOK_S)
        beat_at, leaves_at, is_ready = float("-inf"), float("inf"), False
        while True:
            exits = [one.exited for one in self._ranks.values() if not one.is_reported]
            message, now = await link.next_message(_LOOK_S, exits), self._now()
            match message:
                case LeaderBeat(incarnation=found, is_ready=ready) if found == incarnation:
                    silence.received_at = now
                    if ready and not is_ready:
                        is_ready, silence.limit_s = True, self._limits.serving_s
                        self._on_ready(incarnation)
                case Stale(incarnation=found):
                    return f"the leader is of incarnation {found}"
                case _:
                    pass
            if link.disconnected.done():
                return "the connection to the leader has ended"
            if silence.is_over(now):
                return f"the leader has been silent for {now - silence.received_at:.1f} s"
            if self._stop.is_set() and leaves_at == float("inf"):
                leaves_at = now + self._leave()
            if now > leaves_at:
                return "this node is stopping"
            self._report(link, incarnation, now)
            if now - beat_at >= BEAT_S:
                link.post(NodeBeat(incarnation))
                beat_at = now

    def _report(self, link: LeaderLink, incarnation: str, now: float) -> None:
        """Reports ranks that have ended, or that a signal has stopped."""
        for number, rank in self._ranks.items():
            if rank.exited.done():
                if not rank.is_reported:
                    status = rank.exited.result()
                    LOG.info("rank %d has ended with status %d", number, status)
                    link.post(RankGone(incarnation, number, status))
                rank.is_reported = True
            elif rank.stopped.look(rank.process.pid, now) > self._limits.stopped_s:
                link.post(RankStopped(incarnation, number))

    def _leave(self) -> float:
        """How long the leader may still finish its requests, in seconds."""
        most_s = self._config.longest_end_s
        LOG.info(
            "this node ends with its leader, or after %g s; a second signal ends it now", most_s
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, sys.exit, 0)
        return most_s

    async def _end_ranks(self) -> None:
        """Returns once their processes are gone. Raises OSError if one stays."""
        for rank in self._ranks.values():
            if not rank.exited.done():
                with contextlib.suppress(ProcessLookupError):
                    rank.process.kill()
        exits = [one.exited for one in self._ranks.values()]
        if exits and (await asyncio.wait(exits, timeout=_KILL_S))[1]:
            raise OSError("a rank's process survives SIGKILL")
        self._ranks.clear()


async def run(config: WorkerConfig, services: Iterable[str], access: FleetAccess) -> None:
    """Takes part in a worker's group until SIGTERM, and answers health checks for its services.

    Raises NodeRefused if the leader never accepts this host, and OSError if it cannot listen.
    """
    names = list(services)
    server = rpc.RpcServer(rpc.PROBE_LIMITS, tls=access.server_tls())
    port = await server.start(host_and_port(config.host, config.port), names)
    server.health.set("", serving=True)
    if config.health_port is not None:
        await server.start_health(host_and_port(config.host, config.health_port))
    address, written = host_and_port(config.reachable_host(), port), list[str]()

    def on_ready(incarnation: str) -> None:
        for name in names:
            server.health.set(name, serving=bool(incarnation))
        if incarnation and config.ready_file is not None:
            try:
                rpc.write_ready_file(config.ready_file, address, incarnation=incarnation)
            except OSError as error:
                if not written:
                    raise
                LOG.warning("%s could not be written: %s", config.ready_file, error)
            written.append(incarnation)

    try:
        async with rpc.shutdown_signal() as stop:
            await NodeAgent(config, stop, on_ready).run()
    finally:
        await server.stop(0.0)
