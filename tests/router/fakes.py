"""Fake workers that speak the real protos in this process, and a store that needs no Redis.

A worker stops at named points of each attempt, where a test may hold it, break it or kill it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from effuse.placement.records import (
    Capacity,
    Load,
    ModelInfo,
    PlacementRecord,
    Role,
    WorkerRecord,
    encode,
)
from effuse.placement.store import Placing, Store, StoreUnavailable
from effuse.protos import rpc
from effuse.protos.errors import EffuseError
from effuse.protos.rpc import RpcServer
from effuse.protos.stubs import generation_stub, model_stub
from effuse.router.config import RouterConfig
from effuse.router.router import Router
from effuse.router.tokenizer import Tokenizer
from effuse.v1 import generation_pb2_grpc, model_pb2_grpc, worker_pb2_grpc
from effuse.v1 import worker_pb2 as pb

EOS, MASK, PAD, PROMPT, ANSWER, WORD = 256, 257, 258, 259, 260, 261
VOCAB_SIZE, BLOCK_SIZE, MAX_MODEL_LEN = 264, 4, 256

Point = Callable[[], Awaitable[None]]


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token a byte, five special tokens, and one word of several bytes."""
    names = ("<|eos|>", "<|mask|>", "<|pad|>", "<|prompt|>", "<|answer|>")
    ordered = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *names, "Ġthree"]
    vocabulary = {token: index for index, token in enumerate(ordered)}
    backend = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    backend.post_processor = processors.TemplateProcessing(
        single="<|prompt|> $A <|answer|>",
        special_tokens=[("<|prompt|>", PROMPT), ("<|answer|>", ANSWER)],
    )
    return backend


def ids_of(text: str) -> list[int]:
    """The ids of a text without the template's."""
    ids: list[int] = byte_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def model_info(name: str = "fake") -> ModelInfo:
    """A small model."""
    return ModelInfo(
        name=name,
        architecture="sdar",
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        mask_token_id=MASK,
        eos_token_ids=(EOS,),
        prompt_attention="causal_blocks",
        default_algorithm="d2f",
    )


def worker_record(
    worker_id: str,
    role: Role,
    *,
    address: str = "127.0.0.1:1",
    incarnation: str = "1",
    fingerprint: str = "same",
    load: Load | None = None,
    model: str = "fake",
) -> WorkerRecord:
    """A worker that is ready."""
    return WorkerRecord(
        worker_id=worker_id,
        role=role,
        address=address,
        incarnation=incarnation,
        state="ready",
        fingerprint=(("weights", fingerprint),),
        model=model_info(model),
        capacity=Capacity(
            total_pages=256, page_size=16, max_num_seqs=64, max_num_batched_tokens=512
        ),
        load=load or Load(total_pages=256, free_pages=256),
    )


