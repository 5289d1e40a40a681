"""Requests and answers of vLLM's engine protocol, as effuse means them; functions of values.

What a gateway cannot know is left to the model: algorithm, threshold, and what is neutral there
(top_p 1, top_k 0), since a gateway sends these for what its own client left out. What effuse has
not is refused, unless it has no effect. Not here: the calls (`vllm_engine.py`).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

from effuse.compat import vllm_engine_pb2 as engine
from effuse.placement.records import ModelInfo
from effuse.router.findings import Findings
from effuse.v1 import generation_pb2 as pb

SEEDS: Final = 1 << 64
_FINISH_REASONS: Final = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_WITHOUT_EFFECT: Final = {
    "min_p": (0.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (0.0, 1.0),
    "min_tokens": (0,),
    "n": (0, 1),
    "include_stop_str_in_output": (False,),
}
"""Scalars that are refused but for these values."""
_PRESENCE: Final = ("logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_INPUTS: Final = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs")


def request_of(
    asked: engine.GenerateRequest, chat_end_ids: Collection[int] = ()
) -> pb.GenerateRequest:
    """The request that a gateway means; raises `InvalidRequest` with all that effuse does not do.

    `chat_end_ids`: ids that end an answer in a chat. A gateway renders chats itself, and does not
    say whether ids are one."""
    _check(asked)
    params = asked.sampling_params
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else chat_end_ids)}
    request = pb.GenerateRequest(
        request_id=asked.request_id or None,
        sampling=pb.SamplingParams(
            temperature=params.temperature if params.HasField("temperature") else None,
            top_p=None if params.top_p in (0.0, 1.0) else params.top_p,
            top_k=params.top_k or None,
            seed=params.seed % SEEDS if params.HasField("seed") else None,
        ),
        stopping=pb.StoppingParams(
            max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
            stop=params.stop,
            stop_token_ids=sorted(stop_ids),
            ignore_eos=params.ignore_eos or None,
        ),
        output=pb.OutputOptions(token_ids=True),
    )
    if asked.HasField("tokenized"):
        request.prompt_token_ids.ids.extend(asked.tokenized.input_ids)
    elif asked.HasField("text"):
        request.prompt = asked.text
    return request


def chunk_of(commit: pb.BlockCommit, prompt_tokens: int) -> engine.GenerateResponse:
    """Final tokens as a chunk."""
    chunk = engine.GenerateStreamChunk(
        token_ids=commit.token_ids,
        prompt_tokens=prompt_tokens,
        completion_tokens=commit.token_offset + commit.num_tokens,
    )
    return engine.GenerateResponse(chunk=chunk)


def complete_of(finished: pb.Finished, token_ids: Collection[int]) -> engine.GenerateResponse:
    """The end of an answer of these tokens."""
    complete = engine.GenerateComplete(
        output_ids=token_ids,
        finish_reason=_FINISH_REASONS[finished.finish_reason],
        prompt_tokens=finished.usage.prompt_tokens,
        completion_tokens=finished.usage.completion_tokens,
    )
    match finished.WhichOneof("matched_stop"):
        case "end_token_id":
            complete.matched_token_id = finished.end_token_id
        case "stop_string":
            complete.matched_stop_str = finished.stop_string
    return engine.GenerateResponse(complete=complete)


def describe_model(model: ModelInfo) -> engine.GetModelInfoResponse:
    """What a gateway is told of a model."""
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


def _check(asked: engine.GenerateRequest) -> None:
    findings, params = Findings(), asked.sampling_params
    for name, neutral in _WITHOUT_EFFECT.items():
        value = getattr(params, name)
        if value not in neutral:
            form = " or ".join(f"{one:g}" for one in neutral)
            findings.add(f"sampling_params.{name}", f"{form}, as effuse has no other", f"{value:g}")
    given = [f"sampling_params.{name}" for name in _PRESENCE if params.HasField(name)]
    constraint = params.WhichOneof("constraint")
    given += [f"sampling_params.{constraint}"] if constraint else []
    given += ["sampling_params.logit_bias"] if params.logit_bias else []
    given += [name for name in _INPUTS if asked.HasField(name)]
    given += ["extra_mm_inputs"] if asked.extra_mm_inputs else []
    given += ["data_parallel_rank"] if asked.data_parallel_rank else []
    for name in given:
        findings.add(name, "it unset, as effuse does not have it", "a value")
    findings.raise_any()
