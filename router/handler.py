"""GenerationService, and one request from top to bottom: checked, let in, answered, and ended.

Whatever happens, the request's end is decided and counted here, in one place. Not here: how an
answer comes about and what is done where workers fail (`answer.py`), several answers to one request
(`answers.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

import grpc.aio

from effuse.protos.errors import (
    REQUEST_ID_KEY,
    Cancelled,
    DeadlineExceeded,
    EffuseError,
    EndedById,
    Unavailable,
)
from effuse.router.admission import HeldSlots, SlotNeed
from effuse.router.answer import AnswerRun, time_is_over
from effuse.router.answers import SideBySide, add_up
from effuse.router.client import AnswerStream, ClientGone, Recipient, WholeAnswer, events_of
from effuse.router.detokenizer import AnswerText
from effuse.router.findings import REQUEST_ID, Findings, check_request_id
from effuse.router.known_requests import EarlyRequest
from effuse.router.prefixes import keys_of
from effuse.router.prompt import encode_prompt
from effuse.router.request import Request
from effuse.router.request_states import Event
from effuse.router.router import RETRY_AFTER_S, Router
from effuse.router.shared_request import SharedRequest, digest_of_asked
from effuse.router.tenants import QuotaShare
from effuse.router.validation import fit
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc

LOG: Final = logging.getLogger(__name__)
REPEATED_KEY: Final = "grpc-previous-rpc-attempts"
"""Metadata of a call that gRPC's own retries send again; who does so himself can set it, too."""

ON_THE_WAY_S: Final = 0.02
"""What a cancellation may take from a client's deadline to here, and still be told from others."""


