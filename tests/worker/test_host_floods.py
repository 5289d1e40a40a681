"""A leader of a group on several hosts, under more messages than any host sends."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import zmq
from slowness import patient
from worker.test_nodes import config, leader

from effuse.kvtransfer.zmq_sockets import MESSAGES_A_TURN, MOST_FRAMES
from effuse.worker.config import DecodeConfig
from effuse.worker.node_messages import (
    ENCODER,
    TO_NODE,
    Joining,
    JoinRefused,
    NodeBeat,
    ToNode,
    control_keys,
    settings_of,
)
from effuse.worker.nodes import Nodes, Roll


@contextlib.contextmanager
def stranger_of(own: DecodeConfig) -> Iterator[zmq.Socket[bytes]]:
    """A connection to its leader, by a process that may have the fleet's secret."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.set(zmq.LINGER, 0)
        if (keys := control_keys(own)) is not None:
            keys.ask(made)
        made.connect(f"tcp://127.0.0.1:{own.master_port}")
        yield made


@pytest.mark.parametrize("has_secret", [True, False])
def test_a_flood_leaves_turns_and_lines_of_the_log_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_secret: bool
) -> None:
    own, now = config(tmp_path, **({} if has_secret else {"fleet_secret": None})), [0.0]
    nodes = Nodes(own, "decode", "i1", lambda: now[0])
    with contextlib.closing(nodes), stranger_of(own) as stranger:
        for _ in range(500):
            stranger.send(ENCODER.encode(NodeBeat("i1")))
        taken: list[int] = []
        while sum(taken) < 500:
            poll(nodes)
            with patch.object(Roll, "take", autospec=True, side_effect=Roll.take) as take:
                nodes.turn()
            taken.append(take.call_count)
        assert max(taken) <= MESSAGES_A_TURN
        for _ in range(100):
            stranger.send(b"none that a host sends")
        stranger.send(ENCODER.encode(Joining(node=9, settings={})))
        while not any(isinstance(one, JoinRefused) for one in answers(stranger)):
            nodes.turn()
        assert caplog.text.count("refused a host") == 1
        now[0] += 1.0
        stranger.send(b"another")
        while caplog.text.count("refused a host") == 1:
            nodes.turn()
        assert "(and 100 others)" in caplog.text


def test_a_message_of_many_frames_ends_its_own_connection_alone(tmp_path: Path) -> None:
    own = config(tmp_path)
    with leader(own) as nodes, stranger_of(own) as stranger, stranger_of(own) as honest:
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.send_multipart([b"x"] * (MOST_FRAMES + 10))
        is_cut = False
        for _ in range(400):
            nodes.turn()
            is_cut = is_cut or bool(monitor.poll(25))
            if is_cut:
                break
        stranger.disable_monitor()
        monitor.close(0)
        assert is_cut
        honest.send(ENCODER.encode(Joining(node=1, settings=settings_of(own))))
        while nodes.roll.missing:
            nodes.turn()


def test_a_message_without_an_end_is_bounded(tmp_path: Path) -> None:
    own = config(tmp_path, fleet_secret=None)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    frame = b"\x03" + (60_000).to_bytes(8, "big") + bytes(60_000)  # announces another one
    address = ("127.0.0.1", own.master_port)
    with leader(own) as nodes, socket.create_connection(address, 20) as stranger:
        stranger.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
        stranger.setblocking(False)
        until, num_sent = time.monotonic() + patient(60.0), 0
        with pytest.raises(ConnectionError):
            while num_sent < 4000 * len(frame) and time.monotonic() < until:
                with contextlib.suppress(BlockingIOError):  # ZMQ's thread waits for a processor
                    num_sent += stranger.send(frame[num_sent % len(frame) :])
                nodes.turn()


def poll(nodes: Nodes) -> None:
    """Waits until a host's message can be read."""
    assert nodes.sources()[0].poll(20_000)


def answers(host: zmq.Socket[bytes]) -> list[ToNode]:
    found = []
    while host.poll(0):
        found.append(TO_NODE.decode(host.recv()))
    return found
