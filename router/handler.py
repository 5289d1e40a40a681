"""GenerationService, and one request from top to bottom: accepted, let in, answered, and ended.

Every protocol's requests come through `Serving`. The end of each is decided and counted here, in
one place. Not here: the checks (`entrance.py`), how an answer comes about and the reaction to
failures of workers (`answer.py`), several answers to one request (`answers.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from effuse.client.answer import Stats
from effuse.placement.records import ModelInfo
from effuse.protos.errors import Cancelled, DeadlineExceeded, EffuseError, EndedById
from effuse.protos.rpc import Context
from effuse.router.admission import HeldSlots, SlotNeed
from effuse.router.answer import AnswerRun, SideBySide
from effuse.router.client import (
    AnswerStream,
    ClientGone,
    Recipient,
    Translate,
    WholeAnswer,
    echo_of,
    events_of,
    stats_of,
    time_is_over,
    usage_of,
)
from effuse.router.entrance import CallContext, Entrance
from effuse.router.findings import Findings, check_request_id
from effuse.router.fleet import keys_of
from effuse.router.prompt import encode_prompt
from effuse.router.request import EncodedPrompt, Request
from effuse.router.request_states import Event
from effuse.router.router import Router
from effuse.router.shared_request import SharedRequest
from effuse.router.tenants import QuotaShare
from effuse.router.validation import fit
from effuse.telemetry import logs
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc
from effuse.v1.model_pb2 import TokenizeRequest

LOG: Final = logging.getLogger(__name__)

ON_THE_WAY_S: Final = 0.02
"""How long a cancellation may take from a client's deadline to here, and still count as that."""

_COSTS: Final = (
    "queue_s", "prefill_s", "handoff_s", "first_block_s", "total_s",
    "forward_passes", "preemptions",
)  # fmt: skip

Read = Callable[[], pb.GenerateRequest]


class Serving:
    """Serves the requests of a router, whichever protocol they came by."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.entrance = Entrance(router)

    def span(self, context: CallContext) -> AbstractContextManager[object]:
        """A request's own span, within that of its client if there is one."""
        return self.router.traces.span("generate", context.invocation_metadata() or ())

    async def tokenize(
        self, asked: pb.GenerateRequest | TokenizeRequest
    ) -> tuple[list[int], ModelInfo]:
        """The ids of a prompt, however long, and its model; raises `EffuseError`."""
        message = pb.GenerateRequest(
            model=asked.model if asked.HasField("model") else None,
            prompt=asked.prompt if asked.HasField("prompt") else None,
            chat=asked.chat if asked.HasField("chat") else None,
            parse_special_tokens=asked.parse_special_tokens,
        )
        resolved = self.entrance.resolve(message, is_stream=False)
        return await encode_prompt(resolved, self.router.tokenizer), resolved.model

    async def answer(self, read: Read, context: CallContext) -> pb.GenerateResponse:
        """The whole answer, or all answers, to the message that `read` returns; raises
        `EffuseError`."""
        with self.span(context):
            accepted = await self._accept(read, context, is_stream=False)
            return await self.answer_accepted(accepted)

    async def answer_accepted(self, request: Request) -> pb.GenerateResponse:
        """The same of a request that is accepted."""
        answer = WholeAnswer()
        answer.take(await self.serve(request, answer))
        return answer.response(request.id)

    async def stream(
        self,
        read: Read,
        context: Context,
        translator_of: Callable[[Request], Translate] | None = None,
        *,
        is_stream: bool = True,
    ) -> None:
        """Writes the answer, or several, to a call while they grow. `translator_of` makes the
        function that translates their events. Raises `EffuseError`."""
        with self.span(context):
            accepted = await self._accept(read, context, is_stream=is_stream)
            stream = AnswerStream(context)
            if translator_of is not None:
                stream.translate = translator_of(accepted)
            async with stream.ending():
                await stream.send(await self.serve(accepted, stream))

    async def _accept(self, read: Read, context: CallContext, *, is_stream: bool) -> Request:
        with self.entrance.counting_refusals():
            message = read()
        return await self.entrance.accept(message, context, is_stream=is_stream)

    async def serve(self, request: Request, client: Recipient) -> pb.GenerateStreamResponse:
        """Sends the client all events of the answer, or answers, except the last one, which is
        returned; raises `EffuseError`. In every case the request ends here and is counted."""
        return await _Handler(self.router, request, client).serve()


