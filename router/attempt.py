"""One attempt at a request: opens its calls, the prompt first, and passes events on until one ends
it.

Prefill computes from the first moment. Decode answers with its reservation, which is passed on;
only prefill's push waits for it. A patient attempt begins to prefill once pages are held. A worker
that breaks the tables of `request_states.py` counts as lost. Every attempt ends its calls here or
leaves them to `calls.py`. Not here: the reaction to a failed attempt (`answer.py`)."""

import asyncio
import math
import secrets
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

from effuse.placement.records import WorkerRecord
from effuse.protos.channels import filled
from effuse.protos.errors import EffuseError, PeerLost, Refused, Unreserved
from effuse.router.calls import DecodeCall, PrefillCall, read_message
from effuse.router.client import ClientGone, Listener, commit_of, draft_of, progress_of
from effuse.router.failures import Failure, FailureKind, judge
from effuse.router.fleet import AttemptShare
from effuse.router.measures import num_left_out
from effuse.router.policy import Placement
from effuse.router.request import BrokenStream, Request
from effuse.router.request_states import Event, IllegalRequestEvent, State
from effuse.router.router import Router
from effuse.v1 import generation_pb2, worker_pb2
from effuse.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason

REPORT_S: Final = 1.0
"""How long a decode worker that receives no pages may take to report its own loss. Its writer often
learns of that first, on busy cores by 0.4 s."""
POOL_S: Final = 5.0
"""How long a request takes only links after the pool has not taken its prompt. Each try computes
the prompt again."""


