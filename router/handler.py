"""One request from top to bottom: checked, let in, answered, and ended.

Every protocol's requests come through `Serving`, which raises all that speaks against a request
before anything is held for it, and each end is counted here. Not here: the meaning of other
protocols' messages (`openai_requests.py`, `kserve.py`, `vllm_engine.py`), and `answer.py`.
"""

import asyncio
import hashlib
import logging
import math
import secrets
from array import array
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Final

from effuse.client.answer import Stats, WholeAnswer
from effuse.client.retries import REPEATED_KEY
from effuse.config.decoding import ANSWERS
from effuse.placement.records import ModelInfo
from effuse.protos.errors import (
    REQUEST_ID_KEY,
    Cancelled,
    DeadlineExceeded,
    EffuseError,
    EndedById,
    Unavailable,
)
from effuse.protos.gate import CALLER
from effuse.protos.rpc import Context
from effuse.router.admission import HeldSlots, SlotNeed
from effuse.router.answer import AnswerRun, SideBySide
from effuse.router.client import (
    RETRY_AFTER_S,
    AnswerStream,
    CallContext,
    ClientGone,
    Send,
    Translate,
    echo_of,
    events_of,
    stats_of,
    time_is_over,
    usage_of,
    why_gone,
)
from effuse.router.findings import REQUEST_ID
from effuse.router.prefixes import key_of_whole, keys_of
from effuse.router.request import SHOWN, AnswerState, EarlyRequest, EncodedPrompt, Request
from effuse.router.request_states import Event
from effuse.router.router import Router
from effuse.router.shared_request import SharedRequest
from effuse.router.sizes import sizes_of
from effuse.router.tenants import NOBODY, QuotaShare, Tenant
from effuse.router.tokenizer import AnswerText
from effuse.router.validation import Asked, encode_prompt, fit, validate
from effuse.telemetry import logs
from effuse.v1 import generation_pb2 as pb
from effuse.v1.model_pb2 import TokenizeRequest

LOG: Final = logging.getLogger(__name__)

_COSTS: Final = (
    "queue_s", "prefill_s", "handoff_s", "first_block_s", "total_s",
    "forward_passes", "preemptions",
)  # fmt: skip

Read = Callable[[], pb.GenerateRequest]


