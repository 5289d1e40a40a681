"""The one ordered stream of commands from a group's leader to its other ranks, and their answers.

Plain data. All ranks run the same commands in the same order, so that their collectives meet. A
command that a rank gets is digested there as the leader digested it: `Digests`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, get_args, get_origin

import msgspec
import numpy as np
import torch
import xxhash
import zmq
from torch import Tensor

from effuse.config.checks import UNREADABLE
from effuse.kvtransfer.connector import Command as Transfer
from effuse.kvtransfer.connector import ConnectorEvent
from effuse.kvtransfer.messages import BoundaryState, Field, Shard
from effuse.models.part import Part, PartResult
from effuse.worker.engine_home import ANSWERS_SOCKET
from effuse.worker.messages import RankOrders

Stage = Literal["present", "loaded", "open"]
"""Of a rank's start: it runs and waits for the others, has its weights, has pages and connector."""


class ForwardProgress:
    """Groups of layers that a forward has stored, by its number in the group. Only the number goes
    to other ranks: so this is no dataclass, which the encoder would write whole."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.stored: Callable[[], int] | None = None
        """Counts those of this rank's device; None before the forward begins on it."""

    def __call__(self) -> int:
        return 0 if self.stored is None else self.stored()


# From the leader.


class RunParts(msgspec.Struct, frozen=True, tag=True):
    """One forward over parts. A boundary vector is rank 0's, which shares it in the forward."""

    number: int
    parts: list[Part]


class Complete(msgspec.Struct, frozen=True, tag=True):
    """The last stage of a pipeline computes the oldest forward that the others have begun. Its
    ranks get parts before, but meet the leader, which may have other work until then."""


class CopyPage(msgspec.Struct, frozen=True, tag=True):
    """Copies all of a page to another one."""

    source: int
    target: int


class ZeroTail(msgspec.Struct, frozen=True, tag=True):
    """Zeroes the slots of a page from `num_used` on."""

    page_id: int
    num_used: int


class MovePages(msgspec.Struct, frozen=True, tag=True):
    """Copies pages to slots of host memory, or back. The answer has the same number."""

    number: int
    page_ids: tuple[int, ...]
    slots: tuple[int, ...]
    loads: bool  # into the pages


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Makes the slots of a decode rank's device and captures its graphs, together with the
    leader."""


class JoinSlot(msgspec.Struct, frozen=True, tag=True):
    """`DeviceStepper.join`; row: [width] int32. A boundary vector is rank 0's, which shares it."""

    slot: int
    row: bytes
    has_boundary: bool


class LeaveSlot(msgspec.Struct, frozen=True, tag=True):
    """`DeviceStepper.leave`."""

    slot: int


class GrowSlot(msgspec.Struct, frozen=True, tag=True):
    """`DeviceStepper.grow`; pages: [N] int32."""

    slot: int
    first: int
    pages: bytes
    storable: int


class LaunchStep(msgspec.Struct, frozen=True, tag=True):
    """A step in the buckets that the leader has chosen."""

    rows: int
    candidates: int
    context: int
    filters: bool  # whether a slot has a top-p or top-k
    shares: bool  # whether beginnings that slots have in common are read once


class Open(msgspec.Struct, frozen=True, tag=True):
    """Opens the rank's connector."""

    fingerprint: tuple[Field, ...]


class Quit(msgspec.Struct, frozen=True, tag=True):
    """Ends the rank's process."""


Slots = JoinSlot | LeaveSlot | GrowSlot | LaunchStep


class ForReplica(msgspec.Struct, frozen=True, tag=True):
    """Of one replica's pages or slots; the others pass over it."""

    replica: int
    command: Transfer | CopyPage | Slots


Command = (
    RunParts
    | Complete
    | CopyPage
    | ZeroTail
    | MovePages
    | Transfer
    | ForReplica
    | Slots
    | Prepare
    | Open
    | Quit
)

# To the leader.


class Reached(msgspec.Struct, frozen=True, tag=True):
    """How far the start of the rank has come; a connector's shard comes with "open"."""

    stage: Stage
    shard: Shard | None = None


class RankRefused(msgspec.Struct, frozen=True, tag=True):
    """The rank cannot start, because of its config or its device."""

    message: str


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The rank has read all commands up to `count`, whose digest is this."""

    count: int
    digest: int


class Moved(msgspec.Struct, frozen=True, tag=True):
    """An event of the rank's connector."""

    event: ConnectorEvent


