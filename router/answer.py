"""One answer to a request: attempts, one after the other, until it has ended.

After a failure the next attempt takes another prefill worker, then lets the decode worker prefill,
then resumes on another pair, then waits for a worker that may come back. The last step is
UNAVAILABLE. An answer without part of its text never ends well. Not here: one attempt
(`attempt.py`), the choice of workers (`policy.py`), the meaning of a failure (`failures.py`),
several answers to one request (`answers.py`)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from msgspec.structs import replace

from effuse.placement.records import Role, WorkerRecord
from effuse.protos.errors import (
    Bug,
    DeadlineExceeded,
    Draining,
    EffuseError,
    EndedById,
    EngineLost,
    InvalidRequest,
    Unavailable,
)
from effuse.router.attempt import Attempt, Unfinished
from effuse.router.client import Listener, finished_of, progress_labels, progress_text, state_text
from effuse.router.failures import REFUSALS, Failure, FailureKind
from effuse.router.fleet import EMPTY_S, AttemptShare
from effuse.router.parts import Parts
from effuse.router.policy import AttemptNeeds, Placement, Prospect
from effuse.router.request import AnyRequest, Request
from effuse.router.request_states import Event
from effuse.router.seats import RETRY_AFTER_S
from effuse.v1 import generation_pb2 as pb

LOG: Final = logging.getLogger(__name__)
OUR_FIELDS: Final = frozenset(
    {"attempt", "incarnation", "prefill", "remote", "reservation", "resume"}
    | {"sampling", "settings", "start"}
)
"""Fields of calls to workers that no client fills in, or that are checked before a worker is asked.
A worker that does not take them is at odds with this router, and not with the client."""

LOOK_S: Final = 1.0
"""Longest that a waiting request does without a look at the fleet."""

ALONE_S: Final = 2.0
"""How long a request waits for workers of its own, if its engines may have ended from outside."""

TOGETHER_S: Final = 0.1
"""How long a request whose engine died waits before its next attempt. A host or a driver ends
several engines together, and the next engine might be one whose death is not known yet."""


class AnswerRun:
    """Run once, for a request for one answer or for one of its answers."""

    def __init__(self, parts: Parts, request: Request, told: Listener) -> None:
        self._parts = parts
        self._request = request
        self._told = told

    async def run(self) -> pb.GenerateStreamResponse:
        """Makes attempts, one after the other, and returns the last event, which is still to be
        sent; raises `EffuseError` or `ClientGone`."""
        request, parts = self._request, self._parts
        while True:
            try:
                placement = await self._choose_workers()
                if own := self._own_workers(placement):
                    with parts.metrics.waiting("alone"):
                        await parts.fleet.until_empty(own, min(EMPTY_S, self._alone_left_s()))
                prompt = request.prompt
                counted = parts.fleet.counted(placement, len(prompt.token_ids), prompt.max_tokens)
                with counted as share, parts.traces.span("attempt"):
                    reason = await self._begin_attempt(placement, share).run()
            except Unfinished as unfinished:
                failure = unfinished.failure
            else:
                request.answer.apply_event(Event.FINISHED, parts.now())
                parts.poison.note_answer(request)
                return finished_of(request, reason, parts.now())
            finally:
                if parts.fleet.num_alone:
                    parts.fleet.release_workers(request.holder)
            await self._prepare_retry(failure)

    # Before an attempt.

    async def _choose_workers(self) -> Placement:
        """Waits as long as a worker may yet take the request; raises `Unavailable` and, where
        engines turn out to die of it, `Poisonous`."""
        request, parts = self._request, self._parts
        fleet = parts.fleet
        while True:
            parts.poison.check(request)
            need = self._need()
            request.attempts.alone = need.alone
            if need.alone:
                fleet.keep_workers(request.holder, need)
            elif fleet.num_alone:
                fleet.release_workers(request.holder)
            placement = fleet.place(need)
            if placement is not None:
                return placement
            prospect = fleet.prospect(need)
            if prospect is Prospect.NONE:
                raise self._unavailable(fleet.what_is_missing(need))
            if prospect is Prospect.WORKER:
                request.attempts.setbacks.begin_stall(parts.seats.stalled_since(request))
                self._check_stall(need)
            reason = "alone" if need.alone else prospect.value
            with parts.metrics.waiting(reason), self._lacking(prospect):
                await fleet.wait_for_change(self._look_again_s())

    def _lacking(self, prospect: Prospect) -> AbstractContextManager[None]:
        """Lets other routers leave it a seat, if it waits for one."""
        if prospect is not Prospect.SEAT:
            return nullcontext()
        return self._parts.admission.without_seat(self._request.asked.model.name)

    def _own_workers(self, placement: Placement) -> Sequence[WorkerRecord]:
        """The workers of the placement that run nothing else."""
        workers, alone = (placement.decode, placement.prefill), self._request.attempts.alone
        return [one for one in workers if one is not None and one.role in alone]

    def _roles_alone(self) -> Collection[Role]:
        """In which workers the next attempt runs alone. It does not wait long for them if its
        engines may have ended from outside."""
        request, parts = self._request, self._parts
        alone = parts.poison.roles_alone(request)
        if not alone:
            return ()
        if request.attempts.alone_since is None:
            request.attempts.alone_since = parts.now()
        return () if self._alone_left_s() <= 0 else alone

    def _alone_left_s(self) -> float:
        """Seconds for which it still waits for workers of its own."""
        request, parts = self._request, self._parts
        since = request.attempts.alone_since
        if since is None or not parts.poison.verdicts.may_share(request.digest):
            return math.inf
        return since + ALONE_S - parts.now()

    def _need(self) -> AttemptNeeds:
        """An answer that has begun goes on only where the same weights follow the same rules."""
        request, fleet = self._request, self._parts.fleet
        alone, attempts = self._roles_alone(), request.attempts
        is_first = bool(attempts.group) and not attempts.count
        return replace(
            fleet.need(request.asked.model.name, on_decode_only=request.asked.settings.is_canvas),
            excluded=attempts.setbacks.avoided(self._parts.now()),
            fingerprint=request.answer.fingerprint if request.answer.token_ids else None,
            holder=request.holder if alone else None,
            alone=alone,
            cached=fleet.prompts.cached(request.prompt.prefix_keys),
            beside=attempts.beside if is_first else None,
            num_answers=request.asked.num_answers if is_first and not request.index else 1,
        )

    def _look_again_s(self) -> float:
        """Seconds until the choice, or an error about it, may be another one although nothing
        happens."""
        parts, setbacks, now = self._parts, self._request.attempts.setbacks, self._parts.now()
        due = [
            LOOK_S,
            self._alone_left_s(),
            setbacks.next_change_s(now),
            parts.fleet.standing.next_change_s(),
        ]
        if setbacks.stalled_at is not None:
            due.append(parts.config.recovery_s - setbacks.stalled_s(now))
        return min(one for one in due if one is not None and one > 0) + 0.001

    def _check_stall(self, need: AttemptNeeds) -> None:
        """Raises `Unavailable` if no worker has gone on with the request for too long."""
        stalled_s = self._request.attempts.setbacks.stalled_s(self._parts.now())
        if stalled_s > self._parts.config.recovery_s:
            missing = self._parts.fleet.what_is_missing(need)
            raise self._unavailable(
                f"no worker could continue it within {stalled_s:.3g} s: {missing}"
            )

    def _begin_attempt(self, placement: Placement, share: AttemptShare) -> Attempt:
        request = self._request
        prefill = placement.prefill.worker_id if placement.prefill else ""
        if placement.prefill is not None:
            self._parts.fleet.prompts.note(request.prompt.prefix_keys, placement.prefill.life)
        request.begin_attempt(prefill, placement.decode.worker_id, self._parts.now())
        attempt = Attempt(self._parts, request, placement, self._told, share)
        self._told.begin_attempt(placement, attempt.transfer_id)
        return attempt

    # After an attempt.

    async def _prepare_retry(self, failure: Failure) -> None:
        """Prepares another attempt, once the budget has one; raises the error for the client if
        none can follow."""
        request, parts, error = self._request, self._parts, failure.error
        attempts, setbacks = request.attempts, request.attempts.setbacks
        request.costs.end_attempt()
        attempts.alone_since = None
        LOG.warning(
            "request %s, attempt %d on %s: %s; so far: %s",
            *(request.name, attempts.count, failure.worker.worker_id, error.message),
            request.answer.tell_story(),
        )
        parts.fleet.standing.note(failure)
        parts.metrics.count_failure(failure)
        self._raise_if_final(failure)
        request.answer.apply_event(Event.LOST, parts.now(), error.message[:80])
        setbacks.add(failure, parts.now())
        parts.poison.note_death(request, failure)
        # Next time its pages come first.
        attempts.is_patient = attempts.is_patient or failure.outcome is FailureKind.LATE
        if setbacks.losses_in_a_row > parts.config.max_losses:
            text = f"the request lost {setbacks.losses_in_a_row} workers in a row"
            raise self._unavailable(text, retryable=False) from error
        if isinstance(error, EngineLost):
            await asyncio.sleep(TOGETHER_S)
        if failure.outcome not in REFUSALS and (delay_s := parts.budget.take(parts.now())):
            await self._wait_for_budget(delay_s)

    async def _wait_for_budget(self, delay_s: float) -> None:
        """A request that gives up meanwhile takes nothing. Otherwise all later failures would wait
        behind requests that are gone."""
        with self._parts.metrics.waiting("budget"):
            try:
                await asyncio.sleep(delay_s)
            except asyncio.CancelledError:
                self._parts.budget.give_back()
                raise

    def _raise_if_final(self, failure: Failure) -> None:
        """Raises the error for the client if no other attempt can do better."""
        error = failure.error
        if asyncio.get_running_loop().time() >= self._request.deadline:
            is_cut_off = self._parts.requests.is_cut_off
            raise time_is_over(self._request, is_cut_off=is_cut_off) from error
        if isinstance(error, InvalidRequest) and self._request.answer.token_ids:
            # The caller's request was good; it is our resumption that the worker does not take.
            text = f"the answer could not be resumed: {error.message}"
            raise self._unavailable(text) from error
        if isinstance(error, InvalidRequest) and _is_ours(error):
            raise Bug(
                f"{failure.worker.worker_id} refuses the router's message: {error.message}"
            ) from error
        if failure.outcome is FailureKind.FINAL:
            raise error

    def _unavailable(self, why: str, *, retryable: bool = True) -> Unavailable:
        """UNAVAILABLE, with the request's progress and setbacks."""
        request = self._request
        return Unavailable(
            _sentences(why, progress_text(request)),
            retryable=retryable,
            retry_after_s=RETRY_AFTER_S if retryable else None,
            labels=progress_labels(request),
        )


def time_is_over(request: AnyRequest, *, is_cut_off: bool) -> EffuseError:
    """The error of a request whose own time has run out, or that of its router (`is_cut_off`)."""
    if request.is_ended_by_id:
        return EndedById("the request was cancelled by its id", labels=progress_labels(request))
    if is_cut_off:
        why = "this router ended before the answer was complete; send the request again"
        text = _sentences(why, progress_text(request))
        return Draining(text, retry_after_s=RETRY_AFTER_S, labels=progress_labels(request))
    why = f"not answered within {request.limit_s:.3g} s; the request was {state_text(request)}"
    return DeadlineExceeded(
        _sentences(why, progress_text(request)), labels=progress_labels(request)
    )


def _sentences(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


def _is_ours(error: InvalidRequest) -> bool:
    """Whether the router caused the refusal of a worker."""
    return any(v.field.split(".")[0] in OUR_FIELDS for v in error.violations)