class Serving:
    """Serves the requests of a router, whichever protocol they came by."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._classes = router.config.classes
        most = router.config.max_answers
        self._answers = replace(ANSWERS, high=most, note=", this router's --max-answers")

    def tenant(self) -> Tenant:
        """The owner of the call that is being answered, and its limits."""
        name = CALLER.get()
        if self.router.keys is not None:
            return self.router.keys.tenant(name)
        return Tenant(name) if name else NOBODY

    def resolve(self, message: pb.GenerateRequest, *, is_stream: bool, seed: int = 0) -> Asked:
        """The request of a client's message, every setting resolved, with `seed` if it sets none;
        raises `EffuseError` with all that speaks against it."""
        router, tokenizer = self.router, self.router.tokenizer
        model = router.seats.catalogue.find(message.model if message.HasField("model") else None)
        return validate(
            message,
            model,
            tokenizer.reserved_ids,
            is_stream=is_stream,
            decode_prefills=router.fleet.mode != "remote",
            takes_chats=tokenizer.has_chat_template,
            chat_end_ids=tokenizer.chat_end_ids,
            answers=self._answers,
            seed=seed,
            classes=self._classes,
            goals=router.steering.goals(model.name),
        )

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts an `EffuseError` that is raised before anything is held for a request."""
        try:
            yield
        except EffuseError as error:
            self.router.metrics.count_refusal(self.tenant().name, error)
            raise

    async def accept(
        self, message: pb.GenerateRequest | Read, context: CallContext, *, is_stream: bool
    ) -> Request:
        """Makes the request of a client's message; raises `EffuseError` with all that speaks
        against it. Waits in the queue until a worker has announced a model."""
        with self.counting_refusals():
            message = message() if callable(message) else message
            return await self._accept(message, context, is_stream)

    async def _accept(
        self, message: pb.GenerateRequest, context: CallContext, is_stream: bool
    ) -> Request:
        router, loop = self.router, asyncio.get_running_loop()
        arrived, began, admission = router.now(), loop.time(), router.admission
        request_id = _request_id(message)
        context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
        time_left = context.time_remaining()
        limit_s = min(math.inf if time_left is None else time_left, router.config.max_request_s)
        tenant = self.tenant()
        router.quotas.check(tenant)
        if router.seats.catalogue.is_empty:
            await self._wait_for_models(EarlyRequest(id=request_id, tenant=tenant, limit_s=limit_s))
        if not admission.knows_seats:
            router.seats.count(router.fleet.candidates())
        admission.check(SlotNeed(model=message.model or admission.only_model, tenant=tenant.name))
        is_again = any(key == REPEATED_KEY for key, _ in context.invocation_metadata() or ())
        asked_digest = digest_of_asked(message, tenant) if message.HasField("request_id") else ""
        router.requests.check_id(request_id)
        asked = self.resolve(message, is_stream=is_stream, seed=secrets.randbits(64))
        router.quotas.check(tenant, asked.num_answers)
        admission.check(SlotNeed.of(asked, tenant.name, arrived, began + limit_s - loop.time()))
        router.budget.add_requests(asked.num_answers, router.now())
        text = AnswerText(router.tokenizer, message.stopping.stop, message.stopping.min_tokens)
        return Request(
            id=request_id,
            asked=asked,
            arrived=arrived,
            limit_s=limit_s,
            deadline=began + limit_s,
            answer=AnswerState(text=text),
            tenant=tenant,
            asked_digest=asked_digest,
            is_repeated=bool(asked_digest) and is_again,
        )

    async def _wait_for_models(self, request: EarlyRequest) -> None:
        """Returns once a worker has announced a model. Raises `Overloaded` if the queue is full,
        `Unavailable` after `recovery_s`, and the errors that end any request that waits."""
        router, recovery_s = self.router, self.router.config.recovery_s
        ends = router.now() + recovery_s
        try:
            quota = router.quotas.running(request.tenant)
            with router.admission.early(), quota, router.requests.running(request) as running:
                async with asyncio.timeout(request.limit_s) as limit:
                    running.limit_by(limit)
                    while router.seats.catalogue.is_empty:
                        if (left_s := ends - router.now()) <= 0:
                            text = f"no worker could begin within {recovery_s:.3g} s"
                            why = f"{text}: no worker has announced a model"
                            raise Unavailable(why, retry_after_s=RETRY_AFTER_S)
                        await router.fleet.wait_for_change(left_s)
        except TimeoutError as error:
            raise time_is_over(request, is_cut_off=router.requests.is_cut_off) from error

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
        resolved, tokenizer = self.resolve(message, is_stream=False), self.router.tokenizer
        ids = await tokenizer.turns.run(lambda: encode_prompt(resolved, tokenizer))
        return ids, resolved.model

    async def answer(self, read: Read, context: CallContext) -> pb.GenerateResponse:
        """The whole answer, or all answers, to the message that `read` returns; raises
        `EffuseError`."""
        with self.span(context):
            accepted = await self.accept(read, context, is_stream=False)
            del read
            return await self.answer_accepted(accepted)

    async def answer_accepted(self, request: Request) -> pb.GenerateResponse:
        answer = WholeAnswer()
        answer.take(await self.serve(request, answer.send))
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
            accepted = await self.accept(read, context, is_stream=is_stream)
            del read  # it holds the client's message
            stream = AnswerStream(context)
            if translator_of is not None:
                stream.translate = translator_of(accepted)
            try:
                await stream.send(await self.serve(accepted, stream.send))
            except EffuseError:
                await stream.settle()
                raise
            except ClientGone as error:  # between the answer and its last event
                await stream.settle()
                raise Cancelled("the client cancelled") from error

    def serve(self, request: Request, send: Send) -> Awaitable[pb.GenerateStreamResponse]:
        """Sends the client all events of the answer, or answers, except the last one, which is
        returned; raises `EffuseError`. In every case the request ends here and is counted."""
        return _Handler(self.router, request, send).serve()


def _request_id(message: pb.GenerateRequest) -> str:
    """The client's id, or a new one if it sent none or one that `validate` refuses."""
    if message.request_id and REQUEST_ID.fullmatch(message.request_id):
        return message.request_id
    return f"req-{secrets.token_hex(12)}"


