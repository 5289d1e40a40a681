"""The faces of page transfers: ZMQ frames, NIXL notifications and metadata, and the bytes of ZMQ's
own handshake. Strangers speak, honest transfers between them have to be served whole."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec
import zmq
from fuzz.drawing import Draw, bent, garbage, mutated, packed
from fuzz.surface import Face
from kvtransfer.fixtures import SMALL, boundary, print_of
from kvtransfer.tampering import APART, READER, WRITER, Pair, tampered

from effuse.kvtransfer.connector import Arrived, Cancel, Fence, Forget, HandoffRefused, PushPages
from effuse.kvtransfer.digest import finish_of
from effuse.kvtransfer.messages import (
    Accepted,
    Begin,
    MalformedMessage,
    Manifest,
    Pages,
    Placed,
    Rejected,
    Reservation,
    decode_reservation,
    encode,
)
from effuse.kvtransfer.nixl_agent import NIXL_ERRORS, NixlAgent
from effuse.kvtransfer.nixl_peers import NixlWriters
from effuse.kvtransfer.zmq_sockets import CurveKeys, ZmqListener

HONEST_SHARE: Final = 0.005
NEW_SHARE: Final = 0.02
"""How often the stranger learns of another reservation."""

LED_SHARE: Final = 0.05
"""How often a writer gets a false peer."""


class Trusted(AssertionError):
    """A stranger's message was accepted as a transfer."""


def honest_messages(reserved: Reservation) -> list[msgspec.Struct]:
    """The messages of a reservation's writer, without digests because a stranger has no bytes."""
    names = (reserved.attempt, WRITER, READER)
    fingerprint = print_of(SMALL)
    part = reserved.shards[0].part
    pages = Pages(*names, part, 0, reserved.pages, 0, SMALL.num_groups)
    manifest = Manifest(
        attempt=reserved.attempt,
        source=WRITER,
        destination=READER,
        part=part,
        fingerprint=fingerprint,
        digest=b"d" * 16,
        num_bytes=len(reserved.pages) * reserved.shards[0].page_bytes,
        boundary=boundary(),
    )
    name = reserved.transfer_id
    answers = (Placed(name, 0, 0), Accepted(name), Rejected(name, "DIGEST", "no"))
    return [Begin(*names, part, fingerprint), pages, finish_of(manifest, 5), *answers]


def drawn_message(draw: Draw, reserved: Reservation) -> bytes:
    """One that a stranger makes of those."""
    good = draw.choice(honest_messages(reserved))
    way = draw.random()
    if way < 0.1:
        return garbage(draw)
    if way < 0.2:
        return encode(good)
    if way < 0.5:
        return mutated(draw, encode(good))
    return packed(bent(draw, msgspec.msgpack.decode(encode(good))))


@dataclass
class Stranger:
    """Sends messages to the receiver of a pair whose reservations it knows. `say` sends a message
    with payload; `heard` returns how many answers have come since the last call.
    """

    pair: Pair
    say: Callable[[bytes, Sequence[bytes]], None]
    heard: Callable[[], int]
    mislead: Callable[[Stranger, Draw], None]
    reserved: Reservation = field(init=False)

    def __post_init__(self) -> None:
        self.reserved = self.pair.reserve(APART, apart=True)

    async def feed(self, draw: random.Random) -> str:
        pair = self.pair
        if draw.random() < HONEST_SHARE:
            assert not pair.transfer(None, pair.draw_load()), "an honest transfer was refused"
        if draw.random() < NEW_SHARE:
            self._renew()
        payload = [garbage(draw, 600) for _ in range(draw.choice((0, 0, 1, 3)))]
        if draw.random() < 0.2:  # of the right size
            payload = [draw.randbytes(len(self.reserved.pages) * SMALL.page_bytes)]
        self.say(drawn_message(draw, self.reserved), payload)
        if draw.random() < LED_SHARE:
            self.mislead(self, draw)
        for exchange in (pair.receiver, pair.sender):
            exchange.turn(exchange.receive())
        await asyncio.sleep(0)
        if any(isinstance(event, Arrived) for event in pair.said):
            raise Trusted(f"{self.reserved.transfer_id} has arrived, but was not sent")
        return "answered" if self.heard() else "silent"

    def _renew(self) -> None:
        pair, name = self.pair, self.reserved.transfer_id
        pair.receiver.execute(Forget(name), pair.now())
        pair.receiver.execute(Fence(name, has_drained=True), pair.now())
        pair.said.clear()
        self.reserved = pair.reserve(APART, apart=True)

    def held(self) -> Mapping[str, int]:
        """Nothing moves once the reservation that strangers knew is gone."""
        self._renew()
        exchanges = (self.pair.receiver, self.pair.sender)
        for exchange in exchanges:
            exchange.turn(exchange.receive())
        return {"exchanges that move": sum(one.is_moving for one in exchanges)}


