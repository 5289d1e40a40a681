"""The limits a handoff is held against: a bare NIXL WRITE and a bare ZMQ push between processes.

Each receiver is a process of its own on loopback that only takes bytes in: no pages, no digests,
no identities. A round ends when the sender holds the receiver's word that all bytes arrived.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO

import numpy as np
import numpy.typing as npt
import zmq

from effuse.kvtransfer.huge_pages import huge_pages

DEADLINE_S = 30.0
MODULE = "effuse.benchmarks.raw_transfer"
FRAME_BYTES = 4 << 20
POLL_S = 0.0001  # polling without a pause takes the core that moves the bytes: 5 times slower


def raw_nixl_round_s(num_bytes: int, rounds: int, piece: int) -> list[float]:
    """Seconds of each WRITE of ``num_bytes`` in descriptors of ``piece`` bytes, its notification
    answered."""
    from nixl._api import nixl_agent, nixl_agent_config

    buffer = _memory(num_bytes)
    agent = nixl_agent("raw-sender", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(buffer.ctypes.data, num_bytes, 0, "")], "DRAM")
    with receiving(MODULE, "nixl", str(num_bytes)) as (process, said):
        hello = hear(said)
        peer = agent.add_remote_agent(bytes.fromhex(str(hello["metadata"])))
        peer = peer.decode() if isinstance(peer, bytes) else peer
        _tell(process, {"metadata": agent.get_agent_metadata().hex()})
        local, remote = (
            agent.get_xfer_descs(
                [(base + offset, piece, 0) for offset in range(0, num_bytes, piece)], "DRAM"
            )
            for base in (buffer.ctypes.data, int(hello["address"]))
        )
        times = []
        for number in range(rounds):
            start = time.perf_counter()
            handle = agent.initialize_xfer("WRITE", local, remote, peer, f"done {number}".encode())
            state = agent.transfer(handle)
            while state != "DONE":
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
                _check(start)
            while not agent.get_new_notifs().get(peer):
                time.sleep(POLL_S)
                _check(start)
            times.append(time.perf_counter() - start)
            agent.release_xfer_handle(handle)
        return times


def raw_zmq_round_s(num_bytes: int, rounds: int) -> list[float]:
    """Seconds of each push of ``num_bytes`` in frames of 4 MiB, copied into place where they go."""
    buffer = _memory(num_bytes)
    view = buffer.data
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
    with receiving(MODULE, "zmq", str(num_bytes)) as (_, said):
        socket.connect(str(hear(said)["endpoint"]))
        times = []
        for _number in range(rounds):
            start = time.perf_counter()
            for offset in range(0, num_bytes, FRAME_BYTES):
                socket.send(view[offset : offset + FRAME_BYTES], copy=False)
            socket.recv()
            times.append(time.perf_counter() - start)
    socket.close()
    context.term()
    return times


def _memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Bytes at random, in the kind of memory that pools are in."""
    buffer = np.frombuffer(huge_pages(num_bytes), np.uint8)
    buffer[:] = np.random.default_rng(0).integers(0, 255, num_bytes, dtype=np.uint8)
    return buffer


@contextlib.contextmanager
def receiving(module: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A receiver in a process of its own, and what it says; it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        process.stdout.close()
        if process.stdin is not None:
            process.stdin.close()


def _tell(process: subprocess.Popen[str], message: dict[str, str]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def hear(said: IO[str]) -> dict[str, str | int]:
    """The receiver's next JSON line; the libraries it loads may print in between."""
    for line in said:
        if line.startswith("{"):
            message: dict[str, str | int] = json.loads(line)
            return message
    raise RuntimeError("the receiver ended")


def _check(start: float) -> None:
    if time.perf_counter() - start > DEADLINE_S:
        raise TimeoutError(f"a raw transfer took longer than {DEADLINE_S} s")


def _receive_nixl(num_bytes: int) -> None:
    from nixl._api import nixl_agent, nixl_agent_config

    buffer = _memory(num_bytes)
    agent = nixl_agent("raw-receiver", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(buffer.ctypes.data, num_bytes, 0, "")], "DRAM")
    hello = {"metadata": agent.get_agent_metadata().hex(), "address": buffer.ctypes.data}
    print(json.dumps(hello), flush=True)
    peer = agent.add_remote_agent(bytes.fromhex(json.loads(sys.stdin.readline())["metadata"]))
    while True:
        for notices in agent.get_new_notifs().values():
            for _notice in notices:
                agent.send_notif(peer, b"arrived")
        time.sleep(POLL_S)


def _receive_zmq(num_bytes: int) -> None:
    buffer = _memory(num_bytes)
    socket = zmq.Context().socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    print(json.dumps({"endpoint": f"tcp://127.0.0.1:{port}"}), flush=True)
    filled = 0
    while True:
        sender, frame = socket.recv_multipart(copy=False)
        size = len(frame.buffer)
        ctypes.memmove(
            buffer.ctypes.data + filled, np.frombuffer(frame.buffer, np.uint8).ctypes.data, size
        )
        filled += size
        if filled == num_bytes:
            filled = 0
            socket.send_multipart([sender.bytes, b"arrived"])


if __name__ == "__main__":
    receive = {"nixl": _receive_nixl, "zmq": _receive_zmq}[sys.argv[1]]
    receive(int(sys.argv[2]))
