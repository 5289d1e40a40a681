"""All sending and receiving of one pool over one transport, and the thread that runs it.

On a separate thread, because one transfer call can block for more than a second. Commands go in,
events come out, and a descriptor is readable while there are any.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from effuse.kvtransfer.connector import (
    Cancel,
    Command,
    ConnectorDied,
    ConnectorEvent,
    Expect,
    Fence,
    FinishPush,
    Forget,
    ForgetLife,
    PushPages,
)
from effuse.kvtransfer.digest import BesideCopies, digester_of
from effuse.kvtransfer.layout import Fingerprint, Identity, PageMemory
from effuse.kvtransfer.messages import Shard
from effuse.kvtransfer.push import shard_of
from effuse.kvtransfer.pushes import Pushes
from effuse.kvtransfer.reception import Receptions
from effuse.kvtransfer.transport import (
    ConnectorParts,
    FromReceiver,
    FromWriter,
    Lost,
    Pace,
    Received,
    Transport,
)

LOG = logging.getLogger(__name__)

LIVELY_S = 1.0  # a sent message may need more polls here before it leaves
HOT_S = 0.0005  # after a movement the next one is due so soon that sleeping costs more
OPEN_S = 60.0  # registering a large pool takes time
JOIN_S = 10.0
STUCK_S = 180  # limit for one call, of which none takes longer: a kernel may have to be compiled
_PAUSE_S = 10.0  # between two polls of the engine, which was stopped itself then
# How long a computing thread may keep the interpreter from others: the default of 5 ms is as long
# as several handoffs.
SWITCH_S = 0.0002


@dataclass(eq=False)
class Exchange(ConnectorParts):
    """Pushes and receptions of one pool, which carry out commands."""

    def __post_init__(self) -> None:
        self._moved_at = -LIVELY_S
        parts = self._own, self._emit, self._now
        self._beside = BesideCopies(self._digester, self._own.layout)
        of_sent = self._beside if self._transport.copies_in_deliver else self._digester
        self._pushes = Pushes(self._transport, of_sent, *parts)
        self._receptions = Receptions(self._transport, self._digester, *parts)

    def close(self) -> None:
        """Ends the transport, and the thread for digests."""
        self._beside.close()
        self._transport.close()

    def execute(self, command: Command, at: float) -> None:
        """Carries out a command that the engine gave at this time."""
        match command:
            case Expect(reservation, writer):
                self._receptions.expect(reservation, writer)
            case Forget(transfer_id):
                self._receptions.forget(transfer_id)
            case Fence(transfer_id, has_drained):
                self._receptions.fence(transfer_id, has_drained=has_drained)
            case PushPages(reservation, source_pages, first, num_final):
                self._pushes.push_pages(reservation, source_pages, first, num_final, at)
            case FinishPush(reservation, boundary):
                self._pushes.finish(reservation, boundary, at)
            case Cancel(transfer_id):
                self._pushes.cancel(transfer_id)
            case ForgetLife(incarnation):
                self._transport.forget_life(incarnation)

    def receive(self) -> list[Received]:
        """Messages since the last call."""
        return self._transport.receive()

    def turn(self, received: Sequence[Received]) -> bool:
        """Handles received messages and advances transfers; True if anything moved."""
        for item in received:
            match item:
                case FromWriter():
                    self._receptions.take(item)
                case FromReceiver(peer, message):
                    self._pushes.take(peer, message)
                case Lost(peer, refusal):
                    self._pushes.lose(peer, refusal)
        moved = self._pushes.turn() | self._receptions.turn() | bool(received)
        if moved:
            self._moved_at = self._now()
        return moved

    @property
    def is_moving(self) -> bool:
        """Whether bytes, digests, or a peer's last message are on their way."""
        return self._pushes.is_moving or self._receptions.is_moving

    def wait(self, requests: int) -> None:
        """Sleeps while nothing is likely to happen, or until `requests` is readable."""
        self._transport.wait(self._pace(), requests)

    def _pace(self) -> Pace:
        since = self._now() - self._moved_at
        if self.is_moving:
            return Pace.HOT if since < HOT_S else Pace.MOVING
        if self._pushes.awaits_forward:
            return Pace.COMPUTING
        if self._receptions.has_begun:
            return Pace.BEGUN
        has_open = len(self._pushes) or len(self._receptions)
        return Pace.EXPECTING if has_open or since < LIVELY_S else Pace.IDLE


