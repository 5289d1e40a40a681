"""Source pages of a push that was given up: in use while its receiver is frozen, as what was posted
is still read from them, and free once it goes on or has ended. Over ZMQ closing the connection ends
it sooner."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from kvtransfer.fixtures import DEADLINE_S, LARGE, boundary, digests_of, filled, next_event
from kvtransfer.receiver_process import make
from kvtransfer.remote import RemoteReceiver

from effuse.kvtransfer.memory import PageMemory
from effuse.kvtransfer.messages import AttemptId, PageRef
from effuse.kvtransfer.pool import PagePool
from effuse.kvtransfer.sender import Ended, HandoffSender

NUM_PAGES = 768  # 48 MiB: more than sockets hold
FROZEN_S = 3.0  # longer than a receiver that does not answer is waited for over ZMQ
NEXT_OWNERS = 9.0


class Prefill:
    """A pool whose pages are all pushed, and what a prefill engine does with them: they are
    released, and overwritten by who comes next, once the sender says that the push has ended."""

    def __init__(self, kind: str) -> None:
        self.memory = filled(LARGE, NUM_PAGES)
        self.pool = PagePool(NUM_PAGES)
        self.connector = make(kind, self.memory, "prefill-1")
        self.connector.start()
        self.sender = HandoffSender(self.connector, reservation_s=DEADLINE_S, now=time.monotonic)
        self._pages: tuple[PageRef, ...] = ()

    def push(self, receiver: RemoteReceiver) -> AttemptId:
        """Pushes the whole pool."""
        pages = self.pool.allocate_committed(NUM_PAGES)
        assert pages is not None
        reserved = receiver.reserve(range(NUM_PAGES))
        self._pages = pages
        self.sender.begin(reserved.attempt)
        self.sender.address(reserved)
        self.sender.pages_ready(reserved.transfer_id, [page.page_id for page in pages])
        return reserved.attempt

    def turn(self) -> None:
        """What an engine does in a turn of its loop."""
        if any(isinstance(report, Ended) for report in self.sender.poll()):
            self.pool.release(self._pages)
        if self.pool.allocate_committed(1) is not None:
            self.memory.tensor.fill_(NEXT_OWNERS)

    def turn_until(self, is_so: Callable[[], bool], within_s: float) -> bool:
        """Turns until it is so; False once it has not been for so long."""
        deadline = time.monotonic() + within_s
        while not is_so():
            if time.monotonic() > deadline:
                return False
            select.select([self.connector.fileno()], [], [], 0.01)
            self.turn()
        return True

    def has_page(self) -> bool:
        """Whether somebody else has got a page."""
        return len(self.sender) == 0 and self.pool.num_free < NUM_PAGES
