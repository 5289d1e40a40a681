"""Messages between an engine and its front: commands with every value that their schema allows, to
whole engines with tiny models, and random frames to a front.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import prefill_worker.rig
import zmq
import zmq.asyncio
from auditing import audit
from checkpoints import write_tiny_checkpoint
from decoding.engines import Rig, load_tiny, make_request
from fuzz.drawing import Draw, bent, garbage, mutated, packed
from fuzz.surface import Face

from effuse.config.decoding import SettingError
from effuse.kvtransfer.messages import AttemptId, MalformedMessage, check_reservation
from effuse.placement.records import Load
from effuse.worker.messages import (
    Abort,
    BlockState,
    Committed,
    Failed,
    Finished,
    Heartbeat,
    PushTo,
    Resume,
    StartDecode,
    StartPrefill,
    StartRehearsal,
    ToEngine,
    WriterGone,
)
from effuse.worker.supervisor import EngineClient, EngineSocket
from effuse.worker.watchdog import EngineEnded

MOST_STEPS: Final = 40
BLOCK: Final = 4
_ORDERS: Final = msgspec.msgpack.Decoder(ToEngine)


def drawn_order(draw: Draw, good: ToEngine) -> ToEngine | None:
    """A command like it that the engine's process would accept from its socket; None if there is
    none.
    """
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(good))
    for _ in range(draw.choice((1, 1, 2, 4))):
        plain = bent(draw, plain)
    try:
        order: ToEngine = _ORDERS.decode(packed(plain))
    except (msgspec.MsgspecError, SettingError, UnicodeDecodeError):
        return None
    return order


def _check_ours(said: Sequence[object]) -> None:
    for one in said:
        assert not (isinstance(one, Failed) and one.code == "INTERNAL"), one


@dataclass
class DecodeOrders:
    """A decode engine, its books looked at after every step."""

    rig: Rig
    number: int = 0

    async def feed(self, draw: random.Random) -> str:
        self.number += 1
        good = self._good(draw)
        order = drawn_order(draw, good)
        if order is None:
            return "no order"
        self.rig.engine.handle(order)
        for _ in range(draw.randrange(MOST_STEPS)):
            if not self.rig.step():
                break
        self.rig.collect()
        self.rig.clock.now += 0.01
        return self._end(good.attempt if isinstance(good, StartDecode) else None, order)

    def _good(self, draw: random.Random) -> StartDecode | StartRehearsal | Abort:
        name = f"fuzz-{self.number}"
        attempt = AttemptId(f"request-{name}", 1, f"transfer-{name}")
        if (way := draw.random()) < 0.05:
            return Abort(attempt=attempt)
        if way < 0.1:
            return StartRehearsal(attempt=attempt, writer="w", most_pages=2)
        made = make_request(
            name,
            draw.choices(range(250), k=draw.randint(1, 20)),
            max_tokens=draw.randint(1, 12),
            algorithm=draw.choice(("d2f", "block_diffusion")),
            writer="w" if draw.random() < 0.1 else None,
        )
        if draw.random() < 0.4:
            block = BlockState((5,) * BLOCK, b"\x05", True, 1, ())
            return msgspec.structs.replace(
                made, resume=Resume(committed_token_ids=(7,) * BLOCK, frontier=(block,))
            )
        return made

    def _end(self, attempt: AttemptId | None, order: ToEngine) -> str:
        ids = [one.attempt for one in (order,) if hasattr(one, "attempt")]
        for each in {*ids, *([attempt] if attempt else [])}:
            self.rig.engine.handle(Abort(attempt=each))
            self.rig.engine.handle(WriterGone(transfer_id=each.transfer_id, has_drained=True))
        self.rig.step()
        self.rig.collect()
        said = [one for each in ids for one in self._said(each)]
        self.rig.answers.clear()
        _check_ours(said)
        return type(said[0]).__name__ if said else "silent"

    def _said(self, attempt: AttemptId) -> list[object]:
        answer = self.rig.answers.get(attempt.transfer_id)
        return (
            []
            if answer is None
            else [one for one in answer.events if isinstance(one, Failed | Finished | Committed)]
        )

    def held(self) -> Mapping[str, int]:
        audit(self.rig.engine)
        load = self.rig.engine.load()
        return {
            "pages": load.total_pages - load.free_pages,
            "attempts": load.running + load.waiting,
        }


@dataclass
class PrefillOrders:
    """A prefill engine that pushes to a pool in the same process."""

    rig: prefill_worker.rig.Rig
    number: int = 0

    async def feed(self, draw: random.Random) -> str:
        self.number += 1
        name = f"fuzz-{self.number}"
        attempt = AttemptId(f"request-{name}", 1, f"transfer-{name}")
        prompt = tuple(draw.choices(range(250), k=draw.randint(1, 20)))
        good = StartPrefill(attempt=attempt, prompt_token_ids=prompt)
        order = drawn_order(draw, good)
        if order is None:
            return "no order"
        self.rig.engine.handle(order)
        self.rig.step()
        reserved = self.rig.reserve(attempt, 2)
        push = drawn_order(draw, PushTo(reservation=reserved))
        if push is not None:
            with contextlib.suppress(MalformedMessage):  # which no front lets pass
                check_reservation(push.reservation)  # type: ignore[union-attr]
                self.rig.engine.handle(push)
        for _ in range(draw.randrange(12)):
            self.rig.step()
        for one in (attempt, getattr(order, "attempt", attempt)):
            self.rig.abort(one)
        self.rig.receiver.writer_gone(attempt.transfer_id, has_drained=True)
        return self._over(attempt)

    def _over(self, attempt: AttemptId) -> str:
        rig = self.rig
        rig.time += 0.01
        for _ in range(3):
            rig.step()
            rig.receiver.poll(rig.time)
        rig.receiver.abort(attempt.transfer_id)
        rig.receiver.writer_gone(attempt.transfer_id, has_drained=True)
        rig.receiver.poll(rig.time)
        said, rig.said = rig.said, []
        _check_ours(said)
        ours = [type(one).__name__ for one in said if getattr(one, "attempt", None) == attempt]
        return ours[0] if ours else "silent"

    def held(self) -> Mapping[str, int]:
        load = self.rig.engine.load()
        return {
            "pages": load.total_pages - load.free_pages,
            "attempts": load.running + load.waiting,
        }


class OrderSurface:
    """Orders to one kind of engine."""

    at_once = 1

    def __init__(self, name: str, weight: int, make: Callable[[Path], Face]) -> None:
        self.name, self.weight, self._make = name, weight, make

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Face]:
        with tempfile.TemporaryDirectory(prefix="effuse-fuzz-") as home:
            path = write_tiny_checkpoint(Path(home) / "sdar", "sdar", block_size=BLOCK)
            yield self._make(path)


ORDERS: Final = (
    OrderSurface("orders to decode engines", 20, lambda path: DecodeOrders(Rig(load_tiny(path)))),
    OrderSurface(
        "orders to prefill engines", 20, lambda path: PrefillOrders(prefill_worker.rig.Rig(path))
    ),
)


class Running:
    """Stands for an engine's process that goes on."""

    pid = 0

    async def wait(self) -> int:
        """Never ends on purpose: its waiter is cancelled."""
        await asyncio.Event().wait()
        return 0


