"""A rank's process: reads the leader's commands in their order and runs them on its own device.

It has a part of the weights, of each page, and a connector of its own. It ends with its leader.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import msgspec
import torch
import torch.distributed as dist
import zmq

from effuse.kvtransfer.connector import Command as Transfer
from effuse.kvtransfer.connector import Connector, Expect, Pending, PushPages
from effuse.kvtransfer.digest import DigestJob
from effuse.kvtransfer.layout import MOST_GROUPS, Fingerprint
from effuse.kvtransfer.messages import Shard
from effuse.kvtransfer.zmq_sockets import CurveKeys
from effuse.models.shared_meeting import SharedMeeting
from effuse.models.weights import weights_digest
from effuse.telemetry import logs
from effuse.worker.config import WorkerConfig
from effuse.worker.connectors import connect
from effuse.worker.engine_process import die_with, end_start, leave_imports, read_config
from effuse.worker.meeting import join
from effuse.worker.messages import RankOrders
from effuse.worker.rank_messages import (
    COMMANDS,
    ENCODER,
    Advanced,
    Command,
    Complete,
    Computed,
    CopyPage,
    Digests,
    ForReplica,
    ForwardProgress,
    FromRank,
    GrowSlot,
    JoinSlot,
    LaunchStep,
    LeaveSlot,
    Moved,
    MovePages,
    Open,
    PagesMoved,
    Prepare,
    Quit,
    RankRefused,
    Reached,
    Readdressed,
    RunParts,
    Slots,
    Taken,
    ZeroTail,
    answers_path,
    commands_path,
    meeting_path,
)
from effuse.worker.rank_part import (
    RankPart,
    device_of,
    load_shard,
    make_part,
    read_model,
)
from effuse.worker.watchdog import Pulse

_COPYING_MS: Final = 1  # no descriptor shows that a copy has ended
_STORE_S: Final = 60.0
# Forwards that have begun and of which it is known how far they are: more than may be under way,
# one for each stage of prompts and of answers.
_MOST_FORWARDS: Final = 2 * max(MOST_GROUPS.values())
_SHOW_S: Final = 0.2

Opener = Callable[[Fingerprint], Connector]


class Steps(Protocol):
    """The slots of a decode rank's device."""

    def execute(self, command: Slots) -> None:
        """Does what the leader does with its own slots."""


MakeSteps = Callable[[Any, RankPart], Steps]
"""From the rank's config and part."""


