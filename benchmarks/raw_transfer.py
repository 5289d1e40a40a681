"""The limits of a handoff: a bare NIXL WRITE and a bare ZMQ push between processes.

Each receiver is a separate process on loopback that only receives bytes: no digests, no identities.
A round ends when the sender has the receiver's report that all bytes arrived. All ways of moving
the bytes take turns between the same two processes; their placement is checked once, at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash
import zmq

from effuse.kvtransfer.layout import huge_pages

DEADLINE_S = 30.0
MODULE = "effuse.benchmarks.raw_transfer"
FRAME_BYTES = 4 << 20
POLL_S = 0.0001  # polling without a pause takes the core that moves the bytes: 5 times slower

SCATTERED, IN_ORDER = "scattered", "in order"
# The name of each way of moving bytes, and the order of its pages.
NIXL_WAYS = {
    "one descriptor": IN_ORDER,
    "a descriptor a page, in order": IN_ORDER,
    "a descriptor a page, scattered": SCATTERED,
    "prepared lists of pages, scattered": SCATTERED,
}
ZMQ_WAYS = {
    "frames of 4 MiB": IN_ORDER,
    "a frame a page, in order": IN_ORDER,
    "a frame a page, scattered": SCATTERED,
}
WAYS = {"nixl": NIXL_WAYS, "zmq": ZMQ_WAYS}

Rounds = dict[str, list[float]]  # seconds of each round by the way that it went


@dataclass(frozen=True, slots=True)
class Move:
    """Pages `source` of one pool, which go to the pages `target` of another, one by one."""

    page_bytes: int
    source: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.source) * self.page_bytes


def scattered(count: int, seed: int) -> tuple[int, ...]:
    """The pages 0..count-1 in random order, none of them right after its predecessor in memory.

    Equal calls give equal orders, in every process.
    """
    draw, pages = random.Random(seed), list(range(count))
    while any(second == first + 1 for first, second in pairwise(pages)):
        draw.shuffle(pages)
    return tuple(pages)


def raw_rounds_s(kind: str, move: Move, rounds: int) -> Rounds:
    """Seconds of each round of each way over `nixl` or `zmq`; scattered ways move according to
    `move`, the others all pages of the same number in the order of memory.
    """
    measure = {"nixl": _nixl_rounds_s, "zmq": _zmq_rounds_s}[kind]
    return measure(move, rounds)


def _nixl_rounds_s(move: Move, rounds: int) -> Rounds:
    buffer = _memory(move.num_bytes)
    agent = _nixl_agent("raw-sender", buffer)
    with receiving(MODULE, "nixl", str(move.num_bytes)) as (process, output):
        hello = receive(output)
        peer = _add_peer(agent, str(hello["metadata"]))
        _send(process, {"metadata": agent.get_agent_metadata().hex()})
        begin = _nixl_ways(agent, peer, (buffer.ctypes.data, int(hello["address"])), move)
        times: Rounds = {way: [] for way in begin}
        for number in range(rounds):
            for way, make in begin.items():
                notice = f"done {way} {number}".encode()
                times[way].append(_nixl_round_s(agent, peer, partial(make, notice)))
        agent.send_notif(peer, _question(move))
        _check_order(buffer, move, _nixl_answer(agent, peer, time.perf_counter()))
    return times


def _nixl_ways(
    agent: Any, peer: str, bases: tuple[int, int], move: Move
) -> dict[str, Callable[[bytes], Any]]:
    """For each way, a function that makes its transfer from the first to the second of `bases`."""
    size, count = move.page_bytes, len(move.source)

    def pages(base: int, order: Sequence[int]) -> list[tuple[int, int, int]]:
        return [(base + page * size, size, 0) for page in order]

    def listed(orders: tuple[Sequence[int], Sequence[int]]) -> Callable[[bytes], Any]:
        local, remote = (
            agent.get_xfer_descs(pages(base, order), "DRAM")
            for base, order in zip(bases, orders, strict=True)
        )
        return lambda notice: agent.initialize_xfer("WRITE", local, remote, peer, notice)

    whole = [agent.get_xfer_descs([(base, size * count, 0)], "DRAM") for base in bases]
    local, remote = (
        agent.prep_xfer_dlist(owner, pages(base, range(count)), "DRAM")
        for owner, base in zip(("", peer), bases, strict=True)
    )
    source, target = (np.array(order, dtype=np.int32) for order in (move.source, move.target))
    makers: tuple[Callable[[bytes], Any], ...] = (
        lambda notice: agent.initialize_xfer("WRITE", *whole, peer, notice),
        listed((range(count), range(count))),
        listed((move.source, move.target)),
        lambda notice: agent.make_prepped_xfer("WRITE", local, source, remote, target, notice),
    )
    return dict(zip(NIXL_WAYS, makers, strict=True))


def _nixl_round_s(agent: Any, peer: str, make: Callable[[], Any]) -> float:
    start = time.perf_counter()
    handle = make()
    state = agent.transfer(handle)
    while state != "DONE":
        time.sleep(POLL_S)
        state = agent.check_xfer_state(handle)
        _check(start)
    _nixl_answer(agent, peer, start)
    took = time.perf_counter() - start
    agent.release_xfer_handle(handle)
    return took


def _nixl_answer(agent: Any, peer: str, start: float) -> bytes:
    """The receiver's next message."""
    while True:
        answers: list[bytes] | None = agent.get_new_notifs().get(peer)
        if answers:
            return answers[0]
        time.sleep(POLL_S)
        _check(start)


