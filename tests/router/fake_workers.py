"""Fake workers that speak the real protos in this process.

A worker stops at named points of each attempt, at which a test may hold it, break it or kill it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import get_args

import grpc.aio
import msgspec
from router.fake_model import BLOCK_SIZE, EOS, MASK, ids_of, worker_record

from effuse.placement.records import Role
from effuse.protos import rpc
from effuse.protos.errors import EffuseError, EngineLost, Replaced
from effuse.protos.rpc import RpcServer
from effuse.v1 import generation_pb2, worker_pb2_grpc
from effuse.v1 import worker_pb2 as pb

Point = Callable[[], Awaitable[None]]


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Shared parts of both roles: a server, points to stop at, and an account of attempts."""

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
        self.is_starting = False  # its engine is gone and not back
        self.past_lives: set[str] = set()  # of engines that others have followed
        self.num_others = 0  # attempts that this router knows nothing of
        self.num_asked = 0  # for its load
        self.roles: list[str] = []  # for which routers asked
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

    def check_life(self, incarnation: str) -> None:
        """The call must be meant for the engine of now; one for an earlier engine may be late."""
        if incarnation in self.past_lives:
            raise Replaced("another engine has followed")
        assert incarnation == self.record.incarnation

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
        self.num_asked += 1
        return pb.GetLoadResponse(
            running=len(self.running) + self.num_others,
            worker=pb.WorkerRef(
                worker_id=self.worker_id,
                incarnation="" if self.is_starting else self.record.incarnation,
            ),
            role=self.role,
        )

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.DrainResponse:
        return pb.DrainResponse()

    async def Undrain(
        self, request: pb.UndrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.UndrainResponse:
        raise NotImplementedError

    async def SetRole(
        self, request: pb.SetRoleRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.SetRoleResponse:
        assert request.planned
        self.roles.append(request.role)
        await self.point("role")
        role = next(one for one in get_args(Role) if one == request.role)
        self.record = msgspec.structs.replace(self.record, role=role, role_age_s=0.0)
        return pb.SetRoleResponse(role=role)


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
        self.salts: list[str] = []
        self.pool_works = True  # for prompts that go there
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(self, self.server.server)

    async def Prefill(
        self,
        request_iterator: AsyncIterator[pb.PrefillRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[pb.PrefillResponse]:
        start = (await anext(request_iterator)).start
        self.check_life(start.incarnation)
        self.prompts.append(list(start.prompt_token_ids))
        self.salts.append(start.cache_salt)
        self.begin(start.attempt)
        try:
            await self.point("start")
            if start.progress:
                for count in (4, 8):
                    yield pb.PrefillResponse(progress=pb.PrefillProgress(computed_tokens=count))
                await self.point("progress")
            in_pool = start.to_pool and self.pool_works
            computed = pb.PrefillComputed(
                queue_s=0.0, compute_s=0.01, cached_tokens=2, in_pool=in_pool
            )
            yield pb.PrefillResponse(computed=computed)
            await self.point("computed")
            if in_pool:
                yield pb.PrefillResponse(pushed=pb.PrefillPushed(pages=1, bytes=64, push_s=0.001))
                return
            reservation = (await anext(request_iterator)).reservation
            assert reservation.attempt == start.attempt
            await self.point("reservation")
            self.handoffs.of(start.attempt.transfer_id).set()
            yield pb.PrefillResponse(pushed=pb.PrefillPushed(pages=1, bytes=64, push_s=0.001))
            await self.point("pushed")
        finally:
            self.end(start.attempt)


class FakeDecode(FakeWorker, worker_pb2_grpc.DecodeServiceServicer):
    """Answers every prompt with `answer`, a block at a time, and with `others` if several are
    requested.

    Points: start, reserved, verified, commit 0, commit 1 ... (before that commit), finish; of the
    second answer and those behind it also 1/commit 0 and so on.
    """

    role: Role = "decode"

    def __init__(self, worker_id: str, handoffs: Handoffs) -> None:
        super().__init__(worker_id, handoffs)
        self.answer: list[int] = ids_of("the answer is three")
        self.others: list[list[int]] = []
        self.costs = pb.DecodeCommit(), pb.PrefillVerified()  # added to those of its answers
        self.requests: list[pb.DecodeRequest] = []
        self.twist: Callable[[pb.DecodeResponse], pb.DecodeResponse] = lambda response: response
        self.at_once = False  # all that follows the reservation goes in one message
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(self, self.server.server)

    async def Decode(
        self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.DecodeResponse]:
        self.check_life(request.incarnation)
        self.requests.append(request)
        self.begin(request.attempt)
        try:
            await self.point("start")
            together = pb.DecodeResponse()
            async for response in self._answer(request):
                event = self.twist(response)
                if event.HasField("finished"):  # the next request may come as soon as this is sent
                    self.end(request.attempt)
                if not self.at_once or event.HasField("reservation"):
                    yield event
                elif event.HasField("verified"):
                    together = event
                else:
                    together.then.append(event)
            if self.at_once:
                yield together
        finally:
            self.end(request.attempt)

    async def Rehearse(
        self, request: pb.RehearseRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.RehearseResponse]:
        raise AssertionError("no prefill worker is there to ask for it")
        yield pb.RehearseResponse()

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
            yield pb.DecodeResponse(verified=self.costs[1])
        await self.point("verified")
        index = request.sampling.answer_index
        whole = [self.answer, *self.others][index]
        answer, is_stopped = whole[: request.max_tokens], len(whole) < request.max_tokens
        done = list(request.resume.committed_token_ids)
        assert done == answer[: len(done)], "resumed with tokens that were never said"
        for offset in range(len(done), len(answer), BLOCK_SIZE):
            await self.point(f"commit {offset // BLOCK_SIZE}")
            if index:
                await self.point(f"{index}/commit {offset // BLOCK_SIZE}")
            if request.drafts:
                yield pb.DecodeResponse(draft=_draft(offset, answer))
            commit = _commit(offset, answer)
            commit.MergeFrom(self.costs[0])
            if is_stopped and offset + BLOCK_SIZE >= len(answer):
                commit.end_token_id = EOS
            if request.HasField("num_logprobs"):
                commit.logprobs.extend(_logprobs(commit.token_ids, request.num_logprobs))
            yield pb.DecodeResponse(commit=commit)
        await self.point("finish")
        yield pb.DecodeResponse(
            finished=pb.DecodeFinished(
                stopped=is_stopped, num_tokens=len(answer), forward_passes=len(answer)
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


def _logprobs(token_ids: Iterable[int], num_top: int) -> Iterator[generation_pb2.TokenLogprobs]:
    for token in token_ids:
        top = range(token, token + num_top)
        yield generation_pb2.TokenLogprobs(
            logprob=-token / 2, top_token_ids=top, top_logprobs=[-one / 2 for one in top]
        )


def _draft(offset: int, answer: list[int]) -> pb.DecodeDraft:
    ids = answer[offset : offset + BLOCK_SIZE]
    ids += [MASK] * (BLOCK_SIZE - len(ids))
    ids[1] = MASK
    masks = sum(1 << at for at, one in enumerate(ids) if one == MASK)
    block = pb.BlockState(token_ids=ids, masks=bytes([masks]))
    return pb.DecodeDraft(token_offset=offset, block=block)


def raises(error: EffuseError) -> Point:
    """A point at which an attempt fails with the worker's error."""

    async def fail() -> None:
        raise error

    return fail


def ends_its_engine(worker: FakeWorker) -> Point:
    """A point at which the worker's engine ends; its front lives and starts another one."""

    async def end() -> None:
        worker.is_starting = True
        raise EngineLost("the engine was lost")

    return end


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
