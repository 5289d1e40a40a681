"""The gRPC services of effuse's own protocol: generation, models and workers, and watching.

Not here: the life of a request (`handler.py`), which models there are (`seats.py`)."""

import asyncio
import hashlib
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, cast

from google.protobuf.duration_pb2 import Duration

from effuse.client.params import NAMES
from effuse.config.decoding import ALGORITHMS, DecodingDefaults
from effuse.placement.records import ModelInfo
from effuse.placement.waste import waste_of
from effuse.protos.channels import filled, numbers_of
from effuse.protos.errors import InvalidRequest, Unavailable
from effuse.protos.rpc import Context
from effuse.router.findings import Findings, check_request_id
from effuse.router.fleet import live_workers
from effuse.router.handler import Serving
from effuse.router.policy import Candidate
from effuse.router.request import SHOWN, Request
from effuse.router.router import Router
from effuse.router.steering import ModelPlan
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import (
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    monitor_pb2,
    monitor_pb2_grpc,
)

MOST_SHOWN: Final = 100

MOST_TOKENS: Final = 1000
DEFAULT_INTERVAL_S: Final = 0.25
STALLED_S: Final = 30.0
"""A watcher that takes nothing for so long is gone."""
MOST_A_PAGE: Final = 1000
_ROLES: Final = numbers_of("WORKER_ROLE_", model_pb2.WorkerRole.items())
_STATES: Final = numbers_of("WORKER_STATE_", model_pb2.WorkerState.items())


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> Awaitable[pb.GenerateResponse]:
        """No coroutine of its own, whose frame would hold the message."""
        return self._serving.answer(lambda: request, context)

    def GenerateStream(  # type: ignore[override]  # the stub knows only generators
        self,
        request: pb.GenerateStreamRequest,
        context: Context,
    ) -> Awaitable[None]:
        """The answer as it grows, or several.

        Written through the context: a generator would be left hanging when its call is cancelled.
        """
        return self._serving.stream(lambda: request.request, context)

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
        return request_id, self._serving.tenant().name


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._fleet = serving.router.fleet
        self._catalogue = serving.router.seats.catalogue
        # The file that the chat template was read from, if there is one.
        self._chat_template = serving.router.tokenizer.chat_template_origin

    async def ListModels(
        self, request: model_pb2.ListModelsRequest, context: Context
    ) -> model_pb2.ListModelsResponse:
        """Models in the order of their names; a page's token is the last name of the one before."""
        models = self._catalogue.live()
        page, next_token = _page(sorted(models), request)
        return model_pb2.ListModelsResponse(
            models=[self._describe(models[name]) for name in page], next_page_token=next_token
        )

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        model = self._catalogue.find(request.name, "name")
        return model_pb2.GetModelResponse(model=self._describe(model))

    async def ListWorkers(
        self, request: model_pb2.ListWorkersRequest, context: Context
    ) -> model_pb2.ListWorkersResponse:
        """Live workers in the order of their ids; pages as of ListModels."""
        workers = {c.record.worker_id: c for c in self._fleet.candidates()}
        page, next_token = _page(sorted(workers), request)
        return model_pb2.ListWorkersResponse(
            workers=[describe_worker(workers[name]) for name in page], next_page_token=next_token
        )

    async def Tokenize(
        self, request: model_pb2.TokenizeRequest, context: Context
    ) -> model_pb2.TokenizeResponse:
        """A prompt as ids, however long; raises `EffuseError` for what no prompt may be."""
        if request.WhichOneof("input") is None:
            raise InvalidRequest.of("prompt", "expected one of prompt and chat, got neither")
        token_ids, model = await self._serving.tokenize(request)
        return model_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=model.max_model_len)

    async def Detokenize(
        self, request: model_pb2.DetokenizeRequest, context: Context
    ) -> model_pb2.DetokenizeResponse:
        """Ids as text; raises `EffuseError` for ids that no model has, and for too many of them."""
        model = self._catalogue.find(request.model if request.HasField("model") else None)
        findings = Findings()
        if len(request.token_ids) > model.max_model_len:
            form = f"at most {model.max_model_len} ids"
            findings.add("token_ids", form, f"{len(request.token_ids)} ids")
        else:
            findings.token_ids("token_ids", request.token_ids, model.vocab_size, {})
        findings.raise_any()
        tokenizer = self._serving.router.tokenizer
        text = await tokenizer.turns.run(lambda: tokenizer.text_of(request.token_ids))
        return model_pb2.DetokenizeResponse(text=text)

    def _describe(self, model: ModelInfo) -> model_pb2.Model:
        prefill, decode = live_workers(self._fleet.candidates(), model.name)
        served = [worker.model for worker in (*prefill, *decode)]
        defaults = describe_defaults(model.defaults)
        if self._chat_template:
            defaults.sources.add(knob="chat_template", source=self._chat_template)
        return filled(
            model_pb2.Model,
            model,
            default_algorithm=NAMES["algorithm"][model.defaults.settings.algorithm],
            decode_workers=len(decode),
            prefill_workers=len(prefill),
            defaults=defaults,
            deterministic=all(one.deterministic for one in (model, *served)),
            has_chat_template=self._chat_template is not None,
        )


