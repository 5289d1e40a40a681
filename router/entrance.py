"""The entrance of a router: checks a client's message, and makes it a request.

Raises everything that speaks against a request before anything is held for it. Not here: the
meaning of other protocols' messages (`openai_requests.py`, `kserve_requests.py`,
`vllm_requests.py`), the rest of a request's life (`handler.py`).
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Protocol

from effuse.config.decoding import ANSWERS
from effuse.protos.errors import REQUEST_ID_KEY, EffuseError, Unavailable
from effuse.protos.gate import CALLER
from effuse.router.admission import SlotNeed
from effuse.router.client import RETRY_AFTER_S, time_is_over
from effuse.router.detokenizer import AnswerText
from effuse.router.findings import REQUEST_ID
from effuse.router.request import AnswerState, EarlyRequest, Request
from effuse.router.router import Router
from effuse.router.shared_request import digest_of_asked
from effuse.router.tenants import NOBODY, Tenant
from effuse.router.validation import Asked, validate
from effuse.v1 import generation_pb2 as pb

REPEATED_KEY: Final = "grpc-previous-rpc-attempts"
"""Metadata of a call that gRPC's own retries send again. Clients that do so themselves can set it,
too."""


class CallContext(Protocol):
    """The facts of a call that do not depend on its protocol. gRPC's contexts have them."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if it has none."""

    def invocation_metadata(self) -> Any:
        """Names and values that came beside the request, or None."""

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Takes names and values that go beside the answer."""


class Entrance:
    """One per router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        most = router.config.max_answers
        self._answers = replace(ANSWERS, high=most, note=", this router's --max-answers")

    def tenant(self) -> Tenant:
        """The owner of the call that is being answered, and its limits."""
        name = CALLER.get()
        if self._router.keys is not None:
            return self._router.keys.tenant(name)
        return Tenant(name) if name else NOBODY

    def resolve(self, message: pb.GenerateRequest, *, is_stream: bool, seed: int = 0) -> Asked:
        """The request of a client's message, every setting resolved, with `seed` if it sets none;
        raises `EffuseError` with all that speaks against it."""
        router, tokenizer = self._router, self._router.tokenizer
        return validate(
            message,
            router.catalogue.find(message.model if message.HasField("model") else None),
            tokenizer.reserved_ids,
            is_stream=is_stream,
            decode_prefills=router.fleet.mode != "remote",
            takes_chats=tokenizer.has_chat_template,
            chat_end_ids=tokenizer.chat_end_ids,
            answers=self._answers,
            seed=seed,
        )

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts an `EffuseError` that is raised before anything is held for a request."""
        try:
            yield
        except EffuseError as error:
            self._router.metrics.count_refusal(self.tenant().name, error.code.name)
            raise

    async def accept(
        self, message: pb.GenerateRequest, context: CallContext, *, is_stream: bool
    ) -> Request:
        """Makes the request of a client's message; raises `EffuseError` with all that speaks
        against it. Waits in the queue until a worker has announced a model."""
        with self.counting_refusals():
            return await self._accept(message, context, is_stream)

    async def _accept(
        self, message: pb.GenerateRequest, context: CallContext, is_stream: bool
    ) -> Request:
        router, loop = self._router, asyncio.get_running_loop()
        arrived, began, admission = router.now(), loop.time(), router.admission
        request_id = _request_id(message)
        context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
        time_left = context.time_remaining()
        limit_s = min(math.inf if time_left is None else time_left, router.config.max_request_s)
        tenant = self.tenant()
        router.quotas.check(tenant)
        if router.catalogue.is_empty:
            await self._wait_for_models(EarlyRequest(id=request_id, tenant=tenant, limit_s=limit_s))
        if not admission.knows_seats:
            router.seats.count()
        admission.check(SlotNeed(model=message.model or admission.only_model, tenant=tenant.name))
        asked_digest = digest_of_asked(message, tenant) if message.HasField("request_id") else ""
        router.requests.check_id(request_id)
        asked = self.resolve(message, is_stream=is_stream, seed=secrets.randbits(64))
        router.quotas.check(tenant, asked.num_answers)
        left_s = began + limit_s - loop.time()
        admission.check(SlotNeed.of(asked, tenant.name, arrived, left_s))
        router.budget.add_requests(asked.num_answers, router.now())
        return Request(
            id=request_id,
            asked=asked,
            arrived=arrived,
            limit_s=limit_s,
            deadline=began + limit_s,
            answer=AnswerState(text=AnswerText(router.tokenizer, asked.stops, asked.min_tokens)),
            tenant=tenant,
            asked_digest=asked_digest,
            is_repeated=bool(asked_digest) and _is_repeated(context),
        )

    async def _wait_for_models(self, request: EarlyRequest) -> None:
        """Returns once a worker has announced a model. Raises `Overloaded` if the queue is full,
        `Unavailable` after `recovery_s`, and the errors that end any request that waits."""
        router, recovery_s = self._router, self._router.config.recovery_s
        ends = router.now() + recovery_s
        try:
            with router.admission.early(), router.requests.running(request):
                async with asyncio.timeout(request.limit_s) as limit:
                    with router.requests.limited_by(request, limit):
                        while router.catalogue.is_empty:
                            if (left_s := ends - router.now()) <= 0:
                                text = f"no worker could begin within {recovery_s:.3g} s"
                                why = f"{text}: no worker has announced a model"
                                raise Unavailable(why, retry_after_s=RETRY_AFTER_S)
                            await router.fleet.wait_for_change(left_s)
        except TimeoutError as error:
            raise time_is_over(request, is_cut_off=router.requests.is_cut_off) from error


def _is_repeated(context: CallContext) -> bool:
    return any(key == REPEATED_KEY for key, _ in context.invocation_metadata() or ())


def _request_id(message: pb.GenerateRequest) -> str:
    """The client's id, or a new one if it sent none or one that `validate` refuses."""
    if message.request_id and REQUEST_ID.fullmatch(message.request_id):
        return message.request_id
    return f"req-{secrets.token_hex(12)}"