class CallContext(Protocol):
    """The facts of a call that do not depend on its protocol. gRPC's contexts have them."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if it has none."""

    def invocation_metadata(self) -> Any:
        """Names and values that came beside the request, or None."""

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Takes names and values that go beside the answer."""


@contextmanager
def counting_refusals(router: Router) -> Iterator[None]:
    """For all that is said against a request before anything is held for it."""
    try:
        yield
    except EffuseError as error:
        router.metrics.count_refusal(router.tenant().name, error.code.name)
        raise


async def accept(
    router: Router,
    message: pb.GenerateRequest,
    context: CallContext,
    *,
    is_stream: bool,
) -> Request:
    """The request that a client means; raises `EffuseError` with all that can be said against it
    before anything is held for it. Waits in the queue until a worker has announced a model."""
    arrived, began = router.now(), asyncio.get_running_loop().time()
    with counting_refusals(router):
        request_id = _request_id(message)
        context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
        time_left = context.time_remaining()
        limit_s = min(math.inf if time_left is None else time_left, router.config.max_request_s)
        tenant = router.tenant()
        router.quotas.check(tenant)
        if router.catalogue.is_empty:
            await _wait_for_models(
                router, EarlyRequest(id=request_id, tenant=tenant, limit_s=limit_s)
            )
        if not router.admission.knows_seats:
            router.count_seats()
        model = message.model or router.admission.only_model
        router.admission.check(SlotNeed(model=model, tenant=tenant.name))
        asked_digest = digest_of_asked(message, tenant) if message.HasField("request_id") else ""
        router.requests.check_id(request_id)
        asked = router.resolve(message, is_stream=is_stream, seed=secrets.randbits(64))
        router.quotas.check(tenant, asked.num_answers)
        left_s = began + limit_s - asyncio.get_running_loop().time()
        router.admission.check(SlotNeed.of(asked, tenant.name, arrived, left_s))
    router.retry_budget.add_requests(asked.num_answers, router.now())
    return Request(
        id=request_id,
        asked=asked,
        text=AnswerText(router.tokenizer, asked.stops, asked.min_tokens),
        arrived=arrived,
        limit_s=limit_s,
        deadline=began + limit_s,
        tenant=tenant,
        asked_digest=asked_digest,
        is_repeated=bool(asked_digest) and _is_repeated(context),
    )


async def _wait_for_models(router: Router, request: EarlyRequest) -> None:
    """Returns once a worker has announced a model. Raises `Overloaded` where the queue is full,
    `Unavailable` after `recovery_s`, and what ends any request that waits."""
    ends = router.now() + router.config.recovery_s
    try:
        with router.admission.early(), router.requests.running(request):
            async with asyncio.timeout(request.limit_s) as limit:
                with router.requests.limited_by(request, limit):
                    while router.catalogue.is_empty:
                        if (left_s := ends - router.now()) <= 0:
                            text = f"no worker could begin within {router.config.recovery_s:.3g} s"
                            why = f"{text}: no worker has announced a model"
                            raise Unavailable(why, retry_after_s=RETRY_AFTER_S)
                        await router.fleet.wait_for_change(left_s)
    except TimeoutError as error:
        raise time_is_over(router, request) from error


class Handler:
    """Serves one accepted request, once."""

    def __init__(self, router: Router, request: Request, client: Recipient) -> None:
        self._router = router
        self._request = request
        self._shared = SharedRequest(router, request, client)

    async def serve(self) -> pb.GenerateStreamResponse:
        """Tells the client the answer, or answers, but for the last event, which is returned;
        raises `EffuseError`. Whatever happens, the request ends here and is counted."""
        router, request = self._router, self._request
        quota = router.quotas.running(request.tenant, request.asked.num_answers)
        with router.requests.running(request), quota as share, self._ending(share):
            async with asyncio.timeout_at(request.deadline) as limit:
                with router.requests.limited_by(request, limit):
                    if (kept := await self._shared.claim()) is not None:
                        return await self._repeat(kept)
                    async with router.admission.slot(self._need()) as slots:
                        await self._encode_prompt()
                        last = await self._answers(slots, share).run()
                        self._note_good_end(last)
                        return last

    def _need(self) -> SlotNeed:
        request = self._request
        left_s = request.deadline - asyncio.get_running_loop().time()
        return SlotNeed.of(request.asked, request.tenant.name, request.arrived, left_s)

    def _answers(self, slots: HeldSlots, share: QuotaShare) -> AnswerRun | SideBySide:
        router, request = self._router, self._request
        if request.asked.num_answers == 1:
            return AnswerRun(router, request, self._shared)

        def end_answer(one: Request) -> None:
            slots.end_answer(one.begun)
            share.end_answers(1)

        return SideBySide(router, request, self._shared, end_answer)

    async def _repeat(self, kept: pb.GenerateResponse) -> pb.GenerateStreamResponse:
        """Tells the client an answer that is kept from before, but for its last event."""
        router, request = self._router, self._request
        request.kept_prompt_tokens = kept.usage.prompt_tokens
        *events, last = events_of(kept)
        for event in events:
            await self._shared.send(event)
        request.apply_event(Event.FINISHED, router.now(), "an answer that was kept")
        request.status, request.was_kept = "OK", True
        router.note_end(request, "OK", kept.stats)
        self._annotate(last)
        return last

    async def _encode_prompt(self) -> None:
        request = self._request
        asked = request.asked
        request.queue_s = self._router.now() - request.arrived
        self._router.traces.record("queue", request.queue_s)
        token_ids = await encode_prompt(asked, self._router.tokenizer)
        request.prompt_token_ids = token_ids
        request.max_tokens = fit(len(token_ids), asked)
        if asked.model.prompt_attention == "causal_blocks":
            request.prefix_keys = keys_of(token_ids, request.tenant.name)
        if asked.wants_echo:
            text = await self._router.tokenizer.text_of(token_ids)
            await self._shared.send(request.echo(text))

    # The end.

    def _note_good_end(self, last: pb.GenerateStreamResponse) -> None:
        """Counts the request once its last event is on its way; the trace hears now."""
        request, router, stats = self._request, self._router, last.finished.stats
        if request.answers:
            add_up(request)
            request.apply_event(Event.FINISHED, router.now(), f"{len(request.answers)} answers")
            stats = request.stats(router.now())
        request.status = "OK"
        self._shared.end(last)
        asyncio.get_running_loop().call_soon(router.note_end, request, "OK", stats)
        self._annotate(last)

    def _annotate(self, last: pb.GenerateStreamResponse) -> None:
        """Tells the trace how it ended."""
        request = self._request
        usage = request.usage() if request.answers else last.finished.usage
        self._router.traces.annotate(
            {
                "gen_ai.request.model": last.finished.model,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "effuse.request_id": request.id,
                "effuse.attempts": request.num_attempts,
            }
        )

    @contextmanager
    def _ending(self, share: QuotaShare) -> Iterator[None]:
        """Counts the end, whatever it is; a bad one is told as it is meant. `share` hears of
        tokens."""
        router, request = self._router, self._request
        try:
            yield
        except TimeoutError as error:
            raise self._end_badly(time_is_over(router, request)) from error
        except EffuseError as error:
            raise self._end_badly(error) from error.__cause__
        except (ClientGone, asyncio.CancelledError) as error:
            gone = self._end_badly(why_gone(router.now() - request.arrived, request.limit_s))
            if isinstance(error, ClientGone):
                raise gone from error
            raise
        finally:
            if not request.is_ended:  # an exception of ours is on its way to the border
                self._record_end(Event.FAILED, "INTERNAL")
            self._shared.end(None)
            share.spend(len(request.prompt_token_ids) + request.num_written)

    def _end_badly(self, error: EffuseError) -> EffuseError:
        """A bad end that is told."""
        by_caller = isinstance(error, Cancelled | DeadlineExceeded | EndedById)
        self._record_end(Event.CANCELLED if by_caller else Event.FAILED, error.code.name)
        return error

    def _record_end(self, event: Event, status: str) -> None:
        request, now = self._request, self._router.now()
        add_up(request)
        if not request.is_ended:
            request.apply_event(event, now, status)
            request.status = status
        self._router.note_end(request, status, request.stats(now))


def why_gone(elapsed_s: float, limit_s: float) -> EffuseError:
    """A client breaks off at its deadline too, and before ours: gRPC rounds what it tells us up by
    as much as 1 %, and the way here takes time."""
    if elapsed_s >= 0.99 * limit_s - ON_THE_WAY_S:
        return DeadlineExceeded(f"the client's deadline of {limit_s:.3g} s passed")
    return Cancelled("the client cancelled")


def _is_repeated(context: CallContext) -> bool:
    return any(key == REPEATED_KEY for key, _ in context.invocation_metadata() or ())


def _request_id(message: pb.GenerateRequest) -> str:
    """The client's, or one of ours where there is none, or one that `validate` refuses."""
    if message.request_id and REQUEST_ID.fullmatch(message.request_id):
        return message.request_id
    return f"req-{secrets.token_hex(12)}"


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """GenerationService."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> pb.GenerateResponse:
        """The whole answer, or all answers, at the end."""
        answer = WholeAnswer()
        with request_span(self._router, context):
            accepted = await accept(self._router, request, context, is_stream=False)
            answer.take(await Handler(self._router, accepted, answer).serve())
        return answer.response(accepted.id)

    async def GenerateStream(  # type: ignore[override]  # the stub knows only generators
        self,
        request: pb.GenerateStreamRequest,
        context: grpc.aio.ServicerContext[pb.GenerateStreamRequest, pb.GenerateStreamResponse],
    ) -> None:
        """The answer as it grows, or several.

        Written through the context: a generator would be left hanging when its call is cancelled.
        """
        with request_span(self._router, context):
            accepted = await accept(self._router, request.request, context, is_stream=True)
            stream = AnswerStream(context)
            async with stream.ending():
                await stream.send(await Handler(self._router, accepted, stream).serve())

    async def CancelRequest(
        self,
        request: pb.CancelRequestRequest,
        context: grpc.aio.ServicerContext[pb.CancelRequestRequest, pb.CancelRequestResponse],
    ) -> pb.CancelRequestResponse:
        """Ends a request that runs here; of others says where they are."""
        findings, requests = Findings(), self._router.requests
        check_request_id(request.request_id, findings)
        findings.raise_any()
        name = request.request_id
        tenant = self._router.tenant().name
        if requests.cancel(name, tenant):
            return pb.CancelRequestResponse(request_id=name, was_running=True)
        found = await requests.look_up(name, tenant)
        return pb.CancelRequestResponse(request_id=name, state=found.state, router=found.router)

    async def GetRequest(
        self,
        request: pb.GetRequestRequest,
        context: grpc.aio.ServicerContext[pb.GetRequestRequest, pb.GetRequestResponse],
    ) -> pb.GetRequestResponse:
        """Where a request is, or how it ended, with its answer while that is kept; of other routers
        what Redis knows."""
        findings = Findings()
        check_request_id(request.request_id, findings)
        findings.raise_any()
        tenant = self._router.tenant().name  # nobody reads another's answer
        return await self._router.requests.look_up(request.request_id, tenant)


def request_span(router: Router, context: CallContext) -> AbstractContextManager[object]:
    """A request's own span, within that of its client if there is one; whichever service it came
    by."""
    return router.traces.span("generate", context.invocation_metadata() or ())