def _page(
    names: list[str], request: model_pb2.ListModelsRequest | model_pb2.ListWorkersRequest
) -> tuple[list[str], str]:
    """The names of one page, and the token of the next one, which is the last name of this one."""
    after = [name for name in names if name > request.page_token]
    most = min(request.page_size or MOST_A_PAGE, MOST_A_PAGE)
    return after[:most], after[most - 1] if len(after) > most else ""


def describe_defaults(defaults: DecodingDefaults) -> model_pb2.ModelDefaults:
    """The settings that clients may leave out, as they read them."""
    settings, sampling = defaults.settings, defaults.sampling
    used = ("algorithm", *ALGORITHMS[settings.algorithm].settings)
    knobs: dict[str, Any] = {name: getattr(settings, name) for name in used}
    for name in NAMES.keys() & knobs.keys():
        knobs[name] = NAMES[name][knobs[name]]
    return model_pb2.ModelDefaults(
        sampling=filled(pb.SamplingParams, sampling, seed=None, logit_bias=None),
        decoding=pb.DecodingParams(**knobs),
        max_tokens=defaults.max_tokens,
        sources=[
            model_pb2.DefaultSource(knob=knob, source=source) for knob, source in defaults.sources
        ],
    )


def describe_worker(candidate: Candidate) -> model_pb2.Worker:
    """A worker, as clients read it."""
    record = candidate.record
    waste = waste_of(record.load, record.capacity.page_size, record.model.max_model_len)
    return filled(
        model_pb2.Worker,
        record.load,
        record.capacity,
        record,
        role=_ROLES[record.role],
        model=record.model.name,
        state=_STATES[candidate.condition.value],
        routed=candidate.in_flight.requests + candidate.in_flight.prompts,
        paged_waste=waste.paged,
        contiguous_waste=waste.contiguous,
        links=[
            filled(
                model_pb2.WorkerLink,
                link,
                refused=link.gigabytes_per_second < record.min_handoff_gbps
                or not link.bytes_per_second,
            )
            for link in record.links
        ],
        quarantines=[
            model_pb2.WorkerQuarantine(
                writer=one.writer, pages=one.pages, age=timedelta(seconds=one.age_s)
            )
            for one in record.quarantines
        ],
    )


def describe_plan(name: str, plan: ModelPlan, kept: Sequence[str]) -> monitor_pb2.ModelPlan:
    """The plans for a model, as clients read them. `kept`: lines about objectives kept so far."""
    roles, desired = (
        None if held.plan is None else filled(monitor_pb2.PlanSplit, held.plan)
        for held in (plan.roles, plan.desired)
    )
    return filled(
        monitor_pb2.ModelPlan,
        plan.planner,
        model=name,
        lines=[*plan.lines(), *kept],
        kept=kept,
        roles=roles,
        desired=desired,
    )


