"""The models of the fleet, the one that a request names, and ModelService with the workers that
serve them.

Workers announce their models. A model whose workers are gone stays known: requests for it wait for
a worker and are not refused with NOT_FOUND."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from effuse.client.params import NAMES
from effuse.config.decoding import ALGORITHMS, DecodingDefaults
from effuse.placement.records import Link, ModelInfo
from effuse.protos.errors import InvalidRequest, NotFound, Unavailable
from effuse.protos.rpc import Context
from effuse.router.findings import Findings, check_model_name, shown
from effuse.router.fleet import RoutedFleet
from effuse.router.policy import Candidate, Condition, live_workers
from effuse.router.prompt import Texts
from effuse.v1 import generation_pb2, model_pb2, model_pb2_grpc

MOST_A_PAGE: Final = 1000
_ROLES: Final = {
    "prefill": model_pb2.WORKER_ROLE_PREFILL,
    "decode": model_pb2.WORKER_ROLE_DECODE,
}
_STATES: Final = {
    Condition.READY: model_pb2.WORKER_STATE_READY,
    Condition.DRAINING: model_pb2.WORKER_STATE_DRAINING,
    Condition.STARTING: model_pb2.WORKER_STATE_STARTING,
    Condition.LOST: model_pb2.WORKER_STATE_LOST,
    Condition.UNREACHABLE: model_pb2.WORKER_STATE_UNREACHABLE,
}


class Catalogue:
    """The models known so far."""

    def __init__(self, fleet: RoutedFleet) -> None:
        self._fleet = fleet
        self._known: dict[str, ModelInfo] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no worker has announced a model so far."""
        return not (self._known or self.live())

    def live(self) -> dict[str, ModelInfo]:
        """Models that a worker serves or will again, by name. Decode workers describe them first,
        and of several always the same one, so that equal requests take equal defaults."""
        condition = self._fleet.standing.condition
        known = self._fleet.records()
        records = [one for one in known if condition(one) is not Condition.DRAINING]
        records.sort(key=lambda record: (record.role == "decode", record.worker_id))
        models = {record.model.name: record.model for record in records}
        self._known |= models
        return models

    def find(self, name: str | None) -> ModelInfo:
        """The model that a request means; raises `InvalidRequest`, `NotFound`, `Unavailable`."""
        models = self.live()
        if name is None:
            return self._only_model(models or self._known)
        findings = Findings()
        check_model_name(name, "model", findings)
        findings.raise_any()
        if (found := models.get(name) or self._known.get(name)) is not None:
            return found
        if not models:
            raise Unavailable(f"no worker serves {name!r} now", retry_after_s=1.0)
        there = ", ".join(sorted(models))
        raise NotFound(f"model {shown(name)} does not exist; this fleet serves {there}")

    def _only_model(self, models: dict[str, ModelInfo]) -> ModelInfo:
        if not models:
            raise Unavailable("no worker has announced a model yet", retry_after_s=1.0)
        if len(models) > 1:
            there = ", ".join(sorted(models))
            raise InvalidRequest.of("model", f"expected one of {there}, got none")
        return next(iter(models.values()))


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """ModelService."""

    def __init__(
        self, fleet: RoutedFleet, catalogue: Catalogue, texts: Texts, *, chat_template: str | None
    ) -> None:
        self._fleet = fleet
        self._texts = texts
        self._catalogue = catalogue
        self._chat_template = chat_template  # the file that it was read from, if there is one

    async def ListModels(
        self, request: model_pb2.ListModelsRequest, context: Context
    ) -> model_pb2.ListModelsResponse:
        """Models in the order of their names; a page's token is the last name of the one before."""
        after = sorted(name for name in self._catalogue.live() if name > request.page_token)
        most = min(request.page_size or MOST_A_PAGE, MOST_A_PAGE)
        page = after[:most]
        return model_pb2.ListModelsResponse(
            models=[self._describe(self._catalogue.live()[name]) for name in page],
            next_page_token=page[-1] if len(after) > most else "",
        )

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        """One model by its name."""
        findings = Findings()
        check_model_name(request.name, "name", findings)
        findings.raise_any()
        model = self._catalogue.find(request.name)
        return model_pb2.GetModelResponse(model=self._describe(model))

    async def ListWorkers(
        self, request: model_pb2.ListWorkersRequest, context: Context
    ) -> model_pb2.ListWorkersResponse:
        """Live workers in the order of their ids; pages as of ListModels."""
        after = [c for c in self._fleet.candidates() if c.record.worker_id > request.page_token]
        after.sort(key=lambda c: c.record.worker_id)
        most = min(request.page_size or MOST_A_PAGE, MOST_A_PAGE)
        page = after[:most]
        return model_pb2.ListWorkersResponse(
            workers=[describe_worker(one) for one in page],
            next_page_token=page[-1].record.worker_id if len(after) > most else "",
        )

    async def Tokenize(
        self, request: model_pb2.TokenizeRequest, context: Context
    ) -> model_pb2.TokenizeResponse:
        """A prompt as ids."""
        return await self._texts.tokenize(request)

    async def Detokenize(
        self, request: model_pb2.DetokenizeRequest, context: Context
    ) -> model_pb2.DetokenizeResponse:
        """Ids as text."""
        return await self._texts.detokenize(request)

    def _describe(self, model: ModelInfo) -> model_pb2.Model:
        prefill, decode = live_workers(self._fleet.candidates(), model.name)
        defaults = describe_defaults(model.defaults)
        if self._chat_template:
            defaults.sources.add(knob="chat_template", source=self._chat_template)
        return model_pb2.Model(
            name=model.name,
            architecture=model.architecture,
            block_size=model.block_size,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            mask_token_id=model.mask_token_id,
            eos_token_ids=model.eos_token_ids,
            default_algorithm=NAMES["algorithm"][model.defaults.settings.algorithm],
            decode_workers=len(decode),
            prefill_workers=len(prefill),
            defaults=defaults,
            has_chat_template=self._chat_template is not None,
        )


