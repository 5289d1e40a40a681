"""Source pages of a push that was given up: in use while its receiver is frozen, free once it goes
on or has ended. Over ZMQ closing the connection ends it sooner."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator

import pytest
from kvtransfer.fixtures import LARGE, boundary, filled, next_event
from kvtransfer.receiver_process import make
from kvtransfer.remote import RemoteReceiver

from effuse.kvtransfer.connector import Connector, PushCancelled

NUM_PAGES = 768  # 48 MiB: more than sockets hold
FROZEN_S = 4.0  # longer than a receiver that does not answer is waited for over ZMQ


@contextlib.contextmanager
def given_up(kind: str) -> Iterator[tuple[Connector, RemoteReceiver]]:
    """A sender that has given up a push to a receiver which is frozen in the midst of it."""
    memory = filled(LARGE, NUM_PAGES)
    sender = make(kind, memory, "prefill-1")
    sender.start()
    with contextlib.closing(sender), RemoteReceiver(kind, "large", NUM_PAGES) as receiver:
        met = receiver.reserve([0])
        sender.push_pages(met, [0], 0)
        sender.finish(met, boundary)
        next_event(sender, met.transfer_id)
        reserved = receiver.reserve(range(NUM_PAGES))
        os.kill(receiver.process.pid, signal.SIGSTOP)
        sender.push_pages(reserved, range(NUM_PAGES), 0)
        time.sleep(0.2)
        sender.cancel(reserved.transfer_id)
        yield sender, receiver


def is_cancelled_within(sender: Connector, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        select.select([sender.fileno()], [], [], left)
        if any(isinstance(event, PushCancelled) for event in sender.poll()):
            return True
    return False


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_over_tcp_pages_are_in_use_until_a_frozen_receiver_goes_on_or_has_ended(
    end: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with given_up("nixl") as (sender, receiver):
        assert not is_cancelled_within(sender, FROZEN_S)
        os.kill(receiver.process.pid, end)
        assert is_cancelled_within(sender, 20.0)


def test_over_zmq_a_frozen_receiver_keeps_no_page() -> None:
    with given_up("zmq") as (sender, receiver):
        assert is_cancelled_within(sender, 20.0)
        os.kill(receiver.process.pid, signal.SIGCONT)