class ThreadConnector:
    """A Connector; `transport` belongs to its thread from the start on."""

    def __init__(
        self,
        transport: Transport,
        memory: PageMemory,
        incarnation: str,
        fingerprint: Fingerprint,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = transport.name
        self._transport = transport
        self._layout = memory.layout
        self._now = now
        own = Identity(incarnation, fingerprint, memory.layout)
        self._exchange = Exchange(transport, digester_of(memory), own, self._emit, now)
        self._requests: deque[tuple[Command, float]] = deque()  # with their times
        self._events: deque[ConnectorEvent] = deque()
        self._error: Exception | None = None
        self._turns = 0  # of the thread
        self._turns_seen, self._turned_at, self._polled_at = 0, now(), now()
        self._closing = threading.Event()
        self._opened = threading.Event()
        self._ended = threading.Event()
        self._request_signal = _signal()
        self._event_signal = _signal()
        title = f"{self.name} connector of {incarnation}"
        self._thread = threading.Thread(target=self._run, name=title, daemon=True)

    def start(self) -> None:
        """Starts the thread and waits until it is open. Raises ValueError if it cannot be."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread.start()
        if not self._opened.wait(OPEN_S):
            raise ValueError(f"the {self._thread.name} did not open within {OPEN_S} s")
        if self._ended.is_set():
            raise ValueError(
                f"the {self._thread.name} could not open: {self._error}"
            ) from self._error

    def close(self) -> None:
        """Ends the thread; may be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        _raise(self._request_signal)
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            os.close(self._request_signal)
            os.close(self._event_signal)

    def describe(self) -> tuple[Shard, ...]:
        return (shard_of(self._layout, self._transport.address()),)

    def send(self, command: Command) -> None:
        """Makes the thread carry out a command soon; from any thread."""
        self._requests.append((command, self._now()))
        _raise(self._request_signal)

    def poll(self) -> list[ConnectorEvent]:
        """Events since the last call. Raises ConnectorDied if the thread has ended by itself, or is
        stuck in a call.
        """
        if self._ended.is_set():
            raise ConnectorDied(f"the {self._thread.name} has ended") from self._error
        self._check_turns()
        _lower(self._event_signal)
        return [self._events.popleft() for _ in range(len(self._events))]

    def fileno(self) -> int:
        return self._event_signal

    def _check_turns(self) -> None:
        now = self._now()
        stood_still = now - self._polled_at > _PAUSE_S
        self._polled_at = now
        if stood_still or self._turns != self._turns_seen:
            self._turns_seen, self._turned_at = self._turns, now
        if (since := now - self._turned_at) >= STUCK_S:
            raise ConnectorDied(f"the {self._thread.name} has been in one call for {since:.0f} s")

    def _emit(self, event: ConnectorEvent) -> None:
        """Passes an event to the engine; from the connector's thread."""
        self._events.append(event)
        _raise(self._event_signal)

    def _run(self) -> None:
        try:
            self._live()
        except Exception as error:
            LOG.exception("the %s has ended", self._thread.name)
            self._error = error
        self._ended.set()
        self._opened.set()
        _raise(self._event_signal)

    def _live(self) -> None:
        self._transport.open()
        self._opened.set()
        # A peer's message may be the consequence of a request that is still queued, such as a
        # reservation. So requests are served after receiving, before received messages are handled.
        received = self._exchange.receive()
        while self._serve_requests() and threading.main_thread().is_alive():
            self._turns += 1
            if not self._exchange.turn(received):
                self._exchange.wait(self._request_signal)
            received = self._exchange.receive()
        self._exchange.close()

    def _serve_requests(self) -> bool:
        """False once the thread should end."""
        # Reset before `closing` is checked: otherwise a close() in between would not wake the
        # thread.
        _lower(self._request_signal)
        if self._closing.is_set():
            return False
        # Also those that arrive meanwhile: while another agent was made, the engine gave the old
        # address out, and its reservations must be known before that address is shut off.
        while self._requests:
            command, at = self._requests.popleft()
            self._exchange.execute(command, at)
            if isinstance(command, Fence):  # the address may be another one now
                _raise(self._event_signal)
        return True


def _signal() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def _raise(signal: int) -> None:
    os.eventfd_write(signal, 1)


def _lower(signal: int) -> None:
    """Always before the queue is read: otherwise a late signal would stay set for ever, and its
    waiter would spin.
    """
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(signal)
