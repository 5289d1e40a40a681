"""Serves one request, top to bottom: checked, let in, placed, attempted until it ends, and ended.

What fails goes down a ladder: another prefill worker; the decode worker for itself; another pair
that resumes; waiting for a worker that may come back; UNAVAILABLE. Never a good end with missing
text. Whatever happens, the request's end is decided and counted here, in one place. Not here: one
attempt (`attempt.py`), choosing workers (`policy.py`), what a failure means (`ladder.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from typing import Final, TypeVar

import grpc.aio

from effuse.protos.errors import (
    REQUEST_ID_KEY,
    Bug,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EffuseError,
    EndedById,
    InvalidRequest,
    Unavailable,
)
from effuse.router.admission import place_of
from effuse.router.attempt import Attempt, Unfinished
from effuse.router.client import ClientGone, Recipient, events_of, finished_of
from effuse.router.detokenizer import AnswerText
from effuse.router.findings import Findings, check_request_id
from effuse.router.fleet import DecodeDemand
from effuse.router.ladder import REFUSALS, Failure, FailureKind
from effuse.router.policy import AttemptNeeds, Placement, Prospect
from effuse.router.prompt import encode_prompt
from effuse.router.request import Event, Request
from effuse.router.router import Router
from effuse.router.shared_request import SharedRequest, digest_of_asked
from effuse.router.validation import fit
from effuse.v1 import generation_pb2 as pb

Sent = TypeVar("Sent")
Response = TypeVar("Response")

LOG: Final = logging.getLogger(__name__)
OUR_FIELDS: Final = frozenset(
    {"attempt", "incarnation", "prefill", "remote", "reservation", "resume"}
    | {"sampling", "settings", "start"}
)
"""Fields of calls to workers that no client fills in, or that are checked before a worker is asked.
A worker that does not take them is at odds with this router, and not with the client."""

LOOK_S: Final = 1.0
"""Longest that a waiting request does without a look at the fleet."""

RETRY_AFTER_S: Final = 1.0
"""What clients are told to wait when no worker is there: about as long as a lease takes to show."""

REPEATED_KEY: Final = "grpc-previous-rpc-attempts"
"""Metadata of a call that gRPC's own retries send again; who does so himself can set it, too."""

ON_THE_WAY_S: Final = 0.02
"""What a cancellation may take from a client's deadline to here, and still be told from others."""


def accept(
    router: Router,
    message: pb.GenerateRequest,
    context: grpc.aio.ServicerContext[Sent, Response],
    *,
    is_stream: bool,
) -> Request:
    """The request that a client means; raises `EffuseError` with all that can be said against it
    before anything is held for it."""
    try:
        request_id = _request_id(message)
        context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
        if not router.admission.knows_seats:
            router.count_seats()
        tenant = router.tenant()
        router.quotas.check(tenant)
        router.admission.check(tenant=tenant.name)
        asked_digest = digest_of_asked(message, tenant) if message.HasField("request_id") else ""
        router.requests.check_id(request_id)
        asked = router.resolve(message, is_stream=is_stream).seeded(secrets.randbits(64))
        time_left: float | None = context.time_remaining()
        limit_s = min(math.inf if time_left is None else time_left, router.config.max_request_s)
        at = place_of(router.now(), asked.priority)
        router.admission.check(at, tenant.name, left_s=limit_s, size=asked.most_tokens)
    except EffuseError as error:
        router.metrics.count_refusal(router.tenant().name, error.code.name)
        raise
    router.retry_budget.add_request(router.now())
    return Request(
        id=request_id,
        asked=asked,
        text=AnswerText(router.tokenizer, asked.stops, asked.min_tokens),
        arrived=router.now(),
        limit_s=limit_s,
        deadline=asyncio.get_running_loop().time() + limit_s,
        tenant=tenant,
        asked_digest=asked_digest,
        is_repeated=any(key == REPEATED_KEY for key, _ in context.invocation_metadata() or ()),
    )