def describe_defaults(defaults: DecodingDefaults) -> model_pb2.ModelDefaults:
    """The settings that clients may leave out, as they read them."""
    settings, sampling = defaults.settings, defaults.sampling
    used = ("algorithm", *ALGORITHMS[settings.algorithm].settings)
    knobs: dict[str, Any] = {name: getattr(settings, name) for name in used}
    for name in NAMES.keys() & knobs.keys():
        knobs[name] = NAMES[name][knobs[name]]
    return model_pb2.ModelDefaults(
        sampling=generation_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
        ),
        decoding=generation_pb2.DecodingParams(**knobs),
        max_tokens=defaults.max_tokens,
        sources=[
            model_pb2.DefaultSource(knob=knob, source=source) for knob, source in defaults.sources
        ],
    )


def describe_worker(candidate: Candidate) -> model_pb2.Worker:
    """A worker, as clients read it."""
    record, load = candidate.record, candidate.record.load
    return model_pb2.Worker(
        worker_id=record.worker_id,
        role=_ROLES[record.role],
        model=record.model.name,
        address=record.address,
        state=_STATES[candidate.condition],
        incarnation=record.incarnation,
        ranks=record.capacity.ranks,
        page_size=record.capacity.page_size,
        total_pages=record.capacity.total_pages,
        free_pages=load.free_pages,
        reserved_pages=load.reserved_pages,
        receiving_pages=load.receiving_pages,
        quarantined_pages=load.quarantined_pages,
        max_num_seqs=record.capacity.max_num_seqs,
        max_num_batched_tokens=record.capacity.max_num_batched_tokens,
        routed=candidate.in_flight.requests,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        blocks_left=load.blocks_left,
        steps=load.steps,
        step_requests=load.step_requests,
        step_tokens=load.step_tokens,
        preemptions=load.preemptions,
        kv_bytes=load.kv_bytes,
        links=[_describe_link(link, record.min_handoff_gbps) for link in record.links],
        min_handoff_gbps=record.min_handoff_gbps,
        quarantines=[
            model_pb2.WorkerQuarantine(
                writer=one.writer, pages=one.pages, age=timedelta(seconds=one.age_s)
            )
            for one in record.quarantines
        ],
    )


def _describe_link(link: Link, least: float) -> model_pb2.WorkerLink:
    return model_pb2.WorkerLink(
        peer=link.peer,
        peer_incarnation=link.peer_incarnation,
        transport=link.transport,
        gigabytes_per_second=link.gigabytes_per_second,
        refused=link.gigabytes_per_second < least or not link.bytes_per_second,
    )
