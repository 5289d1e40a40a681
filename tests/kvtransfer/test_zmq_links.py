"""Handoffs over ZMQ through a link that is cut, truncated, slow or late arrive whole or not at all,
and the next one arrives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
from fault_proxy import FaultProxy, Harm
from kvtransfer.fixtures import LARGE, boundary, digests_of, filled, next_event
from kvtransfer.receiver_process import make
from kvtransfer.remote import RemoteReceiver

from effuse.kvtransfer.connector import Cause, Connector, PushCancelled, Pushed, PushFailed

PAGES = range(2)  # 128 KiB: less than three seconds of a slow link
SOURCE = filled(LARGE, len(PAGES))
DIGESTS = [digest.hex() for digest in digests_of(SOURCE, PAGES)]


@dataclass(frozen=True)
class Link:
    """A sender, a receiver in another process, and what lies between them."""

    sender: Connector
    receiver: RemoteReceiver
    proxy: FaultProxy
    target: str

    def push(self, lease_s: float = 60.0) -> str:
        """Pushes everything through the proxy; the transfer's name."""
        reserved = self.receiver.reserve(PAGES, lease_s=lease_s)
        address = msgspec.structs.replace(reserved.address, endpoint=f"tcp://{self.proxy.address}")
        reserved = msgspec.structs.replace(reserved, address=address)
        self.sender.push_pages(reserved, PAGES, 0)
        self.sender.finish(reserved, boundary)
        return reserved.transfer_id

    def check_arrives(self) -> None:
        """A push arrives whole."""
        transfer_id = self.push()
        assert self.receiver.hear(transfer_id)["digests"] == DIGESTS
        assert isinstance(next_event(self.sender, transfer_id), Pushed)

    def check_fails(self, transfer_id: str, cause: Cause) -> None:
        """A push fails, and lets its pages go."""
        failed = next_event(self.sender, transfer_id)
        assert isinstance(failed, PushFailed) and failed.cause is cause
        self.sender.cancel(transfer_id)
        next_event(self.sender, transfer_id, PushCancelled)
        self.receiver.forget(transfer_id)


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    sender = make("zmq", SOURCE, "prefill-1")
    sender.start()
    with contextlib.closing(sender), RemoteReceiver("zmq", "large", len(PAGES)) as receiver:
        target = receiver.reserve([]).address.endpoint.removeprefix("tcp://")
        with FaultProxy(target) as proxy:
            yield Link(sender, receiver, proxy, target)


@pytest.mark.parametrize("harm", [Harm.CUT, Harm.TRUNCATED])
def test_what_is_cut_off_fails_and_the_next_one_arrives(link: Link, harm: Harm) -> None:
    link.check_arrives()
    link.proxy.harm(link.target, harm)
    link.check_fails(link.push(), Cause.PEER)
    assert link.proxy.heal(link.target) > 0
    link.check_arrives()


@pytest.mark.parametrize("harm", [Harm.SLOWED, Harm.DELAYED])
def test_what_is_late_arrives_whole_or_fails_with_its_lease(link: Link, harm: Harm) -> None:
    link.check_arrives()
    link.proxy.harm(link.target, harm)
    link.check_arrives()
    link.check_fails(link.push(lease_s=0.1), Cause.LEASE)
    assert link.proxy.heal(link.target) > 0
    link.check_arrives()