class Handler:
    """Serves one accepted request, once."""

    def __init__(self, router: Router, request: Request, client: Recipient) -> None:
        self._router = router
        self._request = request
        self._shared = SharedRequest(router, request, client)

    async def serve(self) -> pb.Finished:
        """Tells the client the answer and returns what is said at its end; raises `EffuseError`.
        Whatever happens, the request ends here and is counted."""
        router, request = self._router, self._request
        quota = router.quotas.running(request.tenant)
        with router.requests.running(request), quota as spend:
            try:
                async with asyncio.timeout_at(request.deadline) as limit:
                    with router.requests.limited_by(request, limit):
                        return await self._answer()
            except TimeoutError as error:
                raise self._end_badly(self._time_is_over()) from error
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
                spend(len(request.prompt_token_ids) + len(request.token_ids))

    async def _answer(self) -> pb.Finished:
        if (kept := await self._shared.claim()) is not None:
            return await self._repeat(kept)
        request = self._request
        place = place_of(request.arrived, request.asked.priority)
        left_s = request.deadline - asyncio.get_running_loop().time()
        size, tenant = request.asked.most_tokens, request.tenant.name
        async with self._router.admission.slot(place, tenant, left_s=left_s, size=size):
            await self._encode_prompt()
            reason = await self._run_attempts()
            finished = self._finish(reason)
            self._shared.end(finished)
            return finished

    async def _repeat(self, kept: pb.GenerateResponse) -> pb.Finished:
        """Tells the client an answer that is kept from before."""
        router, request = self._router, self._request
        for event in events_of(kept):
            await self._shared.send(event)
        request.apply_event(Event.FINISHED, router.now(), "kept from before")
        request.status, request.was_kept = "OK", True
        router.note_end(request, "OK", kept.stats)
        return finished_of(kept)

    async def _encode_prompt(self) -> None:
        request = self._request
        asked = request.asked
        request.queue_s = self._router.now() - request.arrived
        self._router.traces.record("queue", request.queue_s)
        token_ids = await encode_prompt(asked, self._router.tokenizer)
        request.prompt_token_ids = token_ids
        request.max_tokens = fit(len(token_ids), asked)
        if asked.wants_echo:
            text = await self._router.tokenizer.text_of(token_ids)
            await self._shared.send(request.echo(text))

    async def _run_attempts(self) -> pb.FinishReason:
        """Attempts, one after the other; raises `EffuseError` or `ClientGone`."""
        request, router = self._request, self._router
        while True:
            try:
                reason = await self._run_attempt()
            except Unfinished as unfinished:
                await self._prepare_retry(unfinished.failure)
            else:
                request.apply_event(Event.FINISHED, router.now())
                router.clear_poison(request)
                return reason

    async def _run_attempt(self) -> pb.FinishReason:
        """One attempt; raises `EffuseError`, `ClientGone` or `Unfinished`."""
        request, fleet = self._request, self._router.fleet
        num_prompt, num_tokens = len(request.prompt_token_ids), request.max_tokens
        try:
            placement = await self._choose_workers()
            counted = fleet.counted(placement, num_prompt, num_tokens)
            with counted as share, self._router.traces.span("attempt"):
                return await self._begin_attempt(placement, share).run()
        finally:
            if fleet.num_alone:
                fleet.release_workers(request.holder)

    # Before an attempt.

    async def _choose_workers(self) -> Placement:
        """Waits as long as a worker may yet take the request; raises `Unavailable` and, where
        engines turn out to die of it, `Poisonous`."""
        request, router = self._request, self._router
        fleet = router.fleet
        while True:
            router.check_poison(request)
            need = self._need()
            request.alone = need.alone
            if need.alone:
                fleet.keep_workers(request.holder, need)
            placement = fleet.place(need)
            if placement is not None:
                await self._wait_until_empty(placement)
                return placement
            prospect = fleet.prospect(need)
            if prospect is Prospect.NONE:
                raise self._nobody(request.asked.model.name)
            if prospect is Prospect.WORKER:
                request.setbacks.begin_stall(router.now())
                self._check_stall()
            with router.metrics.waiting("alone" if need.alone else prospect.value):
                await fleet.wait_for_change(self._look_again_s())

    async def _wait_until_empty(self, placement: Placement) -> None:
        """Those of its workers that it has alone."""
        workers, alone = (placement.decode, placement.prefill), self._request.alone
        if own := [one for one in workers if one is not None and one.role in alone]:
            with self._router.metrics.waiting("alone"):
                await self._router.fleet.until_empty(own)

    def _need(self) -> AttemptNeeds:
        """An answer that has begun goes on only where the same weights follow the same rules."""
        request = self._request
        alone = self._router.roles_alone(request)
        return self._router.fleet.need(
            request.asked.model.name,
            request.setbacks.avoided(self._router.now()),
            request.fingerprint if request.token_ids else None,
            holder=request.holder if alone else None,
            alone=alone,
            on_decode_only=request.asked.settings.is_canvas,
        )

    def _look_again_s(self) -> float:
        """Seconds until a choice, or what is said of it, may come out otherwise although nothing
        has happened."""
        router, setbacks, now = self._router, self._request.setbacks, self._router.now()
        due = [LOOK_S, setbacks.next_change_s(now), router.fleet.standing.next_change_s()]
        if setbacks.stalled_at is not None:
            due.append(router.config.recovery_s - setbacks.stalled_s(now))
        return min(one for one in due if one is not None and one > 0) + 0.001

    def _check_stall(self) -> None:
        """Raises `Unavailable` where no worker has gone on with the request for too long."""
        stalled_s = self._request.setbacks.stalled_s(self._router.now())
        if stalled_s > self._router.config.recovery_s:
            raise self._unavailable(f"no worker could go on within {stalled_s:.3g} s")

    def _nobody(self, model: str) -> Unavailable:
        """What is told where no worker can take the request, nor may one come back."""
        request, fleet = self._request, self._router.fleet
        why = f"no live worker serves {model!r} now"
        if request.last_error is not None:
            why = f"{request.last_error.message}; no other worker can go on"
        elif fleet.mode == "remote":
            refused = fleet.why_refused(model)
            why = refused or f"{why}, or no prefill worker fits a decode worker"
        return self._unavailable(why)

    def _begin_attempt(self, placement: Placement, share: DecodeDemand) -> Attempt:
        request = self._request
        prefill = placement.prefill.worker_id if placement.prefill else ""
        request.begin_attempt(prefill, placement.decode.worker_id, self._router.now())
        attempt = Attempt(self._router, request, placement, self._shared, share)
        self._shared.begin_attempt(placement, attempt.transfer_id)
        return attempt

    # After an attempt.

    async def _prepare_retry(self, failure: Failure) -> None:
        """Makes room for another attempt, when the budget has one; raises what the client is
        told."""
        request, router, error = self._request, self._router, failure.error
        request.end_attempt(error)
        LOG.warning(
            "request %s, attempt %d on %s: %s; so far: %s",
            *(request.id, request.num_attempts, failure.worker.worker_id, error.message),
            request.tell_story(),
        )
        router.fleet.standing.note(failure)
        router.metrics.count_failure(failure)
        self._raise_if_final(failure)
        request.apply_event(Event.LOST, router.now(), error.message[:80])
        request.setbacks.add(failure, router.now())
        router.note_death(request, failure)
        # Next time its pages come first.
        request.is_patient = request.is_patient or failure.outcome is FailureKind.LATE
        if request.setbacks.losses_in_a_row > router.config.max_losses:
            text = f"{request.setbacks.losses_in_a_row} workers were lost under it in a row"
            raise self._unavailable(text, retryable=False) from error
        if failure.outcome not in REFUSALS:
            router.num_retries += 1
            if delay_s := router.retry_budget.take(router.now()):
                with router.metrics.waiting("budget"):
                    await asyncio.sleep(delay_s)

    def _raise_if_final(self, failure: Failure) -> None:
        """Raises what the client is told where no other attempt can do better."""
        error = failure.error
        if asyncio.get_running_loop().time() >= self._request.deadline:
            raise self._time_is_over() from error
        if isinstance(error, InvalidRequest) and self._request.token_ids:
            # The caller's request was good; it is our resumption that the worker does not take.
            text = f"the answer could not be resumed: {error.message}"
            raise self._unavailable(text) from error
        if isinstance(error, InvalidRequest) and _is_ours(error):
            raise Bug(
                f"{failure.worker.worker_id} does not take what it is sent: {error.message}"
            ) from error
        if failure.outcome is FailureKind.FINAL:
            raise error

    # The end.

    def _finish(self, reason: pb.FinishReason) -> pb.Finished:
        request = self._request
        finished = request.finished(reason, self._router.now())
        request.status = "OK"
        # Told once the answer is on its way.
        loop = asyncio.get_running_loop()
        loop.call_soon(self._router.note_end, request, "OK", finished.stats)
        return finished

    def _unavailable(self, why: str, *, retryable: bool = True) -> Unavailable:
        """UNAVAILABLE, with how far the request got and what it met with."""
        request = self._request
        return Unavailable(
            _sentences(why, request.tell_progress()),
            retryable=retryable,
            retry_after_s=RETRY_AFTER_S if retryable else None,
            labels=request.labels(),
        )

    def _time_is_over(self) -> EffuseError:
        """The request's own time, or that of this router."""
        request = self._request
        if request.is_ended_by_id:
            return EndedById("somebody has ended this request by its id", labels=request.labels())
        if self._router.requests.is_cut_off:
            why = "this router has ended, and the answer was not; ask again"
            text = _sentences(why, request.tell_progress())
            return Draining(text, retry_after_s=RETRY_AFTER_S, labels=request.labels())
        why = f"not answered within {request.limit_s:.3g} s; it was {request.state.value}"
        return DeadlineExceeded(_sentences(why, request.tell_progress()), labels=request.labels())

    def _end_badly(self, error: EffuseError) -> EffuseError:
        """A bad end that is told."""
        by_caller = isinstance(error, Cancelled | DeadlineExceeded | EndedById)
        self._record_end(Event.CANCELLED if by_caller else Event.FAILED, error.code.name)
        return error

    def _record_end(self, event: Event, status: str) -> None:
        request, now = self._request, self._router.now()
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


def _request_id(message: pb.GenerateRequest) -> str:
    if not message.HasField("request_id"):
        return f"req-{secrets.token_hex(12)}"
    findings = Findings()
    check_request_id(message.request_id, findings)
    findings.raise_any()
    return message.request_id


def _sentences(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


def _is_ours(error: InvalidRequest) -> bool:
    """Whether the router is at fault for what a worker refuses."""
    return any(v.field.split(".")[0] in OUR_FIELDS for v in error.violations)