class Computed(msgspec.Struct, frozen=True, tag=True):
    """The results of a replica's parts of a forward, in their order."""

    number: int
    results: list[PartResult]


class Advanced(msgspec.Struct, frozen=True, tag=True):
    """A stage of a pipeline computes, or has passed on the rows of all forwards before `number`."""

    number: int


class PagesMoved(msgspec.Struct, frozen=True, tag=True):
    """The copies of a `MovePages` have ended. digests: [pages, pieces] int64 of this rank."""

    number: int
    digests: bytes


class Readdressed(msgspec.Struct, frozen=True, tag=True):
    """The rank's connector is reached in another way from now on."""

    shard: Shard


FromRank = Reached | RankRefused | Taken | Moved | Computed | Advanced | PagesMoved | Readdressed


class Digests:
    """A digest of all commands so far, which both ends take of the same bytes."""

    def __init__(self) -> None:
        self.count = 0
        self._all = xxhash.xxh3_64()

    def add(self, data: bytes) -> int:
        """Digest of all that was added, this included."""
        self.count += 1
        self._all.update(data)
        return self.value

    @property
    def value(self) -> int:
        return int(self._all.intdigest())


def commands_path(home: Path, rank: int) -> str:
    """Endpoint at which a rank gets its commands."""
    return f"ipc://{home / f'r{rank}'}"


def answers_path(home: Path) -> str:
    """Endpoint at which the leader gets its ranks' answers."""
    return f"ipc://{home / ANSWERS_SOCKET}"


def bound(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    """A socket that never waits, bound to an endpoint of this host."""
    socket = context.socket(kind)
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        socket.set(option, 0)
    socket.bind(endpoint)
    return socket


def spawn(orders: RankOrders) -> subprocess.Popen[bytes]:
    """Starts a rank's process. Raises OSError. One that ends at once reports that by its status."""
    kept = tuple(fd for fd in (orders.alive_fd, orders.host_fd) if fd is not None)
    process = subprocess.Popen(
        (sys.executable, "-P", "-m", "effuse.worker", f"effuse.{orders.role}_worker.rank"),
        stdin=subprocess.PIPE,
        pass_fds=kept,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(msgspec.json.encode(orders))
    return process


def meeting_path(home: Path) -> Path:
    """File at which the ranks find each other."""
    return home / "g"


def _encode_special(value: object) -> object:
    match value:
        case Tensor():
            return True  # a boundary vector: only that there is one
        case np.ndarray():
            return value.tobytes()
        case range():
            return (value.start, value.stop)
        case ForwardProgress():
            return value.number
        case _ if callable(value):  # the state of a push, which is there
            return value()
        case _:
            raise NotImplementedError(f"{type(value)} in a command")


def _decode_special(kind: type, value: object) -> object:
    if kind is Tensor:
        return torch.empty(0)
    if get_origin(kind) is Callable:
        return ForwardProgress(value) if isinstance(value, int) else _always(value)
    if kind is range and isinstance(value, Sequence):
        return range(*value)
    if get_origin(kind) is np.ndarray and isinstance(value, bytes):
        scalar = get_args(get_args(kind)[1])[0]  # of NDArray[scalar]
        return np.frombuffer(value, dtype=scalar)
    raise NotImplementedError(f"{kind} in a command")


def _always(value: object) -> Callable[[], BoundaryState]:
    state = msgspec.convert(value, BoundaryState)
    return lambda: state


ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_encode_special)
COMMANDS: Final = msgspec.msgpack.Decoder(Command, dec_hook=_decode_special)
ANSWERS: Final = msgspec.msgpack.Decoder(FromRank, dec_hook=_decode_special)


def read_answer(frames: Sequence[bytes], size: int) -> tuple[int, FromRank]:
    """A rank of a group of `size`, and its answer. Raises ValueError that names the rank for frames
    that none sends."""
    rank = int.from_bytes(frames[0][:1], "big")
    try:
        if len(frames) != 2 or not 1 <= rank < size:
            raise ValueError(f"{len(frames)} frames; the group has ranks 1 to {size - 1}")
        return rank, ANSWERS.decode(frames[1])
    except (*UNREADABLE, ValueError, NotImplementedError) as error:
        raise ValueError(f"rank {rank} sent an invalid message: {error}") from error