class _Handler:
    """Serves one accepted request, once."""

    def __init__(self, router: Router, request: Request, client: Recipient) -> None:
        self._router = router
        self._request = request
        self._shared = SharedRequest(router.requests.sharing, request, client)

    async def serve(self) -> pb.GenerateStreamResponse:
        router, request = self._router, self._request
        quota = router.quotas.running(request.tenant, request.asked.num_answers)
        with router.requests.running(request), quota as share, self._ending(share):
            async with asyncio.timeout_at(request.deadline) as limit:
                with router.requests.limited_by(request, limit):
                    if (kept := await self._shared.claim()) is not None:
                        return await self._repeat(kept)
                    left_s = request.deadline - asyncio.get_running_loop().time()
                    need = SlotNeed.of(request.asked, request.tenant.name, request.arrived, left_s)
                    async with router.admission.slot(need) as slots:
                        await self._encode_prompt()
                        last = await self._answers(slots, share).run()
                        self._note_good_end(last)
                        return last

    def _answers(self, slots: HeldSlots, share: QuotaShare) -> AnswerRun | SideBySide:
        request = self._request
        if request.asked.num_answers == 1:
            return AnswerRun(self._router, request, self._shared)

        def end_answer(one: Request) -> None:
            slots.end_answer(one.costs.begun)
            share.end_answers(1)

        return SideBySide(self._router, request, self._shared, end_answer)

    async def _repeat(self, kept: pb.GenerateResponse) -> pb.GenerateStreamResponse:
        """Sends the client all events of a kept answer except the last one."""
        request = self._request
        request.kept_prompt_tokens = kept.usage.prompt_tokens
        *events, last = events_of(kept)
        for event in events:
            await self._shared.send(event)
        request.answer.apply_event(Event.FINISHED, self._router.now(), "an answer that was kept")
        request.status = "OK"
        self._note_end("OK", kept.stats)
        self._annotate(last)
        return last

    async def _encode_prompt(self) -> None:
        request, router = self._request, self._router
        asked = request.asked
        request.costs.queue_s = router.now() - request.arrived
        router.traces.record("queue", request.costs.queue_s)
        token_ids = await encode_prompt(asked, router.tokenizer)
        is_reusable = asked.model.prompt_attention == "causal_blocks"
        prefix_keys = keys_of(token_ids, request.tenant.name) if is_reusable else ()
        request.prompt = EncodedPrompt(token_ids, fit(len(token_ids), asked), prefix_keys)
        if asked.wants_echo:
            text = await router.tokenizer.text_of(token_ids)
            await self._shared.send(echo_of(request, text))

    # The end.

    def _note_good_end(self, last: pb.GenerateStreamResponse) -> None:
        """Counts the request once its last event is on its way, and annotates its span now."""
        request, stats = self._request, last.finished.stats
        if request.answers:
            request.add_up()
            now, note = self._router.now(), f"{len(request.answers)} answers"
            request.answer.apply_event(Event.FINISHED, now, note)
            stats = stats_of(request, now)
        request.status = "OK"
        self._shared.end(last)
        asyncio.get_running_loop().call_soon(self._note_end, "OK", stats)
        self._annotate(last)

    def _annotate(self, last: pb.GenerateStreamResponse) -> None:
        """Adds to the request's span how it ended."""
        request = self._request
        usage = usage_of(request) if request.answers else last.finished.usage
        self._router.traces.annotate(
            {
                "gen_ai.request.model": last.finished.model,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "effuse.request_id": request.id,
                "effuse.attempts": request.attempts.count,
            }
        )

    @contextmanager
    def _ending(self, share: QuotaShare) -> Iterator[None]:
        """Counts the end, whichever it is, and the tokens for `share`; maps a bad one to the error
        for the client."""
        request = self._request
        try:
            yield
        except TimeoutError as error:
            is_cut_off = self._router.requests.is_cut_off
            raise self._end_badly(time_is_over(request, is_cut_off=is_cut_off)) from error
        except EffuseError as error:
            raise self._end_badly(error) from error.__cause__
        except (ClientGone, asyncio.CancelledError) as error:
            elapsed_s = self._router.now() - request.arrived
            gone = self._end_badly(why_gone(elapsed_s, request.limit_s))
            if isinstance(error, ClientGone):
                raise gone from error
            raise
        finally:
            if not request.answer.is_ended:  # an exception of ours is on its way to the border
                self._record_end(Event.FAILED, "INTERNAL")
            self._shared.end(None)
            share.spend(len(request.prompt.token_ids) + request.num_written)

    def _end_badly(self, error: EffuseError) -> EffuseError:
        by_caller = isinstance(error, Cancelled | DeadlineExceeded | EndedById)
        self._record_end(Event.CANCELLED if by_caller else Event.FAILED, error.code.name)
        return error

    def _record_end(self, event: Event, status: str) -> None:
        request, now = self._request, self._router.now()
        request.add_up()
        if not request.answer.is_ended:
            request.answer.apply_event(event, now, status)
            request.status = status
        self._note_end(status, stats_of(request, now))

    def _note_end(self, status: str, stats: pb.GenerationStats) -> None:
        """Counts a request that ended, and logs one line about it."""
        request, cost = self._request, Stats.of(stats)
        self._router.metrics.count_end(request, status, cost)
        figures = {"request_id": request.id, "status": status, **_figures(request, cost)}
        if status != "OK":
            figures["story"] = request.answer.tell_story()
        LOG.info("a request ended", extra=logs.figures(figures))