class Leader:
    """The rank's end of the way to its leader."""

    def __init__(self, orders: RankOrders) -> None:
        self._context = zmq.Context()
        rank, home, remote = orders.rank, Path(orders.home), orders.leader
        self._keys = None if remote is None else CurveKeys.of(remote.key_seed)
        commands = commands_path(home, rank) if remote is None else remote.commands
        self._commands = self._connected(zmq.PAIR, commands)
        answers = answers_path(home) if remote is None else remote.answers
        self._answers = self._connected(zmq.PUSH, answers)
        self._rank = rank
        self._digests = Digests()
        self._num_confirmed = 0

    def answer(self, message: FromRank) -> None:
        """Sends an answer; never waits."""
        self._answers.send_multipart([bytes([self._rank]), ENCODER.encode(message)], zmq.NOBLOCK)

    def read(self) -> Command | None:
        """The next command for this rank, if one has come; `confirm` follows."""
        while self._commands.poll(0):
            data = self._commands.recv(zmq.NOBLOCK)
            self._digests.add(data)
            command: Command = COMMANDS.decode(data)
            if not isinstance(command, ForReplica):
                return command
            if command.replica == self._rank:
                return command.command
        return None

    def confirm(self) -> None:
        """Confirms all commands that were read, if there are new ones."""
        if self._digests.count == self._num_confirmed:
            return
        self._num_confirmed = self._digests.count
        self.answer(Taken(self._digests.count, self._digests.value))

    def wait(self, others: Sequence[int], most_ms: int | None = None) -> None:
        """Returns once a command has come, one of these descriptors is readable, or it is late."""
        poller = zmq.Poller()
        for source in (self._commands, *others):
            poller.register(source, zmq.POLLIN)
        poller.poll(most_ms)

    def close(self) -> None:
        """Returns once the last answer has left."""
        for socket in (self._commands, self._answers):
            socket.close()
        self._context.term()

    def _connected(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            socket.set(option, 0)
        socket.set(zmq.LINGER, 1000)
        socket.set(zmq.IPV6, int("[" in endpoint))
        if self._keys is not None:
            self._keys.ask(socket)
        socket.connect(endpoint)
        return socket


class Rank:
    """Runs commands. Those about transfers are taken between the layers of a forward, too."""

    def __init__(
        self,
        leader: Leader,
        part: RankPart,
        open_connector: Opener,
        make_steps: Callable[[], Steps] | None,
        *,
        pushes: bool,
    ) -> None:
        """`pushes`: it is a prefill worker's, whose forwards are followed."""
        self._leader = leader
        self._pushes = pushes
        self._part = part
        self._open = open_connector
        self._make_steps = make_steps
        self._steps: Steps | None = None
        self._connector: Connector | None = None
        self._shard: Shard | None = None
        self._inbox: deque[Command] = deque()
        self._next = 0  # number of the next forward that begins here
        self._held: deque[RunParts] = deque()  # forwards of a last stage, until the leader's begin
        self._progress: dict[int, ForwardProgress] = {}  # of forwards, by number
        self._advanced_s = 0.0  # when the leader was last shown that a layer is done
        self._copying: dict[int, DigestJob] = {}  # copies from and to host memory, by number

    def run(self) -> None:
        """Returns after `Quit`."""
        while True:
            self._look()
            if self._inbox:
                command = self._inbox.popleft()
                if isinstance(command, Quit):
                    break
                self._execute(command)
            else:
                signals = () if self._connector is None else (self._connector.fileno(),)
                self._leader.wait(signals, _COPYING_MS if self._copying else None)
        if self._connector is not None:
            self._connector.close()

    def between_layers(self) -> None:
        """Runs commands about transfers that have come, up to the next one about memory."""
        now = time.monotonic()
        if self._part.model.stage is not None and now - self._advanced_s > _SHOW_S:
            self._advanced_s = now
            self._leader.answer(Advanced(self._next - 1))
        self._look()
        while self._inbox and isinstance(self._inbox[0], Transfer):
            self._execute(self._inbox.popleft())

    def _look(self) -> None:
        """Takes in commands, and sends what became of transfers.

        A transfer is expected before that is confirmed: the leader then sends the reservation, and
        its writer may begin while a forward runs here.
        """
        while (command := self._leader.read()) is not None:
            if isinstance(command, Expect):
                self._execute(command)
            else:
                self._inbox.append(command)
            self._leader.confirm()
        self._leader.confirm()
        for number, job in list(self._copying.items()):
            if (found := job()) is not None:
                del self._copying[number]
                self._leader.answer(PagesMoved(number, found.tobytes()))
        if self._connector is None:
            return
        for event in self._connector.poll():
            self._leader.answer(Moved(event))
        (shard,) = self._connector.describe()
        if shard != self._shard:
            self._shard = shard
            self._leader.answer(Readdressed(shard))

    def _execute(self, command: Command) -> None:
        match command:
            case RunParts():
                stage = self._part.model.stage
                if stage is not None and stage.is_last:
                    self._held.append(command)
                else:
                    self._compute(command)
            case Complete():
                if self._held:  # in the last stage
                    self._compute(self._held.popleft())
            case CopyPage(source=source, target=target):
                self._part.memory.copy_page(source, target)
            case ZeroTail(page_id=page_id, num_used=num_used):
                self._part.memory.zero_tail(page_id, num_used)
            case MovePages(number=number, page_ids=page_ids, slots=slots, loads=loads):
                host = self._part.host
                assert host is not None, "the leader has one, too"
                copies = host.load(slots, page_ids) if loads else host.save(page_ids, slots)
                self._copying[number] = copies
            case JoinSlot() | LeaveSlot() | GrowSlot() | LaunchStep():
                assert self._steps is not None, "they are prepared before a step"
                self._steps.execute(command)
            case Prepare():
                assert self._make_steps is not None, "this is a decode rank"
                self._steps = self._make_steps()
            case Open(fingerprint=fingerprint):
                try:
                    self._connector = self._open(fingerprint)
                except ValueError as error:  # the leader ends its start, and so this rank
                    self._leader.answer(RankRefused(str(error)))
                    return
                (self._shard,) = self._connector.describe()
                self._leader.answer(Reached("open", self._shard))
            case Quit() | ForReplica():
                raise AssertionError("the loop and the leader's end take them")
            case _:
                assert self._connector is not None, "it is opened before transfers begin"
                if isinstance(command, PushPages) and command.num_final is not None:
                    progress = self._progress_of(command.num_final)
                    command = msgspec.structs.replace(command, num_final=progress)
                self._connector.send(command)

    def _compute(self, forward: RunParts) -> None:
        model, runner, number = self._part.model, self._part.runner, forward.number
        self._next = number + 1
        if self._pushes:
            self._progress.setdefault(number, ForwardProgress(number)).stored = runner.progress()
        results = runner.run(forward.parts)
        if model.replicas is not None:
            self._settle()
            self._leader.answer(Computed(number, results))
        elif model.stage is not None:
            self._leader.answer(Advanced(self._next))
        for old in [at for at in self._progress if at <= number - _MOST_FORWARDS]:
            del self._progress[old]

    def _settle(self) -> None:
        """A replica's pages may change hands once its results are there."""
        device = self._part.model.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _progress_of(self, forward: Pending[int]) -> Pending[int] | None:
        """How far a forward is, begun or not. One that is not known any more has ended."""
        assert isinstance(forward, ForwardProgress), "the leader names only forwards of the group"
        if forward.number >= self._next:
            self._progress.setdefault(forward.number, forward)
        return self._progress.get(forward.number)


class RankPulse(Pulse):
    """Between layers a rank has no front to send beats to, but transfers to take care of."""

    def mark(self, _layer: int = 0) -> None:
        """A layer is stored."""
        self.meanwhile()


def main(config_type: type[WorkerConfig], make_steps: MakeSteps | None = None) -> NoReturn:
    """Runs a rank to its end: status 0 after `Quit`, 2 if it cannot start, 1 if it may later."""
    leave_imports()
    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=RankOrders)
    die_with(orders.leader_pid)
    config = read_config(orders.config, config_type)
    logs.set_up(f"rank {orders.rank}", config.log_level, config.log_format)
    leader = Leader(orders)
    try:
        rank = _start(orders, config, leader, make_steps)
    except ValueError as error:
        leader.answer(RankRefused(f"rank {orders.rank}: {error}"))
        status = 2
    except ConnectionError:  # another rank may have crashed; `join_group` has logged it
        status = 1
    else:
        end_start()
        rank.run()
        status = 0
    leader.close()
    logs.leave(status)


