"""GenerationService: a client's call from its first check to its last byte.

Each step is another file's: validation, tokenizer, admission, relay. Here is their order, and the
one place where a request's end is decided and counted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from typing import Final, TypeVar

import grpc.aio

from effuse.placement.records import MalformedRecord, PlacementRecord, decode_placement
from effuse.placement.store import StoreUnavailable
from effuse.protos.errors import Cancelled, DeadlineExceeded, EffuseError, NotFound, Unavailable
from effuse.router.detokenizer import AnswerText
from effuse.router.job import ClientGone, Costs, Job, Sink
from effuse.router.relay import Relay
from effuse.router.request import Event, Life, State
from effuse.router.router import Router
from effuse.router.sinks import Collected, Streamed
from effuse.router.validation import Asked, Findings, check_request_id, fit, validate
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc

Request = TypeVar("Request")
Response = TypeVar("Response")

LOG: Final = logging.getLogger(__name__)
ON_THE_WAY_S: Final = 0.02
"""What a cancellation may take from a client's deadline to here, and still be told from others."""

_STATES: Final = {
    State.QUEUED: pb.REQUEST_STATE_QUEUED,
    State.FINISHED: pb.REQUEST_STATE_FINISHED,
    State.FAILED: pb.REQUEST_STATE_FAILED,
    State.CANCELLED: pb.REQUEST_STATE_CANCELLED,
}
_STORED_STATES: Final = {
    "running": pb.REQUEST_STATE_RUNNING,
    "finished": pb.REQUEST_STATE_FINISHED,
    "failed": pb.REQUEST_STATE_FAILED,
    "cancelled": pb.REQUEST_STATE_CANCELLED,
}


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """GenerationService."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._relay = Relay(router)

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> pb.GenerateResponse:
        """The whole answer at its end."""
        sink = Collected()
        request_id, asked = self._check(request, is_stream=False)
        finished = await self._serve(request_id, asked, _time_left(context), sink)
        return pb.GenerateResponse(
            request_id=request_id,
            text=sink.text,
            token_ids=sink.token_ids,
            finish_reason=finished.finish_reason,
            usage=finished.usage,
            stats=finished.stats,
            model=finished.model,
        )

    async def GenerateStream(  # type: ignore[override]  # the stub knows only generators
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateStreamResponse],
    ) -> None:
        """The answer as it grows.

        Written through the context: a generator would be left hanging when its call is cancelled.
        """
        request_id, asked = self._check(request, is_stream=True)
        sink = Streamed(context, request_id)
        try:
            finished = await self._serve(request_id, asked, _time_left(context), sink)
            await sink.finished(finished)
        except EffuseError:
            await sink.settle()
            raise
        except ClientGone as error:  # between the answer and its last event
            await sink.settle()
            raise Cancelled("the client cancelled") from error

    async def GetRequest(
        self,
        request: pb.GetRequestRequest,
        context: grpc.aio.ServicerContext[pb.GetRequestRequest, pb.GetRequestResponse],
    ) -> pb.GetRequestResponse:
        """Where a request is, or how it ended; of other routers what Redis knows."""
        findings = Findings()
        check_request_id(request.request_id, findings)
        findings.raise_any()
        life = self._router.requests.find(request.request_id)
        if life is not None:
            return _describe(life)
        return _describe_stored(await self._look_up(request.request_id))

    def _check(self, request: pb.GenerateRequest, *, is_stream: bool) -> tuple[str, Asked]:
        """All that can be said against a request before anything is held for it."""
        router = self._router
        try:
            if not router.admission.knows_seats:
                router.count_seats()
            router.admission.check()
            request_id = _request_id(request)
            router.requests.check(request_id)
            model = router.catalogue.find(request.model if request.HasField("model") else None)
            reserved = router.tokenizer.reserved_ids
            return request_id, validate(request, model, reserved, is_stream=is_stream)
        except EffuseError as error:
            router.metrics.refused.labels(error.code.name).inc()
            raise

    async def _serve(
        self, request_id: str, asked: Asked, time_left_s: float, sink: Sink
    ) -> pb.Finished:
        """Runs the request; whatever happens, its life ends here and is counted."""
        router, life = self._router, Life(request_id)
        costs = Costs(arrived=router.now())
        limit_s = min(time_left_s, router.config.max_request_s)
        deadline = asyncio.get_running_loop().time() + limit_s
        with router.requests.running(life):
            try:
                async with asyncio.timeout_at(deadline), router.admission.slot():
                    job = await self._prepare(life, asked, costs, deadline)
                    reason = await self._relay.run(job, sink)
                    finished = self._finish(job, reason)
            except TimeoutError as error:
                text = f"not answered within {limit_s:.3g} s; it was {life.state.value}"
                raise self._end(life, costs, DeadlineExceeded(text)) from error
            except EffuseError as error:
                raise self._end(life, costs, error) from error.__cause__
            except (ClientGone, asyncio.CancelledError) as error:
                elapsed_s = router.now() - costs.arrived
                gone = self._end(life, costs, why_gone(elapsed_s, limit_s))
                if isinstance(error, ClientGone):
                    raise gone from error
                raise
            finally:
                if not life.is_ended:  # an exception of ours is on its way to the border
                    self._close(life, costs, Event.FAILED, "INTERNAL")
        return finished

    async def _prepare(self, life: Life, asked: Asked, costs: Costs, deadline: float) -> Job:
        costs.queue_s = self._router.now() - costs.arrived
        token_ids = list(asked.prompt_token_ids)
        if asked.prompt is not None:
            token_ids = await self._router.tokenizer.encode(asked.prompt)
            if max(token_ids, default=0) >= asked.model.vocab_size:
                raise Unavailable(
                    f"the router's tokenizer does not fit the model: it made id {max(token_ids)}, "
                    f"the vocabulary has {asked.model.vocab_size}",
                    retryable=False,
                )
        return Job(
            life=life,
            asked=asked,
            prompt_token_ids=token_ids,
            max_tokens=fit(len(token_ids), asked.max_tokens, asked.model),
            deadline=deadline,
            answer=AnswerText(self._router.tokenizer, asked.stops),
            costs=costs,
        )

    def _finish(self, job: Job, reason: pb.FinishReason) -> pb.Finished:
        usage, stats = job.usage(), job.stats(self._router.now())
        job.life.status = "OK"
        # Counted once the answer is on its way.
        asyncio.get_running_loop().call_soon(self._count, usage, stats)
        return pb.Finished(
            finish_reason=reason, usage=usage, stats=stats, model=job.asked.model.name
        )

    def _count(self, usage: pb.Usage, stats: pb.GenerationStats) -> None:
        metrics = self._router.metrics
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.generation_tokens.inc(usage.completion_tokens)
        metrics.first_block.observe(stats.first_block_s)
        metrics.latency.observe(stats.total_s)
        metrics.requests.labels("OK").inc()

    def _end(self, life: Life, costs: Costs, error: EffuseError) -> EffuseError:
        """A bad end that is told."""
        by_caller = isinstance(error, Cancelled | DeadlineExceeded)
        event = Event.CANCELLED if by_caller else Event.FAILED
        self._close(life, costs, event, error.code.name)
        return error

    def _close(self, life: Life, costs: Costs, event: Event, status: str) -> None:
        now = self._router.now()
        if not life.is_ended:
            life.handle(event, now, status)
            life.status = status
        self._router.metrics.requests.labels(status).inc()
        self._router.metrics.latency.observe(now - costs.arrived)
        LOG.info("request %s ended with %s: %s", life.request_id, status, life.tell())

    async def _look_up(self, request_id: str) -> PlacementRecord:
        try:
            stored = await self._router.store.placement(request_id)
            if stored is not None:
                return decode_placement(stored)
        except StoreUnavailable as error:
            text = "requests of other routers cannot be looked up now"
            raise Unavailable(text, retry_after_s=1.0) from error
        except MalformedRecord:
            LOG.warning("the stored placement of %s is malformed", request_id)
        raise NotFound(f"no request {request_id!r} is running or ended a short while ago")


def _request_id(request: pb.GenerateRequest) -> str:
    if not request.HasField("request_id"):
        return f"req-{secrets.token_hex(12)}"
    findings = Findings()
    check_request_id(request.request_id, findings)
    findings.raise_any()
    return request.request_id


def _time_left(context: grpc.aio.ServicerContext[Request, Response]) -> float:
    """Seconds until the client's deadline; grpcio's types hide that there may be none."""
    left: float | None = context.time_remaining()
    return math.inf if left is None else left


def why_gone(elapsed_s: float, limit_s: float) -> EffuseError:
    """A client breaks off at its deadline too, and before ours: gRPC rounds what it tells us up by
    as much as 1 %, and the way here takes time."""
    if elapsed_s >= 0.99 * limit_s - ON_THE_WAY_S:
        return DeadlineExceeded(f"the client's deadline of {limit_s:.3g} s passed")
    return Cancelled("the client cancelled")


def _describe(life: Life) -> pb.GetRequestResponse:
    return pb.GetRequestResponse(
        request_id=life.request_id,
        state=_STATES.get(life.state, pb.REQUEST_STATE_RUNNING),
        attempt=life.attempt,
        prefill_worker=life.prefill_worker,
        decode_worker=life.decode_worker,
        status=life.status,
    )


def _describe_stored(record: PlacementRecord) -> pb.GetRequestResponse:
    return pb.GetRequestResponse(
        request_id=record.request_id,
        state=_STORED_STATES[record.state],
        attempt=record.attempt,
        prefill_worker=record.prefill.worker_id if record.prefill else "",
        decode_worker=record.decode.worker_id,
        status="OK" if record.state == "finished" else "",
    )
