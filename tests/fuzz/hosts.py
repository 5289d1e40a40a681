"""The port of a group over several hosts, at its leader: messages of hosts that may have the
fleet's secret, and of others at a leader without one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import zmq
from fuzz.drawing import Draw, bent, garbage, mutated, packed
from fuzz.surface import Face

from effuse.kvtransfer.zmq_sockets import MOST_FRAMES
from effuse.worker.config import DecodeConfig
from effuse.worker.node_messages import (
    ENCODER,
    TO_NODE,
    Joining,
    NodeBeat,
    RankGone,
    RankStopped,
    control_keys,
    settings_of,
)
from effuse.worker.nodes import NodeLost, Nodes

HOSTS: Final = 3
INCARNATION: Final = "i1"
TRIES: Final = 400  # 25 ms apart
NESTED: Final = b"\x82\xa1a" + b"\x91" * 30_000


def drawn_frames(draw: Draw, settings: Mapping[str, str]) -> list[bytes]:
    """The frames of one message, which a host sends, or nearly."""
    good = draw.choice(
        (
            Joining(node=draw.choice((0, 1, 2, 3, -1)), settings=dict(settings)),
            NodeBeat(draw.choice((INCARNATION, "i0"))),
            RankGone(INCARNATION, draw.choice((0, 1, 2, 3, -1, 2**40)), draw.choice((0, -9, 1))),
            RankStopped(INCARNATION, draw.choice((0, 1, 2, 3, -1))),
        )
    )
    data, way = ENCODER.encode(good), draw.random()
    if way < 0.3:
        data = packed(bent(draw, msgspec.msgpack.decode(data)))
    elif way < 0.5:
        data = mutated(draw, data)
    elif way < 0.6:
        data = draw.choice((garbage(draw), NESTED))
    more = draw.choice((0,) * 20 + (1, 1, 5))
    if draw.random() < 0.001:
        more = MOST_FRAMES + 1
    return [data] + [garbage(draw, 20)] * more


@dataclass
class Led:
    """A leader and two connections to it, of which either may have joined."""

    nodes: Nodes
    hosts: Sequence[zmq.Socket[bytes]]
    settings: Mapping[str, str]

    def said(self, frames: Sequence[bytes], draw: Draw) -> None:
        with contextlib.suppress(zmq.Again):
            draw.choice(self.hosts).send_multipart(frames, zmq.NOBLOCK)

    def turn(self) -> int:
        """A turn of the watching thread; returns how many answers have come."""
        for event in self.nodes.turn():
            if not isinstance(event, NodeLost):
                assert 1 <= event.rank < HOSTS, f"a report of rank {event.rank}"
        assert not self.nodes.lost(), "no rank was connected"
        return sum(map(_num_answers, self.hosts))


def _num_answers(host: zmq.Socket[bytes]) -> int:
    count = 0
    while host.poll(0):
        TO_NODE.decode(host.recv())
        count += 1
    return count


@dataclass
class Leaders:
    """One with a secret, and one without."""

    led: Sequence[Led]

    async def feed(self, draw: random.Random) -> str:
        one = draw.choice(self.led)
        one.said(drawn_frames(draw, one.settings), draw)
        await asyncio.sleep(0)
        return "answered" if one.turn() else "silent"

    def held(self) -> Mapping[str, int]:
        for one in self.led:
            one.turn()
        return {"connections": sum(len(one.nodes._control._connections) for one in self.led)}


class HostsSurface:
    """Messages of hosts. In the end each leader still answers another one."""

    name, weight, at_once = "hosts of a group", 60, 1

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Face]:
        with contextlib.ExitStack() as stack:
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="effuse-fuzz-"))
            secret = Path(home) / "secret"
            secret.write_text("x" * 32)
            configs = [_config(one) for one in (secret, None)]
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(context.term)
            led = []
            for config in configs:
                nodes = Nodes(config, "decode", INCARNATION)
                stack.callback(nodes.close)
                hosts = [_host(context, stack, config) for _ in range(2)]
                led.append(Led(nodes, hosts, settings_of(config)))
            for one in led:
                await _until_connected(one)
            yield Leaders(led)
            for one, config in zip(led, configs, strict=True):
                await _check_answered(one, _host(context, stack, config))


def _host(
    context: zmq.Context[zmq.Socket[bytes]], stack: contextlib.ExitStack, config: DecodeConfig
) -> zmq.Socket[bytes]:
    made = context.socket(zmq.DEALER)
    stack.callback(made.close, 0)
    if (keys := control_keys(config)) is not None:
        keys.ask(made)
    made.connect(f"tcp://127.0.0.1:{config.master_port}")
    return made


def _config(secret: Path | None) -> DecodeConfig:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return DecodeConfig(
        tensor_parallel_size=HOSTS, nnodes=HOSTS, master_addr="127.0.0.1", master_port=port,
        fleet_secret=secret, device="cpu",
    )  # fmt: skip


async def _until_connected(led: Led) -> None:
    """The connections of the beginning are those that are held in the end."""
    for _ in range(TRIES):
        led.turn()
        if len(led.nodes._control._connections) == len(led.hosts):
            return
        await asyncio.sleep(0.025)
    raise AssertionError("a host is not connected")


async def _check_answered(led: Led, honest: zmq.Socket[bytes]) -> None:
    honest.send(ENCODER.encode(Joining(node=1, settings=dict(led.settings))))
    for _ in range(TRIES):
        led.nodes.turn()
        if _num_answers(honest):
            return
        await asyncio.sleep(0.025)
    raise AssertionError("a host with equal settings is not answered any more")