def _zmq_rounds_s(move: Move, rounds: int) -> Rounds:
    """Each frame travels with its place, and is copied there on arrival."""
    buffer = _memory(move.num_bytes)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
    with receiving(MODULE, "zmq", str(move.num_bytes)) as (_, output):
        socket.connect(str(receive(output)["endpoint"]))
        times: Rounds = {way: [] for way in ZMQ_WAYS}
        for _number in range(rounds):
            for way, frames in zip(ZMQ_WAYS, _zmq_frames(move), strict=True):
                times[way].append(_zmq_round_s(socket, buffer.data, frames))
        socket.send_multipart([_question(move), b""])
        _check_order(buffer, move, socket.recv())
    socket.close()
    context.term()
    return times


def _zmq_frames(move: Move) -> list[list[tuple[int, int, int]]]:
    """For each way, (from, to, size) of its frames in bytes."""
    size, every = move.page_bytes, range(len(move.source))
    large = [
        (at, at, min(FRAME_BYTES, move.num_bytes - at))
        for at in range(0, move.num_bytes, FRAME_BYTES)
    ]
    pages = (zip(every, every, strict=True), zip(move.source, move.target, strict=True))
    return [large, *([(here * size, there * size, size) for here, there in one] for one in pages)]


def _zmq_round_s(
    socket: zmq.Socket[bytes], view: memoryview, frames: Sequence[tuple[int, int, int]]
) -> float:
    start = time.perf_counter()
    for here, there, size in frames:
        socket.send(there.to_bytes(8, "little"), zmq.SNDMORE)
        socket.send(view[here : here + size], copy=False)
    socket.recv()
    return time.perf_counter() - start


def _question(move: Move) -> bytes:
    """Asks the receiver for the digest of its pages in the order of `move`."""
    return b"digest " + json.dumps([move.page_bytes, move.target]).encode()


def _answer(buffer: npt.NDArray[np.uint8], question: bytes) -> bytes:
    page_bytes, order = json.loads(question.removeprefix(b"digest "))
    return digest(buffer, page_bytes, order)


def digest(buffer: npt.NDArray[np.uint8], page_bytes: int, order: Sequence[int]) -> bytes:
    """Of the buffer's pages in this order."""
    found = xxhash.xxh3_128()
    for page in order:
        found.update(buffer[page * page_bytes : (page + 1) * page_bytes].data)
    return bytes(found.digest())


def _check_order(buffer: npt.NDArray[np.uint8], move: Move, answer: bytes) -> None:
    if answer != digest(buffer, move.page_bytes, move.source):
        raise RuntimeError("the bare transfer moved wrong bytes")


def _memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Bytes at random, in the kind of memory that pools are in."""
    buffer = np.frombuffer(huge_pages(num_bytes), np.uint8)
    buffer[:] = np.random.default_rng(0).integers(0, 255, num_bytes, dtype=np.uint8)
    return buffer


@contextlib.contextmanager
def receiving(module: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A receiver in a separate process, and its output; it is killed at the end."""
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


def _send(process: subprocess.Popen[str], message: dict[str, str]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def receive(output: IO[str]) -> dict[str, str | int]:
    """The receiver's next JSON line; libraries may print in between."""
    for line in output:
        if line.startswith("{"):
            message: dict[str, str | int] = json.loads(line)
            return message
    raise RuntimeError("the receiver ended")


def _check(start: float) -> None:
    if time.perf_counter() - start > DEADLINE_S:
        raise TimeoutError(f"a raw transfer took longer than {DEADLINE_S} s")


def _nixl_agent(name: str, buffer: npt.NDArray[np.uint8]) -> Any:
    """Without a progress thread, which would spin and take a core from the copies: 4 to 9 GB/s
    instead of 12 without it, on two cores.
    """
    from nixl._api import nixl_agent, nixl_agent_config

    from effuse.kvtransfer.nixl_agent import bind_netlink, confined, ucx_log

    bind_netlink()
    # The first agent decides where UCX writes the log that our connectors need.
    with confined(ucx_log().options):
        agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(buffer.ctypes.data, len(buffer), 0, "")], "DRAM")
    return agent


def _add_peer(agent: Any, metadata: str) -> str:
    peer = agent.add_remote_agent(bytes.fromhex(metadata))
    return peer.decode() if isinstance(peer, bytes) else str(peer)


def _receive_nixl(num_bytes: int) -> None:
    buffer = _memory(num_bytes)
    agent = _nixl_agent("raw-receiver", buffer)
    hello = {"metadata": agent.get_agent_metadata().hex(), "address": buffer.ctypes.data}
    print(json.dumps(hello), flush=True)
    peer = _add_peer(agent, json.loads(sys.stdin.readline())["metadata"])
    while True:
        for notices in agent.get_new_notifs().values():
            for notice in notices:
                asks = notice.startswith(b"digest")
                agent.send_notif(peer, _answer(buffer, notice) if asks else b"arrived")
        time.sleep(POLL_S)


def _receive_zmq(num_bytes: int) -> None:
    buffer = _memory(num_bytes)
    socket = zmq.Context().socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    print(json.dumps({"endpoint": f"tcp://127.0.0.1:{port}"}), flush=True)
    filled = 0
    while True:
        sender, place, frame = socket.recv_multipart(copy=False)
        size = len(frame.buffer)
        if not size:
            socket.send_multipart([sender.bytes, _answer(buffer, place.bytes)])
            continue
        data = np.frombuffer(frame.buffer, np.uint8).ctypes.data
        ctypes.memmove(buffer.ctypes.data + int.from_bytes(place.bytes, "little"), data, size)
        filled += size
        if filled == num_bytes:
            filled = 0
            socket.send_multipart([sender.bytes, b"arrived"])


if __name__ == "__main__":
    run = {"nixl": _receive_nixl, "zmq": _receive_zmq}[sys.argv[1]]
    run(int(sys.argv[2]))