class FakeStore(Store):
    """What Redis would hold, in memory."""

    def __init__(self) -> None:
        self.records: dict[str, WorkerRecord] = {}
        self.placements: dict[str, PlacementRecord] = {}
        self.is_down = False
        self._changed = asyncio.Event()

    async def until(self, is_so: Callable[[dict[str, PlacementRecord]], bool]) -> None:
        """Returns once the placements are so."""
        while not is_so(self.placements):
            self._changed.clear()
            await self._changed.wait()

    async def workers(self) -> list[tuple[bytes, float]]:
        self._check()
        return [(encode(record), 5.0) for record in self.records.values()]

    async def place(self, record: PlacementRecord, lifetime_s: float) -> Placing:
        self._check()
        self.placements[record.request_id] = record
        self._changed.set()
        return "placed"

    async def placement(self, request_id: str) -> bytes | None:
        self._check()
        record = self.placements.get(request_id)
        return None if record is None else encode(record)

    def _check(self) -> None:
        if self.is_down:
            raise StoreUnavailable("Redis: down for the test")


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """What both roles share: a server, points to stop at, and an account of attempts."""

    role: Role

    def __init__(self, worker_id: str, handoffs: Handoffs) -> None:
        self.worker_id = worker_id
        self.handoffs = handoffs
        self.at: dict[str, Point] = {}
        self.running: dict[str, str] = {}  # transfer id to request id
        self.aborted: list[str] = []  # transfer ids
        self.abort_came = asyncio.Event()
        self.served: list[str] = []  # request ids, one for each attempt
        self.idle = asyncio.Event()
        self.idle.set()
        self.crashed = asyncio.Event()
        self.server = RpcServer(rpc.FLEET_LIMITS)
        self.record = worker_record(worker_id, self.role)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self.server.server)

    async def start(self) -> None:
        port = await self.server.start("127.0.0.1:0", [])
        self.record = worker_record(self.worker_id, self.role, address=f"127.0.0.1:{port}")

    async def until_crash(self) -> None:
        """Then breaks every call at once, and answers nothing more."""
        try:
            await self.crashed.wait()
        finally:
            await self.server.stop(0)

    async def crash(self) -> None:
        """A point at which the worker dies."""
        self.crashed.set()
        await asyncio.Event().wait()

    async def point(self, name: str) -> None:
        action = self.at.get(name)
        if action is not None:
            await action()

    def begin(self, attempt: pb.AttemptId) -> None:
        self.served.append(attempt.request_id)
        self.running[attempt.transfer_id] = attempt.request_id
        self.idle.clear()

    def end(self, attempt: pb.AttemptId) -> None:
        self.running.pop(attempt.transfer_id, None)
        if not self.running:
            self.idle.set()

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.AbortResponse:
        self.aborted.append(request.attempt.transfer_id)
        self.abort_came.set()
        return pb.AbortResponse(incarnation=self.record.incarnation)

    async def GetLoad(
        self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(role=self.role)

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.DrainResponse:
        return pb.DrainResponse()


class Handoffs:
    """Pages on their way: set when a transfer's push has landed."""

    def __init__(self) -> None:
        self._landed: dict[str, asyncio.Event] = {}

    def of(self, transfer_id: str) -> asyncio.Event:
        return self._landed.setdefault(transfer_id, asyncio.Event())


class FakePrefill(FakeWorker, worker_pb2_grpc.PrefillServiceServicer):
    """Points: start, computed, reservation, pushed."""

    role: Role = "prefill"

    def __init__(self, worker_id: str, handoffs: Handoffs) -> None:
        super().__init__(worker_id, handoffs)
        self.prompts: list[list[int]] = []
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(self, self.server.server)

    async def Prefill(
        self,
        request_iterator: AsyncIterator[pb.PrefillRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[pb.PrefillResponse]:
        start = (await anext(request_iterator)).start
        assert start.incarnation == self.record.incarnation
        self.prompts.append(list(start.prompt_token_ids))
        self.begin(start.attempt)
        try:
            await self.point("start")
            yield pb.PrefillResponse(computed=pb.PrefillComputed(queue_s=0.0, compute_s=0.01))
            await self.point("computed")
            reservation = (await anext(request_iterator)).reservation
            assert reservation.attempt == start.attempt
            await self.point("reservation")
            self.handoffs.of(start.attempt.transfer_id).set()
            yield pb.PrefillResponse(pushed=pb.PrefillPushed(pages=1, bytes=64, push_s=0.001))
            await self.point("pushed")
        finally:
            self.end(start.attempt)


class FakeDecode(FakeWorker, worker_pb2_grpc.DecodeServiceServicer):
    """Answers every prompt with `answer`, a block at a time.

    Points: start, reserved, verified, commit 0, commit 1 ... (before that commit), finish."""

    role: Role = "decode"

    def __init__(self, worker_id: str, handoffs: Handoffs) -> None:
        super().__init__(worker_id, handoffs)
        self.answer: list[int] = ids_of("the answer is three")
        self.stopped = True
        self.requests: list[pb.DecodeRequest] = []
        self.twist: Callable[[pb.DecodeResponse], pb.DecodeResponse] = lambda response: response
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(self, self.server.server)

    async def Decode(
        self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.DecodeResponse]:
        assert request.incarnation == self.record.incarnation
        self.requests.append(request)
        self.begin(request.attempt)
        try:
            await self.point("start")
            async for response in self._answer(request):
                yield self.twist(response)
        finally:
            self.end(request.attempt)

    async def _answer(self, request: pb.DecodeRequest) -> AsyncIterator[pb.DecodeResponse]:
        attempt = request.attempt
        reservation = pb.Reservation(
            attempt=attempt, incarnation=self.record.incarnation, connector="zmq", lease_s=30
        )
        yield pb.DecodeResponse(reservation=reservation)
        await self.point("reserved")
        if request.HasField("remote"):
            await self.handoffs.of(attempt.transfer_id).wait()
            yield pb.DecodeResponse(verified=pb.PrefillVerified(bytes=64, pages=1, handoff_s=0.01))
        else:
            yield pb.DecodeResponse(verified=pb.PrefillVerified())
        await self.point("verified")
        answer = self.answer[: request.max_tokens]
        done = list(request.resume.committed_token_ids)
        assert done == answer[: len(done)], "resumed with tokens that were never said"
        for offset in range(len(done), len(answer), BLOCK_SIZE):
            await self.point(f"commit {offset // BLOCK_SIZE}")
            if request.drafts:
                yield pb.DecodeResponse(draft=_draft(offset, answer))
            yield pb.DecodeResponse(commit=_commit(offset, answer))
        await self.point("finish")
        yield pb.DecodeResponse(
            finished=pb.DecodeFinished(
                stopped=self.stopped, num_tokens=len(answer), forward_passes=len(answer)
            )
        )


def _commit(offset: int, answer: list[int]) -> pb.DecodeCommit:
    end = min(offset + BLOCK_SIZE, len(answer))
    return pb.DecodeCommit(
        token_offset=offset,
        token_ids=answer[offset:end],
        forward_passes=end,
        frontier=[pb.BlockState(token_ids=[MASK] * BLOCK_SIZE, masks=b"\x0f", denoise_count=end)],
    )


def _draft(offset: int, answer: list[int]) -> pb.DecodeDraft:
    ids = answer[offset : offset + BLOCK_SIZE]
    ids += [MASK] * (BLOCK_SIZE - len(ids))
    ids[1] = MASK
    masks = sum(1 << at for at, one in enumerate(ids) if one == MASK)
    block = pb.BlockState(token_ids=ids, masks=bytes([masks]))
    return pb.DecodeDraft(token_offset=offset, block=block)


@dataclass
class FakeFleet:
    """A router in front of fake workers, and a channel to it."""

    router: Router
    store: FakeStore
    prefill: list[FakePrefill]
    decode: list[FakeDecode]
    channel: grpc.aio.Channel
    stop: asyncio.Event
    generation: generation_pb2_grpc.GenerationServiceAsyncStub = field(init=False)
    models: model_pb2_grpc.ModelServiceAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.generation = generation_stub(self.channel)
        self.models = model_stub(self.channel)

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefill, *self.decode]

    async def idle(self) -> None:
        """Returns once no worker runs an attempt and the router runs no request."""
        for worker in self.workers:
            await worker.idle.wait()
        await self.router.ledger.idle.wait()

    async def announce(self) -> None:
        """Lets the router see the workers as they are now."""
        self.store.records = {worker.worker_id: worker.record for worker in self.workers}
        await self.router.view.poll()


@asynccontextmanager
async def fake_fleet(
    num_prefill: int = 1, num_decode: int = 1, **settings: object
) -> AsyncIterator[FakeFleet]:
    """A running fleet. `settings` are of RouterConfig, but for the port."""
    handoffs, store, stop = Handoffs(), FakeStore(), asyncio.Event()
    prefillers = [FakePrefill(f"p{i}", handoffs) for i in range(num_prefill)]
    decoders = [FakeDecode(f"d{i}", handoffs) for i in range(num_decode)]
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(asyncio.TaskGroup())
        for worker in [*prefillers, *decoders]:
            await worker.start()
            workers.create_task(worker.until_crash())
            stack.callback(worker.crashed.set)
            store.records[worker.worker_id] = worker.record
        config = RouterConfig(port=0, **settings)  # type: ignore[arg-type]
        router = Router(config, Tokenizer(byte_tokenizer()), store)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        group.create_task(router.serve(stop))
        stack.callback(stop.set)
        await router.ready.wait()
        channel = rpc.connect(f"127.0.0.1:{router.port}", keepalive=None)
        await stack.enter_async_context(channel)
        yield FakeFleet(router, store, prefillers, decoders, channel, stop)


def run(
    body: Callable[[FakeFleet], Awaitable[None]], timeout_s: float = 20, **kwargs: object
) -> None:
    """Runs `body` with a fake fleet; afterwards no task is left."""

    async def main() -> None:
        async with asyncio.timeout(timeout_s):
            async with fake_fleet(**kwargs) as fleet:  # type: ignore[arg-type]
                await body(fleet)
            left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            assert not left, left

    asyncio.run(main())


def raises(error: EffuseError) -> Point:
    """A point at which an attempt fails in a way that the worker tells."""

    async def fail() -> None:
        raise error

    return fail


def once(point: Point) -> Point:
    """A point that acts the first time only."""
    left = [point]

    async def act() -> None:
        if left:
            await left.pop()()

    return act


def holds(event: asyncio.Event, reached: asyncio.Event | None = None) -> Point:
    """A point at which an attempt waits; `reached` is set when it gets there."""

    async def hold() -> None:
        if reached is not None:
            reached.set()
        await event.wait()

    return hold


async def until(is_so: Callable[[], bool]) -> None:
    """Returns once it is so; for what nothing tells of. The test's own deadline bounds it."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0)
