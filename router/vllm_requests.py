"""Requests and answers of vLLM's engine protocol in effuse's terms; functions of values.

The model chooses settings that a gateway cannot know: algorithm, threshold, and neutral values
(top_p 1, top_k 0), because a gateway sends these for settings that its client left out. Settings
that effuse lacks are refused, unless they have no effect. Not here: the calls (`vllm_engine.py`).
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
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else chat_end_ids)}
    request = pb.GenerateRequest(
        request_id=asked.request_id or None,
        n=None if params.n < 2 else params.n,
        sampling=pb.SamplingParams(
            temperature=params.temperature if params.HasField("temperature") else None,
            top_p=None if params.top_p in (0.0, 1.0) else params.top_p,
            top_k=params.top_k or None,
            min_p=params.min_p or None,
            presence_penalty=params.presence_penalty or None,
            frequency_penalty=params.frequency_penalty or None,
            repetition_penalty=(
                None if params.repetition_penalty in (0.0, 1.0) else params.repetition_penalty
            ),
            logit_bias=params.logit_bias,
            seed=params.seed % SEEDS if params.HasField("seed") else None,
        ),
        stopping=pb.StoppingParams(
            max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
            min_tokens=params.min_tokens or None,
            stop=params.stop,
            stop_token_ids=sorted(stop_ids),
            ignore_eos=params.ignore_eos or None,
        ),
        output=pb.OutputOptions(
            token_ids=True, logprobs=params.logprobs if params.HasField("logprobs") else None
        ),
    )
    if asked.HasField("tokenized"):
        request.prompt_token_ids.ids.extend(asked.tokenized.input_ids)
    elif asked.HasField("text"):
        request.prompt = asked.text
    return request


def chunk_of(event: pb.GenerateStreamResponse, prompt_tokens: int) -> engine.GenerateResponse:
    """Final tokens as a chunk."""
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
        finish_reason=_FINISH_REASONS[answer.finish_reason],
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


def _logprobs_of(said: pb.BlockCommit | pb.GenerateResponse) -> engine.OutputLogProbs | None:
    """Log-probabilities of its tokens; None if they were not asked for."""
    if not said.logprobs:
        return None
    return engine.OutputLogProbs(
        token_logprobs=[one.logprob for one in said.logprobs],
        token_ids=said.token_ids,
        top_logprobs=[
            engine.TopLogProbs(values=one.top_logprobs, token_ids=one.top_token_ids)
            for one in said.logprobs
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


def _check(asked: engine.GenerateRequest) -> None:
    findings, params = Findings(), asked.sampling_params
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
        findings.add(name, "it unset, because effuse does not support it", "a value")
    findings.raise_any()