def _figures(request: Request, stats: Stats) -> dict[str, str | int | float]:
    """The figures of a request that ended, for its line in the log."""
    return {
        "model": request.asked.model.name,
        "prompt_tokens": len(request.prompt.token_ids),
        "answers": request.asked.num_answers,
        "tokens": request.num_tokens,
        **{name: getattr(stats, name) for name in _COSTS},
        "prefill_worker": request.attempts.prefill_worker,
        "decode_worker": request.attempts.decode_worker,
        "attempts": request.attempts.count,
    }


def why_gone(elapsed_s: float, limit_s: float) -> EffuseError:
    """The error of a request whose client broke off. A client does so at its deadline too, and
    before ours: gRPC rounds the deadline up by as much as 1 %, and the way here takes time."""
    if elapsed_s >= 0.99 * limit_s - ON_THE_WAY_S:
        return DeadlineExceeded(f"the client's deadline of {limit_s:.3g} s passed")
    return Cancelled("the client cancelled")


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """GenerationService."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """The whole answer, or all answers, at the end."""
        return await self._serving.answer(lambda: request, context)

    async def GenerateStream(  # type: ignore[override]  # the stub knows only generators
        self,
        request: pb.GenerateStreamRequest,
        context: Context,
    ) -> None:
        """The answer as it grows, or several.

        Written through the context: a generator would be left hanging when its call is cancelled.
        """
        await self._serving.stream(lambda: request.request, context)

    async def CancelRequest(
        self, request: pb.CancelRequestRequest, context: Context
    ) -> pb.CancelRequestResponse:
        """Ends a request that runs here; of others returns the state and the router."""
        name, tenant = self._checked(request.request_id)
        requests = self._serving.router.requests
        if requests.cancel(name, tenant):
            return pb.CancelRequestResponse(request_id=name, was_running=True)
        found = await requests.look_up(name, tenant)
        return pb.CancelRequestResponse(request_id=name, state=found.state, router=found.router)

    async def GetRequest(
        self, request: pb.GetRequestRequest, context: Context
    ) -> pb.GetRequestResponse:
        """Where a request is, or how it ended, with its answer while that is kept; of other routers
        as far as Redis knows."""
        return await self._serving.router.requests.look_up(*self._checked(request.request_id))

    def _checked(self, request_id: str) -> tuple[str, str]:
        """A checked id, and the tenant of the call, which learns of no other tenant's requests."""
        findings = Findings()
        check_request_id(request_id, findings)
        findings.raise_any()
        return request_id, self._serving.entrance.tenant().name