def _lead_astray(stranger: Stranger, draw: Draw) -> None:
    """The sender gets a receiver at another address, and no pages."""
    plain, pair = msgspec.msgpack.decode(encode(stranger.reserved)), stranger.pair
    plain["shards"] = bent(draw, plain["shards"])
    with contextlib.suppress(MalformedMessage):
        reserved = decode_reservation(packed(plain))
        pair.sender.execute(PushPages(reserved, (), 0), pair.now())
        pair.sender.execute(Cancel(reserved.transfer_id), pair.now())


class ZmqSurface:
    """Frames over a connection of a stranger."""

    name, weight, at_once = "ZMQ frames", 150, 1

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Face]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with contextlib.closing(Pair("zmq", 1)) as pair, tampered(pair, "zmq"):
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(pair.reader.address().endpoint)

            def say(message: bytes, payload: Sequence[bytes]) -> None:
                with contextlib.suppress(zmq.Again):
                    dealer.send_multipart([message, *payload], zmq.NOBLOCK)

            def heard() -> int:
                count = 0
                while dealer.poll(0):
                    dealer.recv_multipart()
                    count += 1
                return count

            try:
                yield Stranger(pair, say, heard, _lead_astray)
            finally:
                dealer.close()
                context.term()


class NixlSurface:
    """Notifications of an unknown agent, including metadata."""

    name, weight, at_once = "NIXL notifications", 20, 1

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Face]:
        with contextlib.closing(Pair("nixl", 1)) as pair, tampered(pair, "nixl"):
            agent = NixlAgent("stranger")
            agent.add_peer(pair.reader.address().agent_metadata)
            name, metadata = pair.reader.address().agent_name, agent.metadata()
            draw = random.Random(1)

            def say(message: bytes, payload: Sequence[bytes]) -> None:
                if draw.random() < 0.7:
                    message = _introduced(draw, message, metadata)
                with contextlib.suppress(*NIXL_ERRORS):
                    agent.notify(name, message)

            writers = NixlWriters(agent)  # not the pair's: spoilt metadata spoils a link

            def introduce(stranger: Stranger, drawn: Draw) -> None:
                with contextlib.suppress(HandoffRefused):
                    writers.add(f"writer-{drawn.random()}", mutated(drawn, metadata))

            yield Stranger(pair, say, lambda: len(agent.notifications()), introduce)
            agent.close()


def _introduced(draw: Draw, message: bytes, metadata: bytes) -> bytes:
    """A Begin whose writer has an address for answers, or something similar."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = msgspec.msgpack.decode(message)
        if isinstance(said, dict) and said.get("type") == "Begin":
            told = draw.choice((metadata, mutated(draw, metadata), garbage(draw)))
            return packed({**said, "reply_to": told})
    return message


GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00"
HELLO: Final = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72)


@dataclass
class Listeners:
    """One that accepts everything and one that requires keys."""

    listeners: Sequence[ZmqListener]

    async def feed(self, draw: random.Random) -> str:
        """A connection that sends something like the beginning of a handshake, and breaks off."""
        listener = draw.choice(self.listeners)
        mechanism = draw.choice((b"NULL", b"CURVE", b"PLAIN", b"\xff" * 20)).ljust(20, b"\0")
        hello = HELLO + draw.randbytes(120)
        said = GREETING + mechanism + draw.choice((b"\0", b"\1")) + bytes(31) + hello
        if draw.random() < 0.8:
            said = mutated(draw, said[: draw.choice((10, 64, 66, 120, len(said)))])
        with socket.create_connection(("127.0.0.1", listener.port), 10) as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(said + draw.choice((b"", garbage(draw, 400))))
            if draw.random() < 0.1:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            await asyncio.sleep(draw.choice((0.0, 0.002)))  # so that ZMQ's own thread has its turn
        received = [one for each in self.listeners for one in each.receive()]
        assert all(len(one.frames) < 100 for one in received)
        return "came through" if received else "nothing came"

    def held(self) -> Mapping[str, int]:
        for one in self.listeners:
            one.receive()
        return {"connections": sum(len(one._connections) for one in self.listeners)}


class HandshakeSurface:
    """Bytes of TCP, at the port of a pool."""

    name, weight, at_once = "ZMQ and CURVE handshakes", 40, 1

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Face]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = CurveKeys.of(b"k" * 32)
        with keys.admitting(context):
            listeners = [
                ZmqListener(context, "tcp://127.0.0.1:*", message_bytes=1 << 16, queued=2, keys=one)
                for one in (None, keys)
            ]
            try:
                yield Listeners(listeners)
                await _check_honest(context, listeners[1], keys)
            finally:
                for listener in listeners:
                    listener.close()
        context.term()


async def _check_honest(
    context: zmq.Context[zmq.Socket[bytes]], listener: ZmqListener, keys: CurveKeys
) -> None:
    """An owner of the keys gets through after all that."""
    member = context.socket(zmq.DEALER)
    keys.ask(member)
    member.setsockopt(zmq.LINGER, 0)
    member.connect(f"tcp://127.0.0.1:{listener.port}")
    try:
        member.send(b"honest")
        for _ in range(400):
            if any(one.frames[0].bytes == b"honest" for one in listener.receive()):
                return
            await asyncio.sleep(0.05)
        raise AssertionError("an owner of the keys does not get through any more")
    finally:
        member.close()