@dataclass
class FrontEnd:
    """A front's end of the socket to its engine, and the other end in a stranger's hands."""

    client: EngineClient
    other: Any

    async def feed(self, draw: random.Random) -> str:
        beat = Heartbeat(loops=3, load=Load(total_pages=8, free_pages=8))
        failed = Failed(
            attempt=AttemptId("r", 1, "t"), code="INTERNAL", message="why", retryable=True
        )
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode([beat, failed]))
        said = msgspec.msgpack.encode([beat, failed])
        if draw.random() < 0.6:
            said = packed(bent(draw, plain))
        if draw.random() < 0.4:
            said = draw.choice((mutated(draw, said), garbage(draw), b"\x91" * draw.randrange(5000)))
        await self.other.send(said)
        try:
            told = await self.client.receive(10.0)
        except EngineEnded:
            return "engine given up"
        return f"{len(told)} messages"

    def held(self) -> Mapping[str, int]:
        return {}


class FrontSurface:
    """Frames from an engine to its front."""

    name, weight, at_once = "frames of engines", 60, 1

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Face]:
        with tempfile.TemporaryDirectory(prefix="effuse-fuzz-") as home:
            held = EngineSocket(f"ipc://{home}/s")
            process = cast("asyncio.subprocess.Process", Running())
            client = EngineClient("life", process, Path(home), held)
            context = zmq.asyncio.Context()
            other = context.socket(zmq.PAIR)
            other.set(zmq.LINGER, 0)
            other.connect(held.endpoint)
            yield FrontEnd(client, other)
            client._exited.cancel()
            other.close()
            held.close()
            context.term()
