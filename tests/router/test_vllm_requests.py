"""A gateway's request in vLLM's terms, and effuse's version of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from router.fake_model import EOS, model_info

from effuse.compat import vllm_engine_pb2 as engine
from effuse.protos.errors import InvalidRequest
from effuse.router.vllm_engine import chunk_of, complete_of, describe_model, request_of
from effuse.v1 import generation_pb2 as pb

NEUTRAL = engine.SamplingParams(top_p=1.0, repetition_penalty=1.0, n=1, skip_special_tokens=True)
CHAT_END = 7


def asked(params: engine.SamplingParams, **fields: object) -> engine.GenerateRequest:
    prompt = engine.TokenizedInput(original_text="how many?", input_ids=[1, 2, 3])
    return engine.GenerateRequest(
        request_id="mine", tokenized=prompt, sampling_params=params, **fields # type: ignore[arg-type]
    )  # fmt: skip


def test_what_a_gateways_client_left_out_is_the_models() -> None:
    request = request_of(asked(NEUTRAL), [CHAT_END])
    assert request == pb.GenerateRequest(
        request_id="mine",
        prompt_token_ids=pb.TokenIds(ids=[1, 2, 3]),
        sampling=pb.SamplingParams(),
        stopping=pb.StoppingParams(stop_token_ids=[CHAT_END]),
        output=pb.OutputOptions(token_ids=True),
    )


def test_what_it_sets_is_kept() -> None:
    params = engine.SamplingParams(
        temperature=0.0, top_p=0.5, top_k=7, max_tokens=9, stop=["x"], stop_token_ids=[5],
        ignore_eos=True, seed=-1, min_p=0.5, presence_penalty=1.0, frequency_penalty=-1.0,
        repetition_penalty=1.5, min_tokens=2, logit_bias={3: 1.0}, logprobs=0,
    )  # fmt: skip
    request = request_of(asked(params), [CHAT_END])
    assert request.sampling == pb.SamplingParams(
        temperature=0.0, top_p=0.5, top_k=7, seed=(1 << 64) - 1, min_p=0.5, presence_penalty=1.0,
        frequency_penalty=-1.0, repetition_penalty=1.5, logit_bias={3: 1.0},
    )  # fmt: skip
    assert request.stopping == pb.StoppingParams(
        max_tokens=9, min_tokens=2, stop=["x"], stop_token_ids=[5], ignore_eos=True
    )
    assert request.output == pb.OutputOptions(token_ids=True, logprobs=0)


def test_text_is_encoded_here() -> None:
    request = request_of(engine.GenerateRequest(text="how many?"))
    assert (request.prompt, request.HasField("request_id")) == ("how many?", False)


REFUSED = {
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "logprobs": {"logprobs": -1},
    "prompt_logprobs": {"prompt_logprobs": 0},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 5},
    "logit_bias": {"logit_bias": {-3: 1.0}},
    "regex": {"regex": ".*"},
    "json_object": {"json_object": True},
    "choice": {"choice": engine.ChoiceConstraint(choices=["a"])},
}


@pytest.mark.parametrize(("name", "fields"), REFUSED.items(), ids=REFUSED.keys())
def test_what_effuse_has_not_is_refused(name: str, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of(asked(engine.SamplingParams(**fields)))  # type: ignore[arg-type]
    assert [one.field for one in caught.value.violations] == [f"sampling_params.{name}"]


def test_every_violation_is_named_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of(
            asked(
                engine.SamplingParams(n=2, prompt_logprobs=1),
                mm_inputs=engine.Media(),
                media_refs=engine.Media(),
                extra_mm_inputs=[engine.Media()],
                kv_transfer_params=engine.KvTransferParams(),
                kv_transfer_params_json="{}",
                data_parallel_rank=1,
            )
        )
    assert {one.field for one in caught.value.violations} == {
        "sampling_params.prompt_logprobs", "mm_inputs", "media_refs",
        "extra_mm_inputs", "kv_transfer_params", "kv_transfer_params_json", "data_parallel_rank",
    }  # fmt: skip
    assert request_of(asked(NEUTRAL, data_parallel_rank=0)).request_id == "mine"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (pb.GenerateResponse(finish_reason=pb.FINISH_REASON_LENGTH), {"finish_reason": "length"}),
        (
            pb.GenerateResponse(finish_reason=pb.FINISH_REASON_STOP, end_token_id=EOS),
            {"finish_reason": "stop", "matched_token_id": EOS},
        ),
        (
            pb.GenerateResponse(finish_reason=pb.FINISH_REASON_STOP, stop_string="="),
            {"finish_reason": "stop", "matched_stop_str": "="},
        ),
    ],
    ids=["length", "id", "string"],
)
def test_the_end_of_an_answer(answer: pb.GenerateResponse, told: dict[str, Any]) -> None:
    usage = pb.Usage(prompt_tokens=3, completion_tokens=2)
    answer.MergeFrom(pb.GenerateResponse(token_ids=[8, 9], usage=usage))
    assert complete_of(answer, 1, prompt_tokens=3).complete == engine.GenerateComplete(
        output_ids=[8, 9], prompt_tokens=3, completion_tokens=2, index=1, **told
    )


def test_log_probabilities_stand_beside_their_tokens() -> None:
    logprobs = [
        pb.TokenLogprobs(logprob=-0.5, top_token_ids=[8, 1], top_logprobs=[-0.5, -2.0]),
        pb.TokenLogprobs(logprob=-1.0, top_token_ids=[9, 1], top_logprobs=[-1.0, -3.0]),
    ]
    commit = pb.BlockCommit(token_ids=[8, 9], num_tokens=2, logprobs=logprobs)
    event = pb.GenerateStreamResponse(answer_index=2, commit=commit)
    assert chunk_of(event, prompt_tokens=3).chunk.index == 2
    told = chunk_of(event, prompt_tokens=3).chunk.output_logprobs
    assert (list(told.token_logprobs), list(told.token_ids)) == ([-0.5, -1.0], [8, 9])
    assert [(list(one.token_ids), list(one.values)) for one in told.top_logprobs] == [
        ([8, 1], [-0.5, -2.0]),
        ([9, 1], [-1.0, -3.0]),
    ]
    bare = pb.GenerateStreamResponse(commit=pb.BlockCommit(token_ids=[8]))
    assert not chunk_of(bare, 3).chunk.HasField("output_logprobs")


def test_a_model_tells_its_defaults_so_that_gateways_send_them() -> None:
    model = model_info()
    told = describe_model(model)
    assert json.loads(told.default_sampling_params_json) == {"temperature": 0.0, "top_p": 1.0}
    assert (told.served_model_name, list(told.eos_token_ids)) == ("fake", [EOS])
    assert told.max_req_input_len == model.max_model_len - 1