class MonitorServicer(monitor_pb2_grpc.MonitorServiceServicer):
    def __init__(self, router: Router) -> None:
        self._router = router

    async def WatchRequests(  # type: ignore[override]  # the stub knows only generators
        self, request: monitor_pb2.WatchRequestsRequest, context: Context
    ) -> None:
        """The running requests, at an interval; ends with the router or by its caller."""
        interval_s = _interval(request.interval)
        monitor = self._router.monitor
        over = monitor.is_over
        with monitor.watching():
            while not over.is_set():
                try:
                    async with asyncio.timeout(STALLED_S):
                        await cast(Awaitable[None], context.write(self._snapshot()))
                except TimeoutError:
                    raise Unavailable("the caller read nothing for too long") from None
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await over.wait()

    async def GetPlan(
        self, request: monitor_pb2.GetPlanRequest, context: Context
    ) -> monitor_pb2.GetPlanResponse:
        models = sorted(self._router.steering.models.items())
        kept = self._router.metrics.kept_shares
        return monitor_pb2.GetPlanResponse(
            plans=[describe_plan(name, one, kept.lines(name)) for name, one in models]
        )

    def _snapshot(self) -> monitor_pb2.WatchRequestsResponse:
        router = self._router
        requests = [one for request in router.requests.running_now() for one in request.parts]
        router.monitor.keep_drafts_of(requests)
        return monitor_pb2.WatchRequestsResponse(
            router=router.id,
            num_running=router.admission.num_running,
            num_waiting=router.admission.num_waiting,
            requests=[self._describe(request) for request in requests[:MOST_SHOWN]],
            num_tokens=router.monitor.num_tokens,
            num_first_blocks=router.monitor.num_first_blocks,
            first_block_seconds=router.monitor.first_block_s,
            plan=[
                f"{name}: {line}"
                for name, one in sorted(router.steering.models.items())
                for line in (*one.lines(), *router.metrics.kept_shares.lines(name))
            ],
        )

    def _describe(self, request: Request) -> monitor_pb2.RunningRequest:
        asked, answer, which = request.asked, request.answer, request.name[len(request.id) :]
        found = monitor_pb2.RunningRequest(
            name=hashlib.sha256(request.id.encode()).hexdigest()[:12] + which,
            model=asked.model.name,
            state=answer.state.value,
            prefill_worker=request.attempts.prefill_worker,
            decode_worker=request.attempts.decode_worker,
            attempt=request.attempts.count,
            age=timedelta(seconds=self._router.now() - request.arrived),
            prompt_tokens=len(request.prompt.token_ids),
            max_tokens=request.prompt.max_tokens,
            num_tokens=len(answer.token_ids),
            block_size=asked.model.block_size,
            blocks=self._router.monitor.blocks(request),
        )
        if self._router.config.show_requests:
            tokenizer = self._router.tokenizer
            found.name = request.name
            found.prompt = asked.sent.prompt[:SHOWN]
            tail = [one for one in answer.token_ids[-MOST_TOKENS:] if tokenizer.is_text(one)]
            found.text = tokenizer.decode(tail)[-SHOWN:]
        return found


def _interval(asked: Duration) -> float:
    """Seconds; by hand, as protobuf's own conversion overflows, and takes parts of two signs."""
    interval_s = asked.seconds + asked.nanos / 1e9
    if interval_s == 0:
        return DEFAULT_INTERVAL_S
    if not (0.05 <= interval_s <= 60 and 0 <= asked.nanos < 1_000_000_000):
        found = f"{asked.seconds} s and {asked.nanos} ns"
        raise InvalidRequest.of("interval", f"expected 0.05 s to 60 s, got {found}")
    return interval_s
