"""Source pages of an abandoned push: in no use while its receiver is frozen, because posted writes
still read them, and free once it goes on or has ended. Over ZMQ closing the connection ends it
sooner.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
from eventually import is_readable
from kvtransfer.fixtures import (
    DEADLINE_S,
    LARGE,
    boundary,
    digests_of,
    filled,
    next_event,
)
from kvtransfer.receiver_process import make
from kvtransfer.remote import RemoteReceiver

from effuse.kvtransfer.connector import FinishPush
from effuse.kvtransfer.ends import Ended, HandoffSender
from effuse.kvtransfer.layout import PageMemory
from effuse.kvtransfer.messages import PageRef
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.thread import ThreadConnector

NUM_PAGES = 768  # 48 MiB: more than sockets hold
FROZEN_S = 2.5  # longer than a receiver that does not answer is waited for over ZMQ
FILLED_S = 0.2  # in which posted writes fill the sockets
NEXT_OWNERS = 9.0


class Prefill:
    """A pool that is pushed completely, and the fate of its pages: they are released when the
    sender reports that the push has ended, and overwritten by their next user.
    """

    def __init__(self, kind: str) -> None:
        self.memory = filled(LARGE, NUM_PAGES)
        self.written = digests_of(self.memory, range(NUM_PAGES))
        self.pool = PagePool(NUM_PAGES)
        self.connector = make(kind, self.memory, "prefill-1")
        self.connector.start()
        self.sender = HandoffSender(self.connector, reservation_s=DEADLINE_S, now=time.monotonic)
        self._held: tuple[PageRef, ...] = ()

    def meet(self, receiver: RemoteReceiver) -> None:
        """Pushes nothing, so that there is a connection."""
        met = receiver.reserve([])
        self.connector.send(FinishPush(met, boundary))
        next_event(self.connector, met.transfer_id)

    def push(self, receiver: RemoteReceiver) -> str:
        """Pushes everything to the receiver, which is frozen; its transfer's name."""
        held, reserved = self.pool.allocate_committed(NUM_PAGES), receiver.reserve(range(NUM_PAGES))
        assert held is not None
        self._held = held
        self.sender.begin(reserved.attempt)
        os.kill(receiver.process.pid, signal.SIGSTOP)
        self.sender.address(reserved)
        self.sender.pages_ready(reserved.transfer_id, [page.page_id for page in held])
        return reserved.transfer_id

    def await_posted(self) -> None:
        """Waits until the connector's thread has posted a write."""
        assert isinstance(self.connector, ThreadConnector)
        transfers = self.connector._exchange._pushes._transfers
        deadline = time.monotonic() + DEADLINE_S
        while not any(push.deliveries for one in list(transfers.values()) for push in one):
            assert time.monotonic() < deadline, "no write was posted"
            time.sleep(0.005)

    def is_reused_within(self, seconds: float) -> bool:
        """Whether another user gets all pages and writes into them."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            is_readable(self.connector.fileno(), min(left, 0.05))
            if any(isinstance(report, Ended) for report in self.sender.poll()):
                self.pool.release(self._held)
            if self.pool.allocate_committed(NUM_PAGES) is not None:
                self.memory.tensor.fill_(NEXT_OWNERS)
                return True
        return False


@contextlib.contextmanager
def given_up(kind: str) -> Iterator[tuple[Prefill, RemoteReceiver]]:
    """A push that was given up, to a receiver which is frozen in the midst of it."""
    prefill = Prefill(kind)
    with (
        contextlib.closing(prefill.connector),
        RemoteReceiver(kind, "large", NUM_PAGES) as receiver,
    ):
        prefill.meet(receiver)
        transfer_id = prefill.push(receiver)
        prefill.await_posted()
        time.sleep(FILLED_S)
        prefill.sender.abort(transfer_id)
        yield prefill, receiver


def others_of(prefill: Prefill, receiver: RemoteReceiver) -> int:
    """Pages of the receiver with neither the pushed content nor their earlier one."""
    before = digests_of(PageMemory(LARGE, NUM_PAGES), range(NUM_PAGES))
    found = [bytes.fromhex(digest) for digest in receiver.digests()]
    assert set(found) & set(prefill.written), "nothing arrived at all"
    return sum(one not in pair for one, *pair in zip(found, prefill.written, before, strict=True))


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.mark.usefixtures("over_tcp")
@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_pages_are_nobodys_until_a_frozen_receiver_goes_on_or_has_ended(
    end: signal.Signals,
) -> None:
    with given_up("nixl") as (prefill, receiver):
        assert not prefill.is_reused_within(FROZEN_S)
        os.kill(receiver.process.pid, end)
        assert prefill.is_reused_within(DEADLINE_S)
        assert not prefill.sender._handoffs
        if end is signal.SIGCONT:
            assert others_of(prefill, receiver) == 0


@pytest.mark.usefixtures("over_tcp")
def test_what_was_posted_is_read_when_the_receiver_goes_on() -> None:
    """Which is why no other user may have them. Here they are overwritten immediately."""
    with given_up("nixl") as (prefill, receiver):
        prefill.memory.tensor.fill_(NEXT_OWNERS)
        os.kill(receiver.process.pid, signal.SIGCONT)
        assert prefill.is_reused_within(DEADLINE_S)
        assert others_of(prefill, receiver) > 0


def test_over_zmq_a_frozen_receiver_keeps_no_page() -> None:
    with given_up("zmq") as (prefill, receiver):
        assert prefill.is_reused_within(DEADLINE_S)
        os.kill(receiver.process.pid, signal.SIGCONT)
