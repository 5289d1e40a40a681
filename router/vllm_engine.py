"""vLLM's engine service, for gateways that serve HTTP on top of one (SMG, sglang's router).

A gateway renders chats, encodes and decodes with the tokenizer that it gets here, and receives ids.
The model chooses settings that a gateway cannot know: algorithm, threshold, and neutral values
(top_p 1, top_k 0), because a gateway sends these for settings that its client left out. Settings
that effuse lacks are refused, unless they have no effect."""

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator, Collection, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from effuse.client.answer import FINISH_REASONS, WholeAnswer
from effuse.compat import vllm_engine_pb2 as engine
from effuse.compat import vllm_engine_pb2_grpc
from effuse.placement.records import ModelInfo
from effuse.protos.errors import NotFound
from effuse.protos.rpc import Context
from effuse.router.client import CANNOT_SERVE, Translate, prompt_tokens_of
from effuse.router.findings import SEEDS, Findings, naming
from effuse.router.handler import Serving
from effuse.router.request import Request
from effuse.router.tokenizer import bundled_directory
from effuse.v1 import generation_pb2 as pb

Part = TypeVar("Part", bound=Message)
TOKENIZER_FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "config.json", "generation_config.json",
)  # fmt: skip
PIECE_BYTES: Final = 1 << 20
_ONE: Final = ("top_p", "repetition_penalty")
"""Settings of which 1 is neutral."""
_MOST_INT32: Final = 2**31 - 1  # counts of large fleets are above it
_PRESENCE: Final = ("prompt_logprobs", "truncate_prompt_tokens")
_INPUTS: Final = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs")


def request_of(
    asked: engine.GenerateRequest, chat_end_ids: Collection[int] = ()
) -> pb.GenerateRequest:
    """The request of a gateway; raises `InvalidRequest` with all settings that effuse lacks.

    `chat_end_ids`: ids that end an answer in a chat. A gateway renders chats itself, and does not
    mark ids that are one."""
    _check(asked)
    params = asked.sampling_params
    given = {field.name: value for field, value in params.ListFields()}
    given = {name: value for name, value in given.items() if name not in _ONE or value != 1}
    if "seed" in given:
        given["seed"] %= SEEDS
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else chat_end_ids)}
    given["stop_token_ids"] = sorted(stop_ids)
    request = pb.GenerateRequest(
        request_id=asked.request_id or None,
        n=None if params.n < 2 else params.n,
        sampling=_part(pb.SamplingParams, given),
        stopping=_part(pb.StoppingParams, given),
        output=pb.OutputOptions(token_ids=True, logprobs=given.get("logprobs")),
    )
    if asked.HasField("tokenized"):
        request.prompt_token_ids.ids.extend(asked.tokenized.input_ids)
    elif asked.HasField("text"):
        request.prompt = asked.text
    return request


def _part(kind: type[Part], given: Mapping[str, Any]) -> Part:
    """The settings that a part of a request has, which have the same names there."""
    names = given.keys() & kind.DESCRIPTOR.fields_by_name.keys()
    return kind(**{name: given[name] for name in names})


def chunk_of(event: pb.GenerateStreamResponse, prompt_tokens: int) -> engine.GenerateResponse:
    commit = event.commit
    chunk = engine.GenerateStreamChunk(
        token_ids=commit.token_ids,
        prompt_tokens=prompt_tokens,
        completion_tokens=commit.token_offset + commit.num_tokens,
        output_logprobs=_logprobs_of(commit),
        index=event.answer_index,
    )
    return engine.GenerateResponse(chunk=chunk)