def _meeting(orders: RankOrders) -> Path | SharedMeeting:
    if orders.store is None:
        return meeting_path(Path(orders.home))
    where, limit = orders.store, timedelta(seconds=_STORE_S)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        where.host, where.port, is_master=False, timeout=limit
    )
    return SharedMeeting(store, where.meeting, where.interface)


def _check_weights(config: WorkerConfig, agreed: Fingerprint, rank: int) -> None:
    """Refuses another host's weights. Raises ValueError with both digests."""
    (expected,) = [field.value for field in agreed if field.name == "weights"]
    found = weights_digest(config.directory, config.adapter)
    if found != expected:
        raise ValueError(
            f"rank {rank}: its host has different weights: the digest is {expected} on node 0 and "
            f"{found} on node {config.node_rank}"
        )


def _start(
    orders: RankOrders, config: WorkerConfig, leader: Leader, make_steps: MakeSteps | None
) -> Rank:
    """A rank that is ready for commands. Raises ValueError."""
    device = device_of(config, orders.rank)
    if orders.alive_fd is not None:
        os.dup(orders.alive_fd)  # behind the device's own descriptors, see `listen_while_alive`
    leader.answer(Reached("present"))
    place = join(config, read_model(config), orders.rank, device, _meeting(orders))
    pulse = RankPulse(lambda _: None)
    model = load_shard(config, device, place, pulse)
    leader.answer(Reached("loaded"))
    part = make_part(config, orders.role, pulse, model, host_fd=orders.host_fd)

    def open_connector(fingerprint: Fingerprint) -> Connector:
        if orders.leader is not None and orders.rank % config.ranks_per_node == 0:
            _check_weights(config, fingerprint, orders.rank)
        return connect(
            config,
            part.memory,
            part.max_model_len,
            orders.incarnation,
            fingerprint,
            orders.role,
            orders.rank,
        )

    steps = None if make_steps is None else partial(make_steps, config, part)
    rank = Rank(leader, part, open_connector, steps, pushes=orders.role != "decode")
    pulse.meanwhile = rank.between_layers
    return rank