def digest_of_asked(message: pb.GenerateRequest, tenant: Tenant) -> str:
    """A digest of a request as it was sent: the same only if its own tenant sends it again."""
    owner = tenant.name.encode() + b"\0"
    return hashlib.sha256(owner + message.SerializeToString(deterministic=True)).hexdigest()


class _Handler:
    """Serves one accepted request, once."""

    def __init__(self, router: Router, request: Request, send: Send) -> None:
        self._router = router
        self._request = request
        self._shared = SharedRequest(router.requests.sharing, request, send)

    async def serve(self) -> pb.GenerateStreamResponse:
        """Counts the end, whichever it is, and the tokens of its share of the quota; maps a bad one
        to the error for the client."""
        router, request = self._router, self._request
        quota = router.quotas.running(request.tenant, request.asked.num_answers)
        with router.requests.running(request) as running, quota as share:
            try:
                async with asyncio.timeout_at(request.deadline) as limit:
                    running.limit_by(limit)
                    share.check()
                    if (kept := await self._shared.claim()) is not None:
                        return await self._repeat(kept)
                    left_s = request.deadline - asyncio.get_running_loop().time()
                    need = SlotNeed.of(request.asked, request.tenant.name, request.arrived, left_s)
                    async with HeldSlots(router.admission, need) as slots:
                        await self._encode_prompt()
                        last = await self._answers(slots, share).run()
                        self._note_good_end(last)
                        return last
            except TimeoutError as error:
                is_cut_off = router.requests.is_cut_off
                raise self._end_badly(time_is_over(request, is_cut_off=is_cut_off)) from error
            except EffuseError as error:
                raise self._end_badly(error) from error.__cause__
            except (ClientGone, asyncio.CancelledError) as error:
                elapsed_s = router.now() - request.arrived
                gone = self._end_badly(why_gone(elapsed_s, request.limit_s))
                if isinstance(error, ClientGone):
                    raise gone from error
                raise
            finally:
                if not request.answer.is_ended:  # an exception of ours is on its way to the border
                    self._record_end(Event.FAILED, "INTERNAL")
                self._shared.end(None)
                share.num_tokens = len(request.prompt.token_ids) + request.num_written

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
        request, router, asked = self._request, self._router, self._request.asked
        request.costs.queue_s = router.now() - request.arrived
        router.traces.record("queue", request.costs.queue_s)
        token_ids = await encode_prompt(asked, router.tokenizer)
        is_causal = asked.model.prompt_attention == "causal_blocks"
        prefix_keys = (keys_of if is_causal else key_of_whole)(token_ids, request.tenant.name)
        rooms = router.fleet.rooms(asked.model.name, asked.settings.is_canvas)
        most_tokens = fit(len(token_ids), asked, rooms)
        sizes = sizes_of(len(token_ids), most_tokens, asked.model, asked.settings)
        request.prompt = EncodedPrompt(array("I", token_ids), most_tokens, prefix_keys, sizes)
        request.asked = asked.without_prompt(SHOWN if router.config.show_requests else 0)
        router.steering.of(asked.model.name).load.note_prompt(len(token_ids), router.now())
        if asked.sent.output.echo:
            await self._shared.send(echo_of(request, await router.tokenizer.text_of(token_ids)))

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
        request, cost = self._request, Stats.of(stats)
        self._router.metrics.count_end(request, status, cost)
        if status == "OK" and request.kept_prompt_tokens is None:
            load = self._router.steering.of(request.asked.model.name).load
            load.note_answer(request.num_written, self._router.now())
        figures = {
            "request_id": request.id,
            "status": status,
            "model": request.asked.model.name,
            "prompt_tokens": len(request.prompt.token_ids),
            "answers": request.asked.num_answers,
            "tokens": request.num_tokens,
            **{name: getattr(cost, name) for name in _COSTS},
            "prefill_worker": request.attempts.prefill_worker,
            "decode_worker": request.attempts.decode_worker,
            "attempts": request.attempts.count,
        }
        if status != "OK":
            figures["story"] = request.answer.history()
        LOG.info("a request ended", extra=logs.figures(figures))
