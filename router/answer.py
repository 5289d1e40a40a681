"""One answer to a request: attempts, one after the other, until it has ended. Several answers run
side by side, each by itself, their events in one stream.

After a failure the next attempt takes another prefill worker, then lets the decode worker prefill,
then resumes on another pair, then waits for a worker that may come back. The last step is
UNAVAILABLE. An answer without part of its text never succeeds. Of several answers the first one
brings the prompt's KV to a decode worker, and the others join it as soon as that worker holds pages
for it. If one of them fails for good, or the client goes, all end. Not here: one attempt
(`attempt.py`), the choice of workers (`policy.py`), the meaning of a failure (`failures.py`), the
sharing within a decode worker (`decode_worker/roster.py`)."""

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Collection
from contextlib import nullcontext
from typing import Final

from msgspec.structs import replace

from effuse.placement.records import Kind
from effuse.protos.errors import (
    Bug,
    EngineLost,
    InvalidRequest,
    Unavailable,
)
from effuse.router.attempt import Attempt
from effuse.router.client import (
    RETRY_AFTER_S,
    Listener,
    failed,
    finished_of,
    time_is_over,
    together,
)
from effuse.router.failures import REFUSALS, Failure, FailureKind
from effuse.router.fleet import AttemptShare
from effuse.router.policy import (
    AttemptNeeds,
    Placement,
    PromptCost,
    Prospect,
    WorkerLife,
    is_alone,
    what_is_missing,
)
from effuse.router.prefixes import NOTHING_KNOWN, UNIT, keys_of
from effuse.router.request import Request
from effuse.router.request_states import Event, State
from effuse.router.router import Router
from effuse.router.tokenizer import AnswerText
from effuse.v1 import generation_pb2 as pb