class Attempt:
    """Run once. The request has begun its attempt on `placement` already."""

    def __init__(
        self,
        router: Router,
        request: Request,
        placement: Placement,
        listener: Listener,
        share: AttemptShare,
    ) -> None:
        self._router = router
        self._request = request
        self._placement = placement
        self._listener = listener
        self._share = share
        self.transfer_id = secrets.token_hex(16)
        self._number = request.attempts.number
        self._peer = f"decode worker {placement.decode.worker_id}"
        self._writer = placement.prefill  # if it hands over the prompt's KV itself
        self._prefill: PrefillCall | None = None
        self._decode: DecodeCall | None = None
        self._reason: FinishReason | None = None  # once the last event that counts has come
        self._moved_on_at = 0.0  # when the prompt's KV was complete, or the last commit came
        self._is_broken_off = False  # by us, since prefill failed
        self._breaking_off: asyncio.TimerHandle | None = None

    def _id(self) -> worker_pb2.AttemptId:
        """A new message each time: held ones would cost as much as the rest of an attempt."""
        return worker_pb2.AttemptId(
            request_id=self._request.id, attempt=self._number, transfer_id=self.transfer_id
        )

    async def run(self) -> FinishReason | Failure:
        """Passes events on to the end and returns why it ended, or how it failed; raises
        `ClientGone`."""
        try:
            # Both prove that they belong to the fleet before they get any message, because any
            # process may have an address from Redis.
            for worker in filter(None, (self._placement.prefill, self._placement.decode)):
                try:
                    await self._router.fleet.peers.at(worker.address).channel.prove()
                except PeerLost as error:
                    return self._judge(error, worker)
            return await self._relay()
        except (BrokenStream, IllegalRequestEvent, EffuseError) as error:
            self._end_calls_now()
            return self._failure(error)
        except BaseException:
            self._end_calls_now()
            raise
        finally:
            if self._breaking_off is not None:
                self._breaking_off.cancel()

    async def _relay(self) -> FinishReason:
        prefill, request = self._placement.prefill, self._request
        if prefill is not None and self._placement.by_pool:
            request.attempts.in_pool = await self._send_to_pool(prefill)
            if request.attempts.in_pool:
                prefill = self._writer = None
        elif prefill is not None and not request.attempts.is_patient:
            # Decode has time until the prompt is computed; the prompt has none to lose.
            await self._send_prompt(prefill)
        decode = self._decode = self._open_decode()
        try:
            while self._reason is None:
                await self._pass_on(await read_message(decode, self._peer), prefill)
        except EffuseError as error:
            if (last := self._end_if_complete(error)) is not None:
                await self._listener.send(last)
            self._end_calls()
        assert self._reason is not None, "sent completely"
        if request.answer.text.is_stopped:  # its workers know nothing of that
            self._end_calls_now()
        else:
            self._router.cleanup.settle_calls([decode, *self._readers()], self._cut_off)
        return self._reason

    async def _pass_on(self, response: Any, prefill: WorkerRecord | None) -> None:
        """Passes on a message of decode. By itself, so that nothing holds the last message while
        the next one is not there."""
        if not isinstance(response, worker_pb2.DecodeResponse):
            raise PeerLost(f"{self._peer} ended its call before the answer ended")
        for news in self._take(response):
            await self._listener.send(news)
        if self._reason is None and prefill and response.HasField("reservation"):
            await self._send_reservation(prefill, response.reservation)

    async def _send_progress(self, computed_tokens: int) -> None:
        if self._request.answer.token_ids:  # a slow client has it before
            return
        with suppress(ClientGone):  # the next event finds that out, too
            await self._listener.send(progress_of(self._request, computed_tokens))

    # Opening.

    @property
    def _shows_progress(self) -> bool:
        """Whether the client wants to know how much of the prompt is computed."""
        request = self._request
        return request.asked.sent.output.prompt_progress and not (
            request.index or request.answer.token_ids
        )

    async def _send_prompt(self, prefill: WorkerRecord) -> PrefillCall:
        call = self._open_prefill(prefill)
        on_progress = self._send_progress if self._shows_progress else None
        by_pool = self._placement.by_pool
        await call.send_prompt(self._id(), self._break_off, on_progress, to_pool=by_pool)
        return call

    async def _send_to_pool(self, prefill: WorkerRecord) -> bool:
        """Returns once the prompt is computed: whether the pool has it. Otherwise its pages wait
        for a reservation, if a link may take them."""
        call, attempts = await self._send_prompt(prefill), self._request.attempts
        try:
            if await call.is_in_pool():
                return True
            attempts.pool_from = self._router.now() + POOL_S
            # Not the record that attempts hold, which is without links.
            found = (one for one in self._router.fleet.records() if one.life == prefill.life)
            if not next(found, prefill).may_push_to(self._placement.decode):
                call.failure = Unreserved("the pool did not take the prompt, and no link may")
                raise call.failure
            return False
        except EffuseError:
            self._is_broken_off = True
            raise

    def _open_prefill(self, worker: WorkerRecord) -> PrefillCall:
        stub = self._router.fleet.peers.at(worker.address).prefill
        self._prefill = PrefillCall(
            stub.Prefill(timeout=_time_left(self._request), metadata=self._router.traces.carrier()),
            worker,
            self._request,
            ask=self._router.fleet.peers.condition_of,
            now=self._router.now,
        )
        return self._prefill

    def _open_decode(self) -> DecodeCall:
        request, placement = self._request, self._placement
        sampling = request.asked.sampling
        message = worker_pb2.DecodeRequest(
            attempt=self._id(),
            incarnation=placement.decode.incarnation,
            prompt_token_ids=request.prompt.token_ids,
            max_tokens=request.prompt.max_tokens,
            min_tokens=request.asked.sent.stopping.min_tokens,
            stop_token_ids=request.asked.stop_token_ids,
            sampling=filled(
                worker_pb2.DecodeSampling, sampling, logit_bias=dict(sampling.logit_bias)
            ),
            settings=filled(worker_pb2.DecodeSettings, request.asked.settings),
            drafts=request.asked.sent.output.drafts or self._router.monitor.num_watchers > 0,
            progress=self._shows_progress,
            num_logprobs=request.asked.num_logprobs,
            resume=request.answer.resumption(),
            group=request.attempts.group,
            cache_salt=request.tenant.name,
            gap_s=None if math.isinf(request.asked.goals.gap_s) else request.asked.goals.gap_s,
        )
        if self._writer is None:
            message.local.in_pool = request.attempts.in_pool
            message.local.SetInParent()
        else:
            message.remote.CopyFrom(filled(worker_pb2.WorkerRef, self._writer))
        decode = self._router.fleet.peers.at(placement.decode.address).decode
        metadata = self._router.traces.carrier()
        # As bytes, because the call holds what it sends, and a message is ten times as large.
        data = message.SerializeToString()
        return decode(data, timeout=_time_left(self._request), metadata=metadata)

    # Relaying.

    def _take(
        self, response: worker_pb2.DecodeResponse
    ) -> Iterator[generation_pb2.GenerateStreamResponse]:
        """The client's events of a message from decode, up to the last one that counts."""
        for event in (response, *response.then):
            if (news := self._take_event(event)) is not None:
                yield news
            if event.HasField("finished") or self._request.answer.text.is_stopped:
                self._reason = _finish_reason(self._request, is_stopped=event.finished.stopped)
                return

    async def _send_reservation(
        self, prefill: WorkerRecord, reservation: worker_pb2.Reservation
    ) -> None:
        """Sends prefill where the pages go, after the prompt if that has waited for them."""
        call = self._prefill  # not held in the loop of `_relay`, which outlives it
        if call is None:
            call = await self._send_prompt(prefill)
        await call.send_reservation(reservation)

    def _end_if_complete(self, error: EffuseError) -> generation_pb2.GenerateStreamResponse | None:
        """The end of an answer whose worker is lost between the last token and its last event:
        nothing is left to resume. Returns the rest of the text; raises the error for other answers.
        """
        if not self._request.is_complete:
            raise error
        failure = self._failure(error)
        self._router.fleet.standing.note(failure)
        self._router.metrics.count_failure(failure)
        answer = self._request.answer
        last = commit_of(self._request, answer.flush())  # in which a stop string may be found yet
        self._reason = _finish_reason(self._request, is_stopped=answer.end_token_id is not None)
        return last

    def _take_event(
        self, event: worker_pb2.DecodeResponse
    ) -> generation_pb2.GenerateStreamResponse | None:
        request, now = self._request, self._router.now()
        match event.WhichOneof("event"):
            case "reservation":
                decode = self._placement.decode
                request.answer.apply_event(Event.RESERVED, now)
                held = event.reservation
                if held.incarnation != decode.incarnation or held.attempt != self._id():
                    raise Refused(f"{decode.worker_id} answered for another incarnation or attempt")
                if self._placement.prefill is not None:
                    request.costs.connector = held.connector if self._writer else "pool"
                if not request.index:
                    self._listener.note_reserved(self._placement)
            case "verified":
                request.add_verified(event.verified, now)
                self._share.end_prompt()
                self._measure_prompt(event.verified, now)
                if (writer := self._writer) is not None:
                    pair = (writer.life, self._placement.decode.life)
                    self._router.fleet.standing.note_handoff(pair)
            case "commit":
                if self._prefill is not None and self._prefill.has_ended_well:
                    self._prefill = None  # its call is freed, because an answer may take long
                request.answer.fingerprint = self._placement.decode.fingerprint
                before = len(request.answer.token_ids)
                news = request.add_commit(event.commit, now)
                self._measure_commit(before, event.commit, now)
                self._router.monitor.note_commit(request, before)
                self._router.poison.note_survival(request)
                return commit_of(request, news)
            case "draft":
                self._router.monitor.note_draft(request, event.draft)
                if request.asked.sent.output.drafts:
                    return draft_of(request, event.draft, self._router.tokenizer)
            case "progress":
                return progress_of(request, event.progress.computed_tokens)
            case "finished":
                return commit_of(request, request.add_finished(event.finished))
        return None

    def _measure_prompt(self, verified: worker_pb2.PrefillVerified, now: float) -> None:
        request, placement = self._request, self._placement
        self._moved_on_at = now
        measured = self._router.steering.of(request.asked.model.name).measured
        costs, tokens = request.costs, len(request.prompt.token_ids)
        left_out = partial(num_left_out, request.asked.model, tokens)
        check = partial(self._router.fleet.prompts.check, costs.known)
        if placement.prefill is None:
            if verified.compute_s and not (placement.shares_prompt or request.answer.token_ids):
                cached, compute_s = verified.cached_tokens, verified.compute_s
                measured.note_prompt(None, tokens, left_out(cached), compute_s, now)
                check(placement.decode.life, cached)
        elif costs.compute_s:
            life, end, rest = placement.prefill.life, costs.prefilled, left_out(costs.cached_tokens)
            measured.note_prompt(life, tokens, rest, costs.compute_s, end)
            if self._writer is not None:
                measured.note_handoff(tokens, verified.bytes)
            check(life, costs.cached_tokens)

    def _measure_commit(self, before: int, commit: worker_pb2.DecodeCommit, now: float) -> None:
        """before: tokens of the answer before the commit that came now. Time for prompts does not
        count, because a worker without them would not need it."""
        request, seconds = self._request, now - self._moved_on_at - commit.prompts_s
        self._moved_on_at = now
        tokens = len(request.answer.token_ids) - before
        if tokens and before and seconds > 0 and commit.batch:
            measured = self._router.steering.of(request.asked.model.name).measured
            context = len(request.prompt.token_ids) + before
            measured.note_commit(commit.batch, context, tokens, seconds)

    # Ending.

    def _break_off(self) -> None:
        """Prefill has failed: nothing will come of decode's call but, if the pages did not get
        through, why."""
        failure = self._prefill_failure()
        assert failure is not None
        if failure.outcome is FailureKind.HANDOFF:
            loop = asyncio.get_running_loop()
            self._breaking_off = loop.call_later(REPORT_S, self._cancel_decode)
        else:
            self._cancel_decode()

    def _cancel_decode(self) -> None:
        if self._decode is not None and self._request.answer.state is not State.DECODING:
            self._is_broken_off = self._decode.cancel()

    def _failure(self, error: Exception) -> Failure:
        """The failure to act on. Decode's own comes before prefill's, because it decides the next
        place."""
        if self._is_broken_off and (failure := self._prefill_failure()) is not None:
            return failure
        if not isinstance(error, EffuseError):
            error = PeerLost(f"{self._peer} broke the protocol: {error}")
        return self._judge(error, self._placement.decode)

    def _prefill_failure(self) -> Failure | None:
        prefill = self._prefill
        if prefill is None or prefill.failure is None:
            return None
        return self._judge(prefill.failure, prefill.worker)

    def _judge(self, error: EffuseError, worker: WorkerRecord) -> Failure:
        is_prefilling = self._request.answer.state is State.PREFILLING
        is_handoff = is_prefilling and self._writer is not None
        return judge(error, worker, self._placement, is_handoff=is_handoff)

    def _end_calls_now(self) -> None:
        self._end_calls()
        if readers := self._readers():
            self._router.cleanup.settle_calls(readers, readers[0].cancel)

    def _readers(self) -> list[asyncio.Task[None]]:
        prefill = self._prefill
        return [] if prefill is None or prefill.reader is None else [prefill.reader]

    def _cut_off(self) -> None:
        self._end_calls()
        for reader in self._readers():
            reader.cancel()

    def _end_calls(self) -> None:
        """Nothing here waits: a request that is cancelled ends at once, its workers soon after."""
        reason = f"the request is {self._request.answer.state.value}"
        cleanup, decode, prefill = self._router.cleanup, self._decode, self._prefill
        if decode is not None and (not decode.done() or decode.cancelled()):
            decode.cancel()
            cleanup.send_abort(self._placement.decode, self._id(), reason)
        if prefill is not None and (not prefill.stream.done() or prefill.stream.cancelled()):
            prefill.stream.cancel()
            if not prefill.is_pushed:
                cleanup.send_abort(prefill.worker, self._id(), reason)


def _finish_reason(request: Request, *, is_stopped: bool) -> FinishReason:
    """is_stopped: whether a stop id ended the answer; a stop string may have."""
    is_stopped = is_stopped or request.answer.text.is_stopped
    return FINISH_REASON_STOP if is_stopped else FINISH_REASON_LENGTH


def _time_left(request: Request) -> float:
    return max(0.001, request.deadline - asyncio.get_running_loop().time())
