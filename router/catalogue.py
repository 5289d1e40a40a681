"""ModelService: the models of the fleet and the workers that serve them, and text to ids and back.

Not here: which models there are (`seats.py`)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from effuse.client.params import NAMES
from effuse.config.decoding import ALGORITHMS, DecodingDefaults
from effuse.placement.records import Link, ModelInfo
from effuse.protos.errors import InvalidRequest
from effuse.protos.rpc import Context
from effuse.router.findings import Findings
from effuse.router.handler import Serving
from effuse.router.policy import Candidate, Condition, live_workers
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


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """ModelService."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._fleet = serving.router.fleet
        self._catalogue = serving.router.catalogue
        # The file that the chat template was read from, if there is one.
        self._chat_template = serving.router.tokenizer.chat_template_origin

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
        model = self._catalogue.find(request.name, "name")
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
        text = await self._serving.router.tokenizer.text_of(request.token_ids)
        return model_pb2.DetokenizeResponse(text=text)

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