LOG: Final = logging.getLogger(__name__)
OUR_FIELDS: Final = frozenset(
    {"attempt", "gap_s", "incarnation", "prefill", "remote", "reservation", "resume"}
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

    def __init__(self, router: Router, request: Request, listener: Listener) -> None:
        self._router = router
        self._request = request
        self._listener = listener

    async def run(self) -> pb.GenerateStreamResponse:
        """Makes attempts, one after the other, and returns the last event, which is still to be
        sent; raises `EffuseError` or `ClientGone`."""
        request, router = self._request, self._router
        while True:
            try:
                placement = await self._choose_workers()
                workers, alone = (placement.decode, placement.prefill), request.attempts.alone
                if own := [one for one in workers if one is not None and is_alone(one, alone)]:
                    with router.metrics.waiting("alone"):
                        await router.fleet.peers.until_empty(own, self._alone_left_s())
                del workers, own
                self._note_known(placement)
                placement = router.fleet.held(placement)
                size = len(request.prompt.token_ids), request.prompt.max_tokens
                known = request.costs.known
                counted = router.fleet.counted(placement, *size, known.own + known.shared)
                with counted as share, router.traces.span("attempt"):
                    outcome = await self._begin_attempt(placement, share).run()
                if not isinstance(outcome, Failure):
                    request.answer.apply_event(Event.FINISHED, router.now())
                    router.poison.note_answer(request)
                    self._note_answer(placement)
                    return finished_of(request, outcome, router.now())
            finally:
                if router.fleet.num_alone:
                    router.fleet.release_workers(request.holder)
            await self._prepare_retry(outcome)

    # Before an attempt.

    async def _choose_workers(self) -> Placement:
        """Waits as long as a worker may yet take the request; raises `Unavailable` and, if
        engines turn out to die of it, `Poisonous`."""
        request, router = self._request, self._router
        fleet = router.fleet
        while True:
            router.poison.check(request)
            need = self._need()
            request.attempts.alone = need.alone
            if need.alone:
                fleet.keep_workers(request.holder, self._with_prompt(need))
            elif fleet.num_alone:
                fleet.release_workers(request.holder)
            prospect = fleet.known_prospect(need)
            if prospect is None:
                need = self._with_prompt(need)
                placement = fleet.place(need)
                if placement is not None:
                    return placement
                prospect = fleet.prospect(need)
            if prospect is Prospect.NONE:
                raise self._unavailable(what_is_missing(fleet.candidates(), need))
            setbacks = request.attempts.setbacks
            if prospect is not Prospect.WORKER:
                setbacks.stalled_at = None
            else:
                if setbacks.stalled_at is None:
                    setbacks.stalled_at = router.seats.stalled_since(request)
                stalled_s = router.now() - setbacks.stalled_at
                if stalled_s > router.config.recovery_s:
                    why = f"no worker could continue the answer within {stalled_s:.3g} s: "
                    raise self._unavailable(why + what_is_missing(fleet.candidates(), need))
            reason = "alone" if need.alone else prospect.value
            # Other routers leave it a seat, if it waits for one.
            seat = router.admission.without_seat(request.asked.model.name)
            lacking = seat if prospect is Prospect.SEAT else nullcontext()
            with router.metrics.waiting(reason), lacking:
                await fleet.wait_for_change(self._look_again_s())

    def _kinds_alone(self) -> Collection[Kind]:
        """For which work the next attempt runs alone. It does not wait long for them if its
        engines may have ended from outside."""
        request, router = self._request, self._router
        alone = router.poison.kinds_alone(request)
        if not alone:
            return ()
        if request.attempts.alone_since is None:
            request.attempts.alone_since = router.now()
        return () if self._alone_left_s() <= 0 else alone

    def _alone_left_s(self) -> float:
        request, router = self._request, self._router
        since = request.attempts.alone_since
        if since is None or not router.poison.verdicts.may_share(request.digest):
            return math.inf
        return since + ALONE_S - router.now()

    def _need(self) -> AttemptNeeds:
        """An answer that has begun goes on only on a worker with the same weights and rules. A
        prompt in a pool needs only a decode worker. `_with_prompt` adds the rest."""
        request, fleet = self._request, self._router.fleet
        needs_decode = request.asked.settings.is_canvas or request.attempts.in_pool
        alone, attempts = self._kinds_alone(), request.attempts
        is_first = bool(attempts.group) and not attempts.count
        now, sizes = self._router.now(), request.prompt.sizes
        need = fleet.need(request.asked.model.name, on_decode_only=needs_decode, sizes=sizes)
        return replace(
            need,
            excluded=attempts.setbacks.avoided(now),
            fingerprint=request.answer.fingerprint if request.answer.token_ids else None,
            holder=request.holder if alone else None,
            alone=alone,
            beside=attempts.beside if is_first else None,
            num_answers=request.asked.num_answers if is_first and not request.index else 1,
            by_pool=need.by_pool and attempts.pool_from <= now,
        )

    def _with_prompt(self, need: AttemptNeeds) -> AttemptNeeds:
        """The same, with what only a choice among several workers depends on."""
        keys = self._request.prompt.prefix_keys
        cached = self._router.fleet.prompts.cached(keys, self._whole)
        return replace(need, cached=cached, prompt=self._prompt_cost())

    @property
    def _whole(self) -> int:
        """Tokens of a prompt that workers reuse only as a whole; 0 of others."""
        is_causal = self._request.asked.model.prompt_attention == "causal_blocks"
        return 0 if is_causal else len(self._request.prompt.token_ids)

    def _prompt_cost(self) -> PromptCost:
        """Its time counts if gaps have an objective, which pieces of prompts then keep."""
        asked, tokens = self._request.asked, len(self._request.prompt.token_ids)
        if math.isinf(asked.goals.gap_s):
            return PromptCost(tokens)
        return PromptCost(tokens, self._router.steering.prompt_s(asked.model.name, tokens) or 0.0)

    def _look_again_s(self) -> float:
        """Seconds until the choice, or an error about it, may be another one although nothing
        happens."""
        router, setbacks, now = self._router, self._request.attempts.setbacks, self._router.now()
        due = [
            LOOK_S,
            self._alone_left_s(),
            setbacks.next_change_s(now),
            router.fleet.standing.next_change_s(),
        ]
        if setbacks.stalled_at is not None:
            due.append(setbacks.stalled_at + router.config.recovery_s - now)
        return min(one for one in due if one is not None and one > 0) + 0.001

    def _note_known(self, placement: Placement) -> None:
        """Notes what these workers should have of the prompt, and will have."""
        request = self._request
        keys, known = request.prompt.prefix_keys, self._router.fleet.prompts
        computes = placement.prefill or placement.decode
        request.costs.known = NOTHING_KNOWN
        if computes.load.prefix_queries and not placement.shares_prompt:
            request.costs.known = known.claim(keys, computes.life, self._whole)
            self._router.metrics.count_known(request.costs.known)
        known.note(keys, [placement.decode.life, *([computes.life] if placement.prefill else ())])

    def _note_answer(self, placement: Placement) -> None:
        """Notes that a decode worker should have the KV of an answer, with which the next turn of a
        chat begins. A bidirectional prompt is reused only as a whole."""
        request, decode = self._request, placement.decode
        if decode.model.prompt_attention == "causal_blocks":
            begun = request.prompt.prefix_keys
            rest = request.prompt.token_ids[len(begun) * UNIT :]
            keys = keys_of([*rest, *request.answer.token_ids], request.tenant.name, begun)
            self._router.fleet.prompts.note(keys, [decode.life], is_over=True)

    def _begin_attempt(self, placement: Placement, share: AttemptShare) -> Attempt:
        request = self._request
        prefill = placement.prefill.worker_id if placement.prefill else ""
        request.begin_attempt(prefill, placement.decode.worker_id, self._router.now())
        attempt = Attempt(self._router, request, placement, self._listener, share)
        if not request.index:
            self._listener.begin_attempt(placement, attempt.transfer_id)
        return attempt

    # After an attempt.

    async def _prepare_retry(self, failure: Failure) -> None:
        """Prepares another attempt, once the budget has one; raises the error for the client if
        none can follow."""
        request, router, error = self._request, self._router, failure.error
        attempts, setbacks = request.attempts, request.attempts.setbacks
        request.costs.earlier_forwards, request.costs.forwards = request.costs.all_forwards, 0
        attempts.alone_since = None
        LOG.warning(
            "request %s, attempt %d on %s: %s; so far: %s",
            *(request.name, attempts.count, failure.worker.worker_id, error.message),
            request.answer.history(),
        )
        router.fleet.standing.note(failure)
        router.metrics.count_failure(failure)
        self._raise_if_final(failure)
        request.answer.apply_event(Event.LOST, router.now(), error.message[:80])
        setbacks.add(failure, router.now())
        router.poison.note_death(request, failure)
        # Next time its pages come first.
        attempts.is_patient = attempts.is_patient or failure.outcome is FailureKind.LATE
        if setbacks.losses_in_a_row > router.config.max_losses:
            text = f"the request lost {setbacks.losses_in_a_row} workers in a row"
            raise self._unavailable(text, retryable=False) from error
        if isinstance(error, EngineLost):
            await asyncio.sleep(TOGETHER_S)
        if failure.outcome not in REFUSALS and (delay_s := router.budget.take(router.now())):
            with router.metrics.waiting("budget"):
                try:
                    await asyncio.sleep(delay_s)
                except asyncio.CancelledError:
                    # Otherwise all later failures would wait behind requests that are gone.
                    router.budget.give_back()
                    raise

    def _raise_if_final(self, failure: Failure) -> None:
        """Raises the error for the client if no other attempt can do better."""
        error = failure.error
        if asyncio.get_running_loop().time() >= self._request.deadline:
            is_cut_off = self._router.requests.is_cut_off
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
        retry_after_s = RETRY_AFTER_S if retryable else None
        return failed(
            Unavailable, why, self._request, retryable=retryable, retry_after_s=retry_after_s
        )


class SideBySide(Listener):
    """All answers to one request, which is admitted and knows its prompt. Run once. `on_end` is
    called for each answer that succeeds, because others may use its slot from then on."""

    def __init__(
        self,
        router: Router,
        request: Request,
        client: Listener,
        on_end: Callable[[Request], None],
    ) -> None:
        self._router = router
        self._client = client
        self._on_end = on_end
        self._is_reserved = asyncio.Event()
        self._place: WorkerLife | None = None  # where the prompt's KV comes to
        asked, stopping = request.asked, request.asked.sent.stopping
        texts = (
            AnswerText(router.tokenizer, stopping.stop, stopping.min_tokens)
            for _ in range(asked.num_answers)
        )
        # A canvas has no KV of a prompt that others could read.
        group = "" if asked.settings.is_canvas else secrets.token_hex(16)
        self._answers = request.split(texts, group)
        self._num_left = len(self._answers)

    async def run(self) -> pb.GenerateStreamResponse:
        """Sends the client all events except the last one, which is returned; raises `EffuseError`
        or `ClientGone`."""
        first, *others = self._answers
        ends = await together([self._run(first), *map(self._follow, others)])
        return next(last for last in ends if last is not None)

    async def _follow(self, one: Request) -> pb.GenerateStreamResponse | None:
        if one.attempts.group:
            await self._is_reserved.wait()  # the request's deadline ends it
            one.attempts.beside = self._place
        return await self._run(one)

    async def _run(self, one: Request) -> pb.GenerateStreamResponse | None:
        """The last event of all, if this answer is the last one to end."""
        ended = await AnswerRun(self._router, one, self).run()
        self._on_end(one)
        self._num_left -= 1
        # Once none of them is there, the prompt's KV is gone. Answers without a seat then go to any
        # worker, with a new handoff.
        if not any(_is_at(each, self._place) for each in self._answers):
            for each in self._answers:
                each.attempts.beside = None
        if not self._num_left:
            return ended
        await self.send(ended)
        return None

    def send(self, event: pb.GenerateStreamResponse) -> Awaitable[None]:
        return self._client.send(event)

    def begin_attempt(self, placement: Placement, transfer_id: str) -> None:
        """The request counts as being at the workers of its first answer."""
        self._client.begin_attempt(placement, transfer_id)

    def note_reserved(self, placement: Placement) -> None:
        """Others may join it there from now on; wherever it goes later, they live by themselves."""
        if self._place is None:
            self._place = placement.decode.life
            self._is_reserved.set()


def _is_at(one: Request, place: WorkerLife | None) -> bool:
    is_placed = one.answer.state in (State.STARTING, State.PREFILLING, State.DECODING)
    return place is not None and is_placed and one.attempts.decode_worker == place[0]


def _is_ours(error: InvalidRequest) -> bool:
    return any(v.field.split(".")[0] in OUR_FIELDS for v in error.violations)
