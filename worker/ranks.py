"""The other ranks of a group, for its leader: their processes, commands to them, and their answers.

A group computes together or not at all. If a rank ends, or reads another command than the leader
sent, the whole engine ends, because collectives of the others would wait forever. A thread watches
for both: the engine's own thread may itself be blocked in such a collective.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

import msgspec
import zmq

from effuse.kvtransfer.connector import ConnectorEvent
from effuse.kvtransfer.messages import Shard
from effuse.models.group import ALONE, Group
from effuse.models.part import PartResult
from effuse.models.shared_meeting import SharedMeeting
from effuse.placement.records import Role
from effuse.worker.config import WorkerConfig, to_json
from effuse.worker.engine_home import kept_open, make_home
from effuse.worker.messages import RankOrders
from effuse.worker.node_messages import RankGone
from effuse.worker.nodes import Nodes, why_of
from effuse.worker.rank_messages import (
    ENCODER,
    Advanced,
    Command,
    Computed,
    Digests,
    FromRank,
    Moved,
    PagesMoved,
    Quit,
    RankRefused,
    Reached,
    Readdressed,
    Stage,
    Taken,
    answers_path,
    bound,
    commands_path,
    meeting_path,
    read_answer,
    spawn,
)
from effuse.worker.watchdog import GroupBroken, Limits, Stopped, end_process

LOG = logging.getLogger(__name__)

_CONFIRM_S: Final = 30.0
_LAYER_S: Final = 60.0  # as for a collective
_LOOK_MS: Final = 250
_QUIT_S: Final = 5.0
_SETTLED_S: Final = 0.3  # after a failure, for the rank that caused it to be seen


@dataclass(slots=True, eq=False)
class _Rank:
    """One of the other ranks. The watching thread changes it."""

    commands: zmq.Socket[bytes]
    process: subprocess.Popen[bytes] | None = None  # None on another host
    end: int = -1  # a descriptor that is readable once the process has ended
    has_ended: bool = False
    stages: list[Stage] = field(default_factory=list)  # of its start, which it has reached
    shard: Shard | None = None  # of its connector
    taken: int = 0  # commands that it has read
    stopped: Stopped = field(default_factory=Stopped)


class Ranks:
    """Ranks 1 to `size` - 1. The engine's thread calls all methods."""

    def __init__(
        self,
        config: WorkerConfig,
        role: Role,
        incarnation: str,
        on_broken: Callable[[str, str], None] = end_process,
    ) -> None:
        """Starts their processes. `on_broken` is called by the watching thread, once, with the
        reason and with what became of the rank: a key of `BROKEN_STATUS`. Raises OSError if a
        process cannot be started."""
        self.size = config.num_ranks
        self.group: Group = ALONE  # once it is joined
        self._on_broken = on_broken
        self._digests = Digests()
        self._events = {rank: deque[ConnectorEvent]() for rank in range(1, self.size)}
        self._computed: dict[int, Computed] = {}  # by rank: the last forward's
        self._advanced: dict[int, int] = {}  # by rank: the number of its last `Advanced`
        self._num_signs = 0  # such messages
        # If there is a pipeline, the stage before the last.
        self._feeders = range(config.tensor_parallel_size, 2 * config.tensor_parallel_size)
        self._moved: dict[int, dict[int, bytes]] = {}  # digests by copy and rank
        # Shared with the watching thread, under the condition's lock.
        self._changed = threading.Condition()
        self._sent: dict[int, int] = {}  # digest by count, until every rank has answered
        self._refusal: str | None = None
        self._failure: str | None = None
        self._suspicion: tuple[str, str, float] | None = None  # a failure, its kind and its time
        self._is_closing, self._next_look = False, 0.0
        with contextlib.ExitStack() as self._ends:
            self._start(config, role, incarnation)
            self._ends = self._ends.pop_all()

    def _start(self, config: WorkerConfig, role: Role, incarnation: str) -> None:
        """Makes all that `_ends` ends, in the opposite order."""
        self.home = make_home()
        self._ends.callback(shutil.rmtree, self.home, ignore_errors=True)
        self.event_signal = self._kept(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self.host_fd = self._kept(os.memfd_create("effuse-units"))  # empty until ranks map it
        self._stop = self._kept(os.eventfd(0, os.EFD_CLOEXEC))  # readable once the thread is to end
        self._ends.callback(lambda: self.group.close())
        self._context = zmq.Context()
        self._ends.callback(self._context.term)
        self._answers = self._bound(zmq.PULL, answers_path(self.home))
        self._nodes = Nodes(config, role, incarnation) if config.nnodes > 1 else None
        if self._nodes is not None:
            self._ends.callback(self._nodes.close)
        self._others: dict[int, _Rank] = {}
        for rank in range(1, self.size):
            self._others[rank] = self._started(rank, config, role, incarnation)
        limits = Limits(startup_s=config.startup_timeout_s, serving_s=config.hang_timeout_s)
        frozen_s = (limits.stopped_s,)
        watcher = threading.Thread(target=self._watch, args=frozen_s, name="ranks", daemon=True)
        watcher.start()
        self._ends.callback(watcher.join)
        self._ends.callback(os.eventfd_write, self._stop, 1)

    def _kept(self, descriptor: int) -> int:
        self._ends.callback(os.close, descriptor)
        return descriptor

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        made = bound(self._context, kind, endpoint)
        self._ends.callback(made.close, 0)
        return made

    @property
    def meeting(self) -> Path | SharedMeeting:
        """Where the ranks meet."""
        return meeting_path(self.home) if self._nodes is None else self._nodes.meeting()

    def wait_for(self, stage: Stage, timeout_s: float) -> None:
        """Returns once every rank has reached `stage` of its start. Raises ValueError if one cannot
        start, and GroupBroken if one has ended or takes longer."""

        def is_there() -> bool:
            return bool(self._refusal) or all(stage in one.stages for one in self._others.values())

        self._await(is_there, timeout_s, f"a rank was not {stage} after {timeout_s:g} s")
        if self._refusal is not None:
            raise ValueError(self._refusal)
        if self._nodes is not None:
            self._nodes.roll.is_ready = stage == "open"

    def check(self) -> None:
        """Raises GroupBroken if the group is."""
        if self._failure is not None:
            raise GroupBroken(self._failure)

    def send(self, command: Command) -> int:
        """Sends a command to every rank, and returns how many were sent so far; never waits."""
        data = ENCODER.encode(command)
        digest = self._digests.add(data)
        with self._changed:
            self._sent[self._digests.count] = digest
        for other in self._others.values():
            with contextlib.suppress(zmq.Again):  # it has ended, which the thread finds
                other.commands.send(data, zmq.NOBLOCK)
        return self._digests.count

    def confirm(self, count: int | None = None) -> None:
        """Returns once every rank has read all that was sent, as it was sent; or the first `count`
        commands. Raises GroupBroken."""
        count = self._digests.count if count is None else count
        text = f"a rank has not read its commands for {_CONFIRM_S:g} s"
        self._await(lambda: self._num_taken() >= count, _CONFIRM_S, text)

    def await_rows(self, number: int, on_sign: Callable[[], None]) -> None:
        """Returns once `sent_rows`; calls `on_sign` when a stage advances. Raises GroupBroken."""
        text = f"no stage has computed a layer for {_LAYER_S:g} s"
        while not self.sent_rows(number):
            seen = self._num_signs
            self._await(lambda: self.sent_rows(number) or self._num_signs > seen, _LAYER_S, text)  # noqa: B023
            on_sign()

    def sent_rows(self, number: int) -> bool:
        """Whether the last stage's rows of a forward are on their way."""
        return all(self._advanced.get(rank, 0) > number for rank in self._feeders)

    def _await(self, is_there: Callable[[], bool], timeout_s: float, text: str) -> None:
        """Waits for the watching thread. Raises GroupBroken, with `text` if it is late."""
        with self._changed:
            in_time = self._changed.wait_for(lambda: bool(self._failure) or is_there(), timeout_s)
            self.check()
        if not in_time:
            raise GroupBroken(text)

    def failed(self, error: Exception, work: str = "a forward") -> NoReturn:
        """Breaks the group: the leader's part of its work has failed. Raises GroupBroken."""
        LOG.error("%s of the group failed", work, exc_info=error)
        self._suspect(f"the leader's part of {work} failed: {error}")
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, _CONFIRM_S)
        raise GroupBroken(self._failure) from error

    def shards(self) -> tuple[Shard, ...]:
        """How peers reach the pool of each rank, in their order; their connectors are open."""
        return tuple(one.shard for one in self._others.values() if one.shard is not None)

    def computed(self, number: int) -> list[list[PartResult]]:
        """Results of replicas in this forward, by rank from 1 on. Raises GroupBroken."""
        found, count = self._computed.values(), self.size - 1
        text = f"a replica has computed nothing for {_CONFIRM_S:g} s"
        self._await(lambda: sum(one.number == number for one in found) == count, _CONFIRM_S, text)
        return [self._computed[rank].results for rank in self._others]

    def moved(self, number: int) -> list[bytes] | None:
        """Digests of a `MovePages`, by rank from 1; None until all came. Raises GroupBroken."""
        self.check()
        if len(self._moved.get(number, ())) < len(self._others):
            return None
        return [digests for _, digests in sorted(self._moved.pop(number).items())]

    def events(self, rank: int) -> Sequence[ConnectorEvent]:
        """A rank's events since the last call; clears the signal, so take those of all ranks."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event_signal)
        events = self._events[rank]
        return [events.popleft() for _ in range(len(events))]

    def close(self) -> None:
        """Ends the ranks, killed if they do not end in time; may be called twice."""
        if self._is_closing:
            return
        self.send(Quit())
        self._is_closing = True
        with self._changed:  # ranks of other hosts end with our sockets at the latest
            others = self._others.values()
            self._changed.wait_for(lambda: all(one.has_ended for one in others), _QUIT_S)
        self._ends.close()

    def _started(self, rank: int, config: WorkerConfig, role: Role, incarnation: str) -> _Rank:
        if self._nodes is not None and rank in self._nodes.commands:
            return _Rank(self._nodes.commands[rank])
        orders = RankOrders(
            rank=rank,
            role=role,
            home=str(self.home),
            store=None if self._nodes is None else self._nodes.address,
            incarnation=incarnation,
            leader_pid=os.getpid(),
            alive_fd=kept_open[0] if kept_open else None,
            host_fd=self.host_fd,
            config=msgspec.Raw(to_json(config)),
        )
        commands = self._bound(zmq.PAIR, commands_path(self.home, rank))
        process = self._ends.push(spawn(orders))
        self._ends.callback(process.kill)
        return _Rank(commands, process, self._kept(os.pidfd_open(process.pid)))

    def _num_taken(self) -> int:
        """Commands that every rank has read."""
        return min(one.taken for one in self._others.values())

    # In the watching thread.

    def _look_for_frozen(self, limit_s: float) -> None:
        """Breaks the group if a signal has stopped a rank for so long, also while it is idle."""
        if (now := time.monotonic()) < self._next_look:  # it takes as long as several answers
            return
        self._next_look = now + _LOOK_MS / 1000
        for rank, other in self._others.items():
            if other.process is not None and other.stopped.look(other.process.pid, now) > limit_s:
                self._break(f"a signal has stopped rank {rank}", "stopped")

    def _watch(self, frozen_s: float) -> None:
        """Returns once it is to end. If it ends in another way, so does the group."""
        try:
            self._look_at_all(frozen_s)
        except Exception as error:
            LOG.exception("nothing watches the ranks any more")
            self._break(f"the watch of the ranks has failed: {error}", "died")

    def _look_at_all(self, frozen_s: float) -> None:
        poller = zmq.Poller()
        answers = [self._answers, *([self._nodes.answers] if self._nodes else [])]
        for source in (*answers, self._stop, *(self._nodes.sources() if self._nodes else ())):
            poller.register(source, zmq.POLLIN)
        ends = {one.end: (rank, one.process) for rank, one in self._others.items() if one.process}
        for end in ends:
            poller.register(end, zmq.POLLIN)
        while self._stop not in (ready := dict(poller.poll(_LOOK_MS))):
            self._look_for_frozen(frozen_s)
            for socket in answers:
                while socket.poll(0):
                    frames = socket.recv_multipart(copy=False)
                    rank, answer = read_answer([one.bytes for one in frames], self.size)
                    if self._nodes is not None:
                        self._nodes.note(rank, frames)
                    with self._changed:
                        self._take(rank, answer)
                        self._changed.notify_all()
            for end in ends.keys() & ready.keys():
                poller.unregister(end)
                self._end(ends[end][0], ends[end][1].wait())
            if self._nodes is not None:
                self._follow(self._nodes)
            self._conclude()

    def _follow(self, nodes: Nodes) -> None:
        """Takes reports of other hosts and their ranks."""
        for event in nodes.turn():
            if isinstance(event, RankGone):
                self._end(event.rank, event.status)
            else:
                self._break(why_of(event), "stopped")
        for rank in nodes.lost():
            if not (self._is_closing or self._others[rank].has_ended):
                # Its node would have reported how it ended.
                self._suspect(f"the connection to rank {rank} has ended", "killed")

    def _take(self, rank: int, answer: FromRank) -> None:
        """Notes an answer, under the condition's lock."""
        other = self._others[rank]
        match answer:
            case Taken(count=count, digest=digest):
                self._compare(rank, count, digest)
            case Moved(event=event):
                self._events[rank].append(event)
                os.eventfd_write(self.event_signal, 1)
            case Computed():
                self._computed[rank] = answer
            case Advanced(number=number):
                self._advanced[rank] = number
                self._num_signs += 1
            case PagesMoved(number=number, digests=digests):
                self._moved.setdefault(number, {})[rank] = digests
            case Readdressed(shard=shard):
                other.shard = shard
            case Reached(stage=stage, shard=shard):
                other.shard = shard
                other.stages.append(stage)
            case RankRefused(message=message):
                self._refusal = message

    def _compare(self, rank: int, count: int, digest: int) -> None:
        if self._sent.get(count) == digest:
            self._others[rank].taken = count
            for done in [at for at in self._sent if at < self._num_taken()]:
                del self._sent[done]
        else:
            self._break(f"rank {rank} did not read command {count} as it was sent", "died")

    def _end(self, rank: int, status: int) -> None:
        with self._changed:
            self._others[rank].has_ended = True
            self._changed.notify_all()
        if self._is_closing or self._refusal is not None:
            return
        message = f"rank {rank} has ended with status {status}"
        if status == -signal.SIGKILL:
            self._break(message, "killed")
        else:
            self._suspect(message)

    def _suspect(self, message: str, ending: str = "died") -> None:
        """Breaks the group soon. If a rank was killed, parts of the others fail first or at the
        same time, and the reason is the kill: it may have come from outside."""
        with self._changed:
            self._suspicion = self._suspicion or (message, ending, time.monotonic())

    def _conclude(self) -> None:
        if (found := self._suspicion) and time.monotonic() - found[2] > _SETTLED_S:
            self._break(*found[:2])

    def _break(self, message: str, ending: str) -> None:
        with self._changed:
            is_first, self._failure = self._failure is None, self._failure or message
            self._changed.notify_all()
        if is_first and not self._is_closing:
            for other in self._others.values():
                if other.process is not None:
                    other.process.kill()  # one that is stopped as it starts does not end with us
            self._on_broken(message, ending)