def complete_of(
    answer: pb.GenerateResponse, index: int, prompt_tokens: int
) -> engine.GenerateResponse:
    """A whole answer in its last message; each of several counts the prompt's tokens here."""
    complete = engine.GenerateComplete(
        output_ids=answer.token_ids,
        finish_reason=FINISH_REASONS[answer.finish_reason],
        prompt_tokens=prompt_tokens,
        completion_tokens=answer.usage.completion_tokens,
        cached_tokens=answer.stats.cached_prompt_tokens,
        output_logprobs=_logprobs_of(answer),
        index=index,
    )
    match answer.WhichOneof("matched_stop"):
        case "end_token_id":
            complete.matched_token_id = answer.end_token_id
        case "stop_string":
            complete.matched_stop_str = answer.stop_string
    return engine.GenerateResponse(complete=complete)


def _logprobs_of(message: pb.BlockCommit | pb.GenerateResponse) -> engine.OutputLogProbs | None:
    """Log-probabilities of its tokens; None if they were not asked for."""
    if not message.logprobs:
        return None
    return engine.OutputLogProbs(
        token_logprobs=[one.logprob for one in message.logprobs],
        token_ids=message.token_ids,
        top_logprobs=[
            engine.TopLogProbs(values=one.top_logprobs, token_ids=one.top_token_ids)
            for one in message.logprobs
        ],
    )


def describe_model(model: ModelInfo) -> engine.GetModelInfoResponse:
    """A model, as a gateway reads it."""
    sampling = model.defaults.sampling
    defaults = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    if sampling.top_k:
        defaults["top_k"] = sampling.top_k
    return engine.GetModelInfoResponse(
        model_path=model.name,
        is_generation=True,
        max_context_length=model.max_model_len,
        vocab_size=model.vocab_size,
        served_model_name=model.name,
        model_type=model.architecture,
        architectures=[model.architecture],
        eos_token_ids=model.eos_token_ids,
        max_req_input_len=model.max_model_len - 1,
        default_sampling_params_json=json.dumps(defaults),
    )


def _path_of(field: str, asked: engine.GenerateRequest) -> str:
    """The path in a gateway's message of a field of the request that it means."""
    ids = "tokenized.input_ids"
    if field == "prompt":
        return ids if asked.HasField("tokenized") else "text"
    part, _, name = field.partition(".")
    if part in ("n", "sampling", "stopping", "output"):
        return f"sampling_params.{name or part}"
    return f"{ids}{name.removeprefix('ids')}" if part == "prompt_token_ids" else field


def _check(asked: engine.GenerateRequest) -> None:
    findings, params = Findings(), asked.sampling_params
    if asked.WhichOneof("input") is None:
        findings.add("text", "one of tokenized and text", "neither")
    if params.logprobs < 0:
        findings.add("sampling_params.logprobs", "a count of 0 or more", params.logprobs)
    if strange := [token_id for token_id in params.logit_bias if token_id < 0]:
        findings.add("sampling_params.logit_bias", "ids of 0 or more", strange[0])
    given = [f"sampling_params.{name}" for name in _PRESENCE if params.HasField(name)]
    constraint = params.WhichOneof("constraint")
    given += [f"sampling_params.{constraint}"] if constraint else []
    if params.include_stop_str_in_output:
        given.append("sampling_params.include_stop_str_in_output")
    given += [name for name in _INPUTS if asked.HasField(name)]
    given += ["extra_mm_inputs"] if asked.extra_mm_inputs else []
    given += ["data_parallel_rank"] if asked.data_parallel_rank else []
    for name in given:
        findings.add(name, "no value, because effuse does not support it", "a value")
    findings.raise_any()


def _translator(asked: engine.GenerateRequest, request: Request) -> Translate:
    """Translates the events of an answer: chunks if they are asked for, and last the end. Text is
    the gateway's own matter."""
    whole = WholeAnswer()

    def translate(event: pb.GenerateStreamResponse) -> engine.GenerateResponse | None:
        whole.take(event)
        prompt_tokens = prompt_tokens_of(request)
        if event.HasField("finished"):
            answer = whole.one(event.answer_index)
            return complete_of(answer, event.answer_index, prompt_tokens)
        if asked.stream and event.commit.token_ids:
            return chunk_of(event, prompt_tokens)
        return None

    return translate


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._router = serving.router
        self._directory = serving.router.config.model or bundled_directory()  # of the tokenizer
        self._began = time.monotonic()
        self._archive: bytes | None = None

    async def Generate(  # type: ignore[override]  # the stub knows only generators
        self,
        request: engine.GenerateRequest,
        context: Context,
    ) -> None:
        with naming(partial(_path_of, asked=request)):
            await self._serving.stream(
                lambda: request_of(request, self._router.tokenizer.chat_end_ids),
                context,
                partial(_translator, request),
                is_stream=request.stream,
            )

    async def Abort(self, request: engine.AbortRequest, context: Context) -> engine.AbortResponse:
        """Ends what runs here of these requests, as far as they are the caller's own."""
        tenant = self._serving.tenant().name
        for request_id in request.request_ids:
            self._router.requests.cancel(request_id, tenant)
        return engine.AbortResponse()

    async def HealthCheck(
        self, request: engine.HealthCheckRequest, context: Context
    ) -> engine.HealthCheckResponse:
        """The same as gRPC's own health of this service; raises `Unavailable` as long as no model
        is known, so that a gateway asks again before it asks for one."""
        self._router.seats.catalogue.find(None)
        healthy = self._router.seats.can_serve()
        return engine.HealthCheckResponse(healthy=healthy, message="" if healthy else CANNOT_SERVE)

    async def GetModelInfo(
        self, request: engine.GetModelInfoRequest, context: Context
    ) -> engine.GetModelInfoResponse:
        """The one model of the fleet; raises `Unavailable`, and `InvalidRequest` if it has more."""
        return describe_model(self._router.seats.catalogue.find(None))

    async def GetServerInfo(
        self, request: engine.GetServerInfoRequest, context: Context
    ) -> engine.GetServerInfoResponse:
        return engine.GetServerInfoResponse(
            active_requests=self._router.requests.num_running,
            uptime_seconds=time.monotonic() - self._began,
            server_type="effuse",
            data_parallel_size=1,
            max_num_seqs=self._router.admission.max_running,
        )

    async def GetLoads(
        self, request: engine.GetLoadsRequest, context: Context
    ) -> engine.GetLoadsResponse:
        """Requests of this router, pages of the fleet's decode workers."""
        admission = self._router.admission
        decode = [one for one in self._router.fleet.records() if one.does("decode")]
        most = sum(one.capacity.total_pages * one.capacity.page_size for one in decode)
        free = sum(one.load.free_pages * one.capacity.page_size for one in decode)
        load = engine.SchedulerLoad(
            num_running_reqs=admission.num_running,
            num_waiting_reqs=admission.num_waiting,
            num_total_reqs=admission.num_running + admission.num_waiting,
            num_used_tokens=min(most - free, _MOST_INT32),
            max_total_num_tokens=min(most, _MOST_INT32),
            token_usage=(most - free) / most if most else 0.0,
            max_running_requests=admission.max_running,
        )
        return engine.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=version("effuse"),
            dp_rank_count=1, loads=[load],
        )  # fmt: skip

    async def GetTokenizer(
        self, request: engine.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[engine.GetTokenizerChunk]:
        """The tokenizer's files, zipped once. Raises `NotFound` if they are gone."""
        if self._archive is None:
            self._archive = await asyncio.to_thread(archive, self._directory)
        whole = self._archive
        for at in range(0, len(whole), PIECE_BYTES):
            is_last = at + PIECE_BYTES >= len(whole)
            yield engine.GetTokenizerChunk(
                data=whole[at : at + PIECE_BYTES],
                sha256=hashlib.sha256(whole).hexdigest() if is_last else "",
            )


def archive(directory: Path) -> bytes:
    """The files of a checkpoint that its tokenizer needs, in a zip archive; equal files make equal
    bytes. Raises `NotFound`."""
    there = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not there:
        raise NotFound("the tokenizer's files have been moved or removed")
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as zipped:
        for path in there:
            zipped.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return held.getvalue()
